"""The trainer contract over megatron-core, without remoting."""

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from twinkle_data import Batch, InputProcessor
from twinkle_mesh import DeviceMesh, launcher_world_size
from twinkle_train import (
    CheckpointInfo,
    CheckpointWriter,
    ComputeLoss,
    ConfigError,
    Inputs,
    LoraConfig,
    LossOutput,
    LossScale,
    OnNonFinite,
    OptimizerConfig,
    Row,
    TokenOutputs,
    TrainerBase,
    check_files,
    check_same_trainer,
    init_process_group,
    read_adapter,
    read_checkpoint,
    read_checkpoint_pieces,
    read_generators,
    save_adapter,
    write_hf_checkpoint,
)

from . import cpu
from ._bridge import check_same_model, find_checkpoint, read_config
from ._errors import CheckpointError, LayoutError, PlatformError
from ._layout import check_divides, check_mesh
from ._torch_dist import add_megatron_files

if TYPE_CHECKING:
    from ._engine import Engine
    from ._views import View

logger = logging.getLogger(__name__)

MixedPrecision = Literal["no", "bf16", "fp16"]
Recompute = Literal["full", "selective"]

_DTYPES: dict[str, torch.dtype] = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CARRIED_OVER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


class MegatronTrainer(TrainerBase):
    """What MegatronModel is on each of its ranks; see there."""

    def __init__(
        self,
        model_id: str | os.PathLike[str],
        device_mesh: DeviceMesh | None = None,
        mixed_precision: MixedPrecision = "no",
        *,
        seed: int = 0,
        recompute: Recompute | None = None,
        use_distributed_optimizer: bool = False,
        overlap_communication: bool = False,
        initial_loss_scale: float = 4096.0,
        on_non_finite: OnNonFinite = "error",
        layers_per_stage: Sequence[int] | None = None,
        transformer_options: Mapping[str, Any] | None = None,
        timeout_s: float = 600,
    ) -> None:
        if mixed_precision not in _DTYPES:
            raise ConfigError(f"mixed_precision is 'no', 'bf16' or 'fp16', not {mixed_precision!r}")
        LossScale(initial_loss_scale)  # checks it
        if recompute not in (None, "full", "selective"):
            raise ConfigError(f"recompute is None, 'full' or 'selective', not {recompute!r}")
        mesh = _on_this_machine(device_mesh or DeviceMesh.from_sizes(dp_size=launcher_world_size()))
        check_mesh(mesh)
        self._path = find_checkpoint(os.fspath(model_id))
        self._hf_config = hf_config = read_config(self._path)
        stages = None if layers_per_stage is None else tuple(layers_per_stage)
        check_divides(hf_config, mesh, stages)
        self._mesh = mesh
        self._dtype = _DTYPES[mixed_precision]
        self._settings = {
            "model": os.fspath(model_id),
            "mixed_precision": mixed_precision,
            "seed": seed,
            "recompute": recompute,
            "use_distributed_optimizer": use_distributed_optimizer,
            "overlap_communication": overlap_communication,
            "initial_loss_scale": initial_loss_scale,
            "on_non_finite": on_non_finite,
            "layers_per_stage": stages,
            "transformer_options": dict(transformer_options or {}),
        }
        engine_class = _engine_class(mesh.device_type)
        init_process_group(mesh.device_type, timeout_s)
        self._engine: Engine = engine_class(
            hf_config,
            self._path,
            mesh,
            self._dtype,
            options=_recompute_options(recompute) | dict(transformer_options or {}),
            layers_per_stage=stages,
            distributed_optimizer=use_distributed_optimizer,
            overlap=overlap_communication,
            loss_scale=initial_loss_scale,
            seed=seed,
            timeout_s=timeout_s,
        )
        self._checkpoints = CheckpointWriter(timeout_s, error_type=CheckpointError, add_files=add_megatron_files)
        self._replays = False
        self._rows: list[Row] = []
        self._rows_of: WeakKeyDictionary[Batch, list[Row]] = WeakKeyDictionary()
        super().__init__(
            groups=self._engine.groups,
            # Rows are aligned to what the layout needs where they become the model's, so any collation will do.
            processor=InputProcessor(pad_token_id=_pad_token_id(hf_config)),
            has_graph=mesh.pp_size == 1,
            # Experts exchange tokens between the data ranks.
            equal_micro_batches=self._engine.has_experts,
            packed_rows=True,
            on_non_finite=on_non_finite,
            skips_overflow=self._dtype is torch.float16,
            # Tensor parallelism pads the vocabulary: tokens beyond it would be looked up in rows that mean nothing.
            vocab_size=hf_config.vocab_size,
        )

    # What the contract leaves to an engine.

    def _forward(self, adapter_name: str, batch: Batch) -> TokenOutputs:
        (view,) = self._views([batch])
        return self._engine.forward(adapter_name, view)

    def _backward(self, adapter_name: str, output: LossOutput) -> None:
        pending = self._state(adapter_name).require_pending("backward")
        self._engine.backward(adapter_name, output, pending.batch)

    def _run(self, adapter_name: str, batches: Sequence[Batch], compute_loss: ComputeLoss | None) -> list[TokenOutputs] | None:
        return self._engine.run(adapter_name, self._views(batches), compute_loss, self._wanted)

    def _views(self, batches: Sequence[Batch]) -> "list[View]":
        """The micro-batches as the model sees them; its routers replay what their rows carry, when that is asked for."""
        views = self._engine.views(batches, self._processor.pad_token_id)
        # What was replayed before is kept until here: a backward that recomputes needs it.
        self._engine.route_as_usual()
        if self._replays:
            self._engine.replay_routing(views, [self._rows_of.get(batch, self._rows) for batch in batches])
        return views

    def _reduce_gradients(self, adapter_name: str) -> None:
        self._engine.trainable(adapter_name).reduce_gradients()

    def _scale_gradients(self, adapter_name: str, factor: float) -> None:
        self._engine.trainable(adapter_name).gradients.scale(factor)

    def _gradient_norm(self, adapter_name: str) -> float:
        return self._engine.trainable(adapter_name).gradient_norm()

    def _make_optimizer(self, adapter_name: str, config: OptimizerConfig) -> None:
        self._engine.trainable(adapter_name).make_optimizer(config)

    def _adjust_optimizer(self, adapter_name: str, config: OptimizerConfig) -> None:
        self._engine.trainable(adapter_name).adjust_optimizer(config)

    def _optimizer_step(self, adapter_name: str, learning_rate: float) -> None:
        self._checkpoints.check(self._engine.device)
        self._engine.step(adapter_name, learning_rate)

    def _step_skipped(self, adapter_name: str) -> None:
        loss_scale = self._engine.trainable(adapter_name).loss_scale
        if loss_scale is not None:
            loss_scale.update(overflowed=True)

    def _zero_gradients(self, adapter_name: str) -> None:
        self._engine.trainable(adapter_name).zero_gradients()

    def _export_gradients(self, adapter_name: str) -> dict[str, NDArray[np.float32]]:
        return _on_rank_zero(self._engine.export_gradients(adapter_name))

    def _add_adapter(self, adapter_name: str, config: LoraConfig) -> None:
        self._engine.add_adapter(adapter_name, config)

    def _remove_adapter(self, adapter_name: str) -> None:
        self._engine.remove_adapter(adapter_name)

    def _engine_config(self) -> dict[str, Any]:
        return {"trainer": type(self).__name__, **self._settings, "mesh": dataclasses.asdict(self._mesh)}

    def _features(self, inputs: Inputs) -> list[Row]:
        features = super()._features(inputs)
        self._rows = features
        return features

    def _num_micro_batches(self, needed: int, num_rows: int, *, is_free: bool) -> int | None:
        if self._mesh.pp_size > 1 and is_free:
            # One a stage, as far as there are rows, so that the pipeline is not idle.
            needed = min(self._mesh.pp_size, num_rows)
        return super()._num_micro_batches(needed, num_rows, is_free=is_free) or needed

    def _collate(self, rows: list[Row]) -> Batch:
        batch = super()._collate(rows)
        self._rows_of[batch] = rows
        return batch

    # Training checkpoints.

    def _checkpoint_entries(self) -> dict[str, Any]:
        return {
            "trainer": "MegatronModel",
            "model_type": self._hf_config.model_type,
            "mixed_precision": self._settings["mixed_precision"],
            "mesh": dataclasses.asdict(self._mesh),
            "loss_scales": {name: scale.state() for name in self._states if (scale := self._engine.trainable(name).loss_scale) is not None},
        }

    def _write_checkpoint(self, target: Path, info: CheckpointInfo, *, background: bool) -> None:
        pieces = self._engine.checkpoint_pieces({name: each.step for name, each in info.adapters.items()})
        self._checkpoints.save(target, info, pieces, self._engine.generator_states(), background=background)

    def wait_for_checkpoint(self) -> None:
        self._checkpoints.wait()

    def resume_from_checkpoint(self, path: str | os.PathLike[str], *, adapter_name: str | None = None, saved_as: str | None = None) -> dict[str, Any]:
        self._checkpoints.wait()
        return super().resume_from_checkpoint(path, adapter_name=adapter_name, saved_as=saved_as)

    def _check_checkpoint(self, path: Path, info: CheckpointInfo) -> None:
        check_same_trainer(path, info, self._checkpoint_entries(), error_type=CheckpointError)
        check_files(path, info, error_type=CheckpointError)

    def _read_checkpoint(self, path: Path, info: CheckpointInfo) -> None:
        steps = {name: each.step for name, each in info.adapters.items()}
        # Of one adapter among others none: dropout of the others must not jump back.
        everything = steps.keys() == read_checkpoint(path).adapters.keys()
        same_mesh = info.engine["mesh"] == self._checkpoint_entries()["mesh"]
        generators = read_generators(path, error_type=CheckpointError) if everything and same_mesh else None
        for name, step in steps.items():
            self._engine.trainable(name).make_optimizer_states(step)
        read_checkpoint_pieces(path, self._engine.checkpoint_pieces(steps), renamed=info.renamed, error_type=CheckpointError)
        for name in steps:
            self._engine.trainable(name).pieces_filled()
            if (scale := self._engine.trainable(name).loss_scale) is not None:
                scale.load(info.engine["loss_scales"][info.renamed.get(name, name)])
        if generators is not None:
            self._engine.set_generator_states(generators)
        elif everything:
            logger.info("%s was written by another layout: dropout's generators start anew", path)

    # What the contract leaves to a trainer.

    def calculate_metric(self, *, adapter_name: str = "") -> dict[str, float]:
        loss_scale = self._engine.trainable(adapter_name).loss_scale
        scale = {} if loss_scale is None else {"loss_scale": loss_scale.value}
        return super().calculate_metric(adapter_name=adapter_name) | scale | self._engine.take_statistics()

    def record_routing(self, inputs: Inputs, micro_batch_size: int | None = None) -> list[NDArray[np.int16]]:
        """Which experts each token goes to: int16 ``[T, expert layers, k]`` a row, in the order of the layers; what
        ``user_data["routed_experts"]`` of a row must be to be replayed. Collective; no rows of models without experts.

        Raises:
            ConfigError: the model has no experts.
        """
        self._need_experts("record_routing")
        self._use_inputs_of(self._state(""))
        features = self._features(inputs)
        self._engine.route_as_usual()
        batches, _ = self._micro_batches(features, micro_batch_size, None)
        tokens = np.concatenate(self._engine.record_routing(self._engine.views(batches, self._processor.pad_token_id)))
        ends = np.cumsum([len(row) for row in features])
        return np.split(tokens[: ends[-1]], ends[:-1])

    def set_router_replay(self, enabled: bool = True) -> None:
        """From now on every token goes to the experts that its row's ``user_data["routed_experts"]`` names, whatever the router would choose; the
        router still weighs them. So a policy is trained on the routing that it sampled with (R3, arXiv:2510.11370).

        Raises:
            ConfigError: the model has no experts.
        """
        self._need_experts("set_router_replay")
        self._replays = enabled

    def _need_experts(self, method: str) -> None:
        if not self._engine.has_experts:
            raise ConfigError(f"{method}: a {self._hf_config.model_type!r} model has no experts and no routing")
        if self._settings["transformer_options"].get("moe_router_fusion"):
            raise ConfigError(f"{method} needs transformer_options without moe_router_fusion: the fused router chooses experts by itself")

    def save(self, path: str | os.PathLike[str], *, adapter_name: str = "", merge: bool = False) -> None:
        self._state(adapter_name)
        self._check_whole(adapter_name)
        if adapter_name and not merge:
            save_adapter(self.iter_adapter(adapter_name), Path(path), self.adapter_config(adapter_name), error_type=CheckpointError)
        else:
            write_hf_checkpoint(
                self._engine.merged_weights(adapter_name),
                self._path,
                Path(path),
                self._dtype,
                carried_over=_CARRIED_OVER,
                error_type=CheckpointError,
            )

    def load(self, path: str | os.PathLike[str], *, adapter_name: str = "") -> None:
        self._state(adapter_name)
        if adapter_name:
            adapter = self._engine.adapter(adapter_name)
            matrices = read_adapter(Path(path), adapter.lora, error_type=CheckpointError)
            adapter.check(matrices, os.fspath(path))
            with self._loading([adapter_name]):
                adapter.fill(matrices)
            return
        folder = find_checkpoint(os.fspath(path))
        check_same_model(folder, self._hf_config)
        self._engine.check_weights(folder)
        with self._loading([""]):
            self._engine.load(folder)

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight, whole, under its Hugging Face name, on rank 0; others send it their parts and yield nothing. All ranks iterate to the end."""
        self._state("")
        self._check_whole("")
        return self._engine.export_weights()

    def iter_adapter(self, adapter_name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Every matrix of an adapter, whole, under peft's name. Collective: all ranks iterate to the end."""
        self._state(adapter_name)
        self._check_whole(adapter_name)
        return self._engine.adapter(adapter_name).export()

    def iter_merged(self, adapter_name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight as by `iter_weights`, with an adapter merged into them. Collective: all ranks iterate to the end."""
        self._state(adapter_name)
        self._check_whole(adapter_name)
        return self._engine.merged_weights(adapter_name)

    def adapter_config(self, adapter_name: str) -> dict[str, Any]:
        """The content of an adapter's adapter_config.json in peft's format.

        Raises:
            UnknownAdapterError: there is none of that name.
        """
        self._state(adapter_name)
        adapter = self._engine.adapter(adapter_name)
        return adapter.lora.to_dict() | {"target_modules": adapter.target_names, "base_model_name_or_path": self._settings["model"]}

    def get_state_dict(self, *, adapter_name: str = "") -> dict[str, torch.Tensor]:
        self._state(adapter_name)
        self._check_whole(adapter_name)
        keep = torch.distributed.get_rank() == 0
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._engine.export_weights(adapter_name) if keep}

    def export_weights(self, *, adapter_name: str = "") -> dict[str, NDArray[np.float32]]:
        self._state(adapter_name)
        self._check_whole(adapter_name)
        return _on_rank_zero(self._engine.export_weights(adapter_name))

    def close(self) -> None:
        """Frees this process for a model with another layout. The model must not be used afterwards.

        Raises:
            CheckpointError: a checkpoint that was still written in the background failed.
        """
        self._closed = True
        try:
            self._checkpoints.close()
        finally:
            self._engine.close()


def _on_rank_zero(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, NDArray[np.float32]]:
    keep = torch.distributed.get_rank() == 0
    return {name: tensor.to("cpu", torch.float32, copy=True).numpy() for name, tensor in tensors if keep}


def _on_this_machine(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.device_type == "cuda" and not torch.cuda.is_available():
        logger.info("the mesh's device type is 'cuda' and this machine has no GPU: training on the CPU")
        return mesh.with_device_type("cpu")
    if mesh.device_type not in ("cpu", "cuda"):
        raise LayoutError(f"MegatronModel runs on 'cpu' and 'cuda' devices, not on {mesh.device_type!r}")
    return mesh


def _engine_class(device_type: str) -> "type[Engine]":
    """The engine, once the platform is chosen: on a CPU megatron-core is adapted, on GPUs it runs unmodified."""
    if device_type == "cpu":
        cpu.enable()
    elif cpu.is_enabled():
        raise PlatformError("this process runs megatron-core on the CPU platform: build GPU models in a process of their own")
    else:
        try:
            import transformer_engine  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
        except ModuleNotFoundError as error:
            if error.name != "transformer_engine":
                raise
            raise ImportError(
                "MegatronModel on GPUs needs TransformerEngine: pip install 'twinkle-megatron[te]'", name="transformer_engine"
            ) from None
    from ._engine import Engine

    return Engine


def _recompute_options(recompute: Recompute | None) -> dict[str, Any]:
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {} if recompute is None else {"recompute_granularity": "selective"}


def _pad_token_id(hf_config: Any) -> int:
    return hf_config.pad_token_id if hf_config.pad_token_id is not None and 0 <= hf_config.pad_token_id < hf_config.vocab_size else 0
