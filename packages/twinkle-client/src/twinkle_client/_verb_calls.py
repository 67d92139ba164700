"""The verbs as calls. The waiting and the asynchronous handles share them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from . import _verbs as v
from ._calls import Call, make, post, result_of
from ._convert import lora_of, params_of, plain, prompts_of, rows_of
from ._formats import ModelOutput
from ._settings import in_path

ResultT = TypeVar("ResultT")


class ModelCalls:
    """The verbs of a model, by its name."""

    def __init__(self, name: str) -> None:
        self._base = f"/model/{in_path(name)}{{prefix}}"

    def _verb(self, verb: str, kind: type[v.Verb], read: Callable[[bytes], ResultT], **fields: Any) -> Call[ResultT]:
        return post(f"{self._base}/{verb}", make(kind, **fields), read, is_long=True, needs_session=True)

    def create(self) -> Call[Any]:
        return self._verb("create", v.CreateModel, result_of(Any))

    def add_adapter_to_model(self, adapter_name: str, config: Any, save_dir: Any, user_metadata: Mapping[str, Any] | None) -> Call[v.AdapterAdded]:
        return self._verb(
            "add_adapter_to_model",
            v.AddAdapter,
            result_of(v.AdapterAdded),
            adapter_name=adapter_name,
            config=lora_of(config),
            save_dir=None if save_dir is None else os.fspath(save_dir),
            user_metadata=user_metadata,
        )

    def forward(self, inputs: Any, adapter_name: str) -> Call[ModelOutput]:
        return self._verb("forward", v.Forward, result_of(ModelOutput), inputs=rows_of(inputs), adapter_name=adapter_name)

    def forward_only(self, inputs: Any, **fields: Any) -> Call[ModelOutput]:
        return self._verb("forward_only", v.ForwardOnly, result_of(ModelOutput), inputs=rows_of(inputs), **fields)

    def forward_backward(self, inputs: Any, **fields: Any) -> Call[ModelOutput]:
        return self._verb("forward_backward", v.ForwardBackward, result_of(ModelOutput), inputs=rows_of(inputs), **fields)

    def calculate_loss(self, adapter_name: str) -> Call[float]:
        return self._verb("calculate_loss", v.CalculateLoss, result_of(float), adapter_name=adapter_name)

    def backward(self, adapter_name: str) -> Call[None]:
        return self._verb("backward", v.Backward, _nothing, adapter_name=adapter_name)

    def clip_grad_norm(self, max_grad_norm: float, adapter_name: str) -> Call[float]:
        return self._verb("clip_grad_norm", v.ClipGradNorm, result_of(float), max_grad_norm=max_grad_norm, adapter_name=adapter_name)

    def step(self, adapter_name: str) -> Call[None]:
        return self._verb("step", v.Step, _nothing, adapter_name=adapter_name)

    def zero_grad(self, adapter_name: str) -> Call[None]:
        return self._verb("zero_grad", v.ZeroGrad, _nothing, adapter_name=adapter_name)

    def lr_step(self, adapter_name: str) -> Call[float]:
        return self._verb("lr_step", v.LrStep, result_of(float), adapter_name=adapter_name)

    def clip_grad_and_step(self, max_grad_norm: float, adapter_name: str) -> Call[float]:
        return self._verb("clip_grad_and_step", v.ClipGradAndStep, result_of(float), max_grad_norm=max_grad_norm, adapter_name=adapter_name)

    def set_loss(self, loss: str, adapter_name: str, options: Mapping[str, Any]) -> Call[None]:
        return self._verb("set_loss", v.SetLoss, _nothing, **_options(options), loss=loss, adapter_name=adapter_name)

    def set_optimizer(self, name: str, lr: float, adapter_name: str, options: Mapping[str, Any]) -> Call[None]:
        return self._verb("set_optimizer", v.SetOptimizer, _nothing, **_options(options), name=name, lr=lr, adapter_name=adapter_name)

    def adjust_optimizer(self, **fields: Any) -> Call[None]:
        return self._verb("adjust_optimizer", v.AdjustOptimizer, _nothing, **fields)

    def set_lr_scheduler(self, name: str, adapter_name: str, options: Mapping[str, Any]) -> Call[None]:
        return self._verb("set_lr_scheduler", v.SetLrScheduler, _nothing, **_options(options), name=name, adapter_name=adapter_name)

    def set_template(self, template: Any, adapter_name: str, options: Mapping[str, Any]) -> Call[None]:
        return self._verb("set_template", v.SetTemplate, _nothing, **_options(options), template=reference(template), adapter_name=adapter_name)

    def set_processor(self, processor: Any, adapter_name: str, options: Mapping[str, Any]) -> Call[None]:
        return self._verb("set_processor", v.SetProcessor, _nothing, **_options(options), processor=reference(processor), adapter_name=adapter_name)

    def add_metric(self, metric: str, adapter_name: str, options: Mapping[str, Any]) -> Call[None]:
        return self._verb("add_metric", v.AddMetric, _nothing, **_options(options), metric=metric, adapter_name=adapter_name)

    def apply_patch(self, patch: str, adapter_name: str, options: Mapping[str, Any]) -> Call[None]:
        return self._verb("apply_patch", v.ApplyPatch, _nothing, **_options(options), patch=patch, adapter_name=adapter_name)

    def calculate_metric(self, adapter_name: str) -> Call[dict[str, float]]:
        return self._verb("calculate_metric", v.CalculateMetric, result_of(dict[str, float]), adapter_name=adapter_name)

    def get_state_dict(self, adapter_name: str) -> Call[dict[str, v.TensorData]]:
        return self._verb("get_state_dict", v.GetStateDict, result_of(dict[str, v.TensorData]), adapter_name=adapter_name)

    def get_train_configs(self, adapter_name: str) -> Call[dict[str, Any]]:
        return self._verb("get_train_configs", v.GetTrainConfigs, result_of(dict[str, Any]), adapter_name=adapter_name)

    def save(self, **fields: Any) -> Call[v.Saved]:
        return self._verb("save", v.Save, v.Saved.model_validate_json, **fields)

    def load(self, path: str, adapter_name: str) -> Call[None]:
        return self._verb("load", v.Load, _nothing, path=path, adapter_name=adapter_name)

    def resume_from_checkpoint(self, path: str, adapter_name: str) -> Call[dict[str, Any]]:
        return self._verb("resume_from_checkpoint", v.ResumeFromCheckpoint, _user_state, path=path, adapter_name=adapter_name)

    def upload_to_hub(self, **fields: Any) -> Call[v.UploadStarted]:
        return self._verb("upload_to_hub", v.UploadToHub, v.UploadStarted.model_validate_json, **fields)

    def upload_status(self, request_id: str) -> Call[v.UploadStatus]:
        return Call(method="GET", path=f"{self._base}/upload_status/{in_path(request_id)}", read=v.UploadStatus.model_validate_json)


class SamplerCalls:
    """The verbs of a sampler, by its model's name."""

    def __init__(self, name: str) -> None:
        self._base = f"/sampler/{in_path(name)}{{prefix}}"

    def _verb(self, verb: str, kind: type[v.Verb], read: Callable[[bytes], ResultT], **fields: Any) -> Call[ResultT]:
        return post(f"{self._base}/{verb}", make(kind, **fields), read, is_long=True, needs_session=True)

    def create(self) -> Call[Any]:
        return self._verb("create", v.CreateModel, result_of(Any))

    def sample(self, inputs: Any, sampling_params: Any, num_samples: int | None, adapter_name: str, adapter_path: str | None) -> Call[v.Samples]:
        return self._verb(
            "sample", v.Sample, v.Samples.model_validate_json, **_sampling(inputs, sampling_params, num_samples, adapter_name, adapter_path)
        )

    def sample_stream(
        self, inputs: Any, sampling_params: Any, num_samples: int | None, adapter_name: str, adapter_path: str | None
    ) -> Call[v.SampleChunk]:
        body = make(v.Sample, **_sampling(inputs, sampling_params, num_samples, adapter_name, adapter_path))
        call = post(f"{self._base}/sample_stream", body, v.SampleChunk.model_validate_json, needs_session=True)
        # A stream that broke is not begun anew: what came of it has been used.
        return Call(method=call.method, path=call.path, read=call.read, content=call.content, is_repeatable=False, is_long=True, needs_session=True)

    def set_template(self, template: Any, options: Mapping[str, Any]) -> Call[None]:
        return self._verb("set_template", v.SetTemplate, _nothing, **_options(options), template=reference(template))

    def add_adapter_to_sampler(self, adapter_name: str, path: str) -> Call[None]:
        return self._verb("add_adapter_to_sampler", v.AddAdapterToSampler, _nothing, adapter_name=adapter_name, path=path)

    def apply_patch(self, patch: str, options: Mapping[str, Any]) -> Call[None]:
        return self._verb("apply_patch", v.ApplyPatch, _nothing, **_options(options), patch=patch)


def create_processor(processor_type: str, class_type: str, arguments: Mapping[str, Any]) -> Call[v.ProcessorCreated]:
    """An object of the server's."""
    body = make(v.CreateProcessor, **_options(arguments), processor_type=processor_type, class_type=class_type)
    return post("/processor{prefix}/create", body, v.ProcessorCreated.model_validate_json, is_long=True, needs_session=True)


def call_processor(processor_id: str, function: str, arguments: Mapping[str, Any], kind: Any) -> Call[Any]:
    """A method of such an object, whose result is of this kind."""
    body = make(v.CallProcessor, **_options(arguments), processor_id=processor_id, function=function)
    return post("/processor{prefix}/call", body, result_of(kind), is_long=True, needs_session=True)


def reference(value: Any) -> Any:
    """A handle of an object that the server holds, as a reference to it; a path as its text; else the value."""
    processor_id = getattr(value, "processor_id", None)
    return {"processor_id": processor_id} if isinstance(processor_id, str) else plain(value)


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: reference(value) for name, value in options.items()}


def _sampling(inputs: Any, sampling_params: Any, num_samples: int | None, adapter_name: str, adapter_path: str | None) -> dict[str, Any]:
    return {
        "inputs": prompts_of(inputs),
        "sampling_params": params_of(sampling_params),
        "num_samples": num_samples,
        "adapter_name": adapter_name,
        "adapter_path": adapter_path,
    }


def _nothing(content: bytes) -> None:
    """The answer of a verb that returns nothing."""


_read_state = result_of(dict[str, Any] | None)


def _user_state(content: bytes) -> dict[str, Any]:
    return _read_state(content) or {}
