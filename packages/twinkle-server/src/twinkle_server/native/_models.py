"""The verbs of models: `/model/{model}/twinkle/...`. Each is a call in the model's queue, so they run in the order in which they come."""

# Not `from __future__ import annotations`: routes are made in a loop, with the body's type as their annotation.

import json
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from twinkle_client import types as wire

from .._errors import Conflict, Invalid, NotFound
from .._keys import Principal
from .._paths import CheckpointUri, check_label, check_name
from .._service import Service, trainer_queue
from ..engine import Context, Reply
from ..http._auth import Caller, get_service
from ..http._json import StrictRoute, parse_json
from ..store import Checkpoint, Run
from ._answers import answer_call, id_of_key
from ._convert import check_loss, output_of, rows_of, tensor_of
from ._examples import with_example

ModelName = Annotated[str, Path(max_length=200, description="A base model's name; it may contain '/', raw or percent-encoded")]
Handle = Callable[[Context, Any], bytes]
# Metrics that are always measured.
_METRICS = frozenset({"loss", "grad_norm", "lr", "entropy", "skipped_steps", "Loss", "TrainMetric"})
_LORA = TypeAdapter(wire.LoraConfig)
_LORA_FIELDS = ("r", "lora_alpha", "target_modules", "lora_dropout", "use_rslora")
_TEMPLATE_OPTIONS = frozenset({"max_length", "truncation", "system"})


def models_router(service: Service, prefix: str) -> APIRouter:
    """The routes; registers how their calls run."""
    router = APIRouter(route_class=StrictRoute, tags=["model"])
    for verb, (kind, result, handle, text) in VERBS.items():
        service.calls.register(f"native.{verb}", decode=_decoder(kind), run=_runner(handle))
        router.add_api_route(
            f"/model/{{model:path}}{prefix}/{verb}",
            _endpoint(verb, kind),
            methods=["POST"],
            response_model=result,
            responses={202: {"model": wire.Future, "description": "With `Prefer: respond-async`: not finished yet"}},
            name=f"model_{verb}",
            description=text,
            openapi_extra=with_example(f"model_{verb}"),
        )
    router.add_api_route(
        f"/model/{{model:path}}{prefix}/upload_to_hub",
        _upload_to_hub,
        methods=["POST"],
        name="model_upload_to_hub",
        response_model=wire.UploadStarted,
        openapi_extra=with_example("model_upload_to_hub"),
    )
    router.add_api_route(
        f"/model/{{model:path}}{prefix}/upload_status/{{upload_id}}",
        _upload_status,
        methods=["GET"],
        name="model_upload_status",
        response_model=wire.UploadStatus,
    )
    return router


def session_of(request: Request) -> str | None:
    """The session that a request names."""
    return request.headers.get("x-twinkle-session-id") or None


def _endpoint(verb: str, kind: type[wire.Verb]) -> Callable[..., Any]:
    async def endpoint(request: Request, caller: Caller, model: ModelName, body: kind) -> Response:  # pyright: ignore[reportInvalidTypeForm]
        service = get_service(request)
        queue = trainer_queue(model)
        service.calls.queue(queue)
        session_id = session_of(request)
        if session_id is not None:
            await service.sessions.check(caller, session_id)
        run = None
        if verb == "add_adapter_to_model":
            run = await service.io(_new_run, service, caller, request, model, session_id, body)
        elif verb != "create" and (body.adapter_name or verb not in ("forward_only", "get_train_configs")):
            run = await service.io(service.runs.named, caller, session_id, model, body.adapter_name)
        return await answer_call(request, caller, f"native.{verb}", queue=queue, value=body, run=run)

    return endpoint


def _new_run(service: Service, caller: Principal, request: Request, model: str, session_id: str | None, body: wire.AddAdapter) -> Run:
    if not body.adapter_name:
        raise Invalid("adapter_name is empty, which is the base model's name")
    run_id = id_of_key("run-", caller, request)
    before = service.store.find_run(caller.tenant, session_id, model, body.adapter_name)
    if before is not None and before.id != run_id and (session_id is None or before.session_id == session_id):
        raise Conflict(f"there is an adapter {body.adapter_name[:200]!r} already, of the run {before.id}")
    run, _ = service.runs.create(
        caller,
        model,
        lora_of(body.config),
        run_id=run_id,
        session_id=session_id,
        name=body.adapter_name,
        label=check_label(body.save_dir or "", "save_dir"),
        metadata=body.user_metadata,
    )
    return run


def lora_of(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a LoRA configuration in peft's names; Invalid for what cannot be expressed."""
    from twinkle_train import LoraConfig

    try:
        # What only peft has, and says nothing, is dropped; what cannot be expressed is refused.
        lora = LoraConfig.of(config).to_dict()
        checked = _LORA.validate_python({name: lora[name] for name in _LORA_FIELDS})
    except ValidationError as error:
        raise Invalid("; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))[:1000]) from None
    except (TypeError, AttributeError) as error:
        raise Invalid(f"the LoRA configuration is wrong: {str(error)[:300]}") from None
    modules = checked.target_modules
    return checked.to_dict() | {"target_modules": modules if isinstance(modules, str) else list(modules)}


def _decoder(kind: type[wire.Verb]) -> Callable[[bytes], Any]:
    return lambda payload: kind.model_validate(parse_json(payload))


def _runner(handle: Handle) -> Callable[[Context, Any], Reply]:
    return lambda context, value: Reply(body=handle(context, value))


def _result(value: Any) -> bytes:
    return to_json({"result": value}, inf_nan_mode="strings")


def _create(context: Context, body: wire.CreateModel) -> bytes:
    context.the_trainer()
    return _result(None)


def _add_adapter(context: Context, body: wire.AddAdapter) -> bytes:
    run = context.the_run()
    try:
        context.the_trainer().touch(run)
    except BaseException:  # raised again
        context.service.store.end_run(run.id)  # it is not there: nobody should find it, and its name may be tried again
        raise
    return _result(wire.AdapterAdded(adapter_name=body.adapter_name, training_run_id=run.id).model_dump())


def _rows(context: Context, inputs: list[Any]) -> list[Any]:
    config = context.the_trainer().config
    options = {} if context.run is None else context.run.setup.get("template", {})
    return rows_of(inputs, lambda row: context.the_trainer().template(options).encode(row), max_rows=config.max_rows, max_length=config.max_length)


def _forward(verb: str) -> Handle:
    def handle(context: Context, body: Any) -> bytes:
        trainer = context.the_trainer()
        arguments: dict[str, Any] = {"inputs": _rows(context, body.inputs)}
        if verb != "forward":
            given = body.micro_batch_size is not None or body.micro_batch_tokens is not None
            arguments["micro_batch_size"] = body.micro_batch_size if given else trainer.config.micro_batch_size
            arguments["micro_batch_tokens"] = body.micro_batch_tokens
        if verb == "forward_only":
            arguments["top_k"] = body.top_k
        output = trainer.call(context.run, verb, **arguments)
        if verb == "forward_backward" and output.loss is not None:
            context.measured({"loss": output.loss, **output.metrics})
        return output_of(output)

    return handle


def _plain(verb: str, *names: str) -> Handle:
    def handle(context: Context, body: Any) -> bytes:
        result = context.the_trainer().call(context.the_run(), verb, **{name: getattr(body, name) for name in names})
        if verb in ("clip_grad_norm", "clip_grad_and_step"):
            context.measured({"grad_norm": result})
        return _result(result)

    return handle


def _set_loss(context: Context, body: wire.SetLoss) -> bytes:
    context.the_trainer().configure(context.the_run(), "set_loss", {"loss": body.loss, **check_loss(body.loss, body.options)})
    return _result(None)


def _set_optimizer(context: Context, body: wire.SetOptimizer) -> bytes:
    context.the_trainer().configure(context.the_run(), "set_optimizer", body.model_dump(exclude={"adapter_name"}))
    return _result(None)


def _adjust_optimizer(context: Context, body: wire.AdjustOptimizer) -> bytes:
    context.the_trainer().adjust(context.the_run(), body.model_dump(exclude={"adapter_name"}, exclude_none=True))
    return _result(None)


def _set_lr_scheduler(context: Context, body: wire.SetLrScheduler) -> bytes:
    context.the_trainer().configure(context.the_run(), "set_lr_scheduler", body.model_dump(exclude={"adapter_name"}))
    return _result(None)


def template_options(service: Service, tenant: str, model: str, body: wire.SetTemplate) -> dict[str, Any]:
    """The options of a template; Invalid for one of another model, or options that it does not have."""
    options = dict(body.options)
    if isinstance(body.template, wire.ProcessorRef):
        options = service.processors.template_options(tenant, body.template.processor_id, model) | options
    elif body.template not in (model, "Template", "default"):
        raise Invalid(f"the template is {model!r} (its own tokenizer) or one that the server holds, not {body.template[:200]!r}")
    if options.pop("model_id", model) != model:
        raise Invalid(f"the template is that of {model!r}")
    if unknown := sorted(set(options) - _TEMPLATE_OPTIONS):
        raise Invalid(f"a template has no options {', '.join(unknown)[:300]}; it has {', '.join(sorted(_TEMPLATE_OPTIONS))}")
    return options


def _set_template(context: Context, body: wire.SetTemplate) -> bytes:
    run, trainer = context.the_run(), context.the_trainer()
    options = template_options(context.service, run.tenant, run.base_model, body)
    trainer.template(options)  # what is wrong is told now
    context.service.store.change(Run, run.id, setup={**run.setup, "template": options})
    return _result(None)


def _set_processor(context: Context, body: wire.SetProcessor) -> bytes:
    if body.processor != "InputProcessor" or body.options:
        raise Invalid("the processor is 'InputProcessor' without options here: how batches are collated is the deployment's to say")
    return _result(None)


def _add_metric(context: Context, body: wire.AddMetric) -> bytes:
    if body.metric not in _METRICS or body.options:
        raise Invalid(f"the metric is one of {', '.join(sorted(_METRICS))}, without options, not {body.metric[:200]!r}; all are measured always")
    return _result(None)


def _apply_patch(context: Context, body: wire.ApplyPatch) -> bytes:
    raise Invalid(f"there is no patch {body.patch[:200]!r} on this server's list, which is empty")


def _get_state_dict(context: Context, body: wire.GetStateDict) -> bytes:
    tensors = context.the_trainer().call(context.the_run(), "get_state_dict")
    return _result({name: tensor_of(tensor).model_dump() for name, tensor in tensors.items()})


def _get_train_configs(context: Context, body: wire.GetTrainConfigs) -> bytes:
    found = dict(context.the_trainer().call(context.run, "get_train_configs"))
    # Other tenants' adapters, and where the model lies, are nobody's business.
    adapters = found.pop("adapters", {})
    found["model"] = context.the_trainer().config.name
    return _result(json.loads(json.dumps(found | ({} if context.run is None else {"adapter": adapters.get(context.run.adapter)}), default=str)))


def _save(context: Context, body: wire.Save) -> bytes:
    run = context.the_run()
    checkpoint = context.service.checkpoints.save(
        context.the_trainer(),
        run,
        body.checkpoint_type,
        body.name,
        with_state=body.save_optimizer,
        user_state=body.user_state,
        metadata=body.user_metadata,
        overwrite=False,
    )
    uri = CheckpointUri(run.id, checkpoint.kind, checkpoint.name)
    return wire.Saved(twinkle_path=str(uri), checkpoint_dir=str(context.service.folders.path(checkpoint.folder))).model_dump_json().encode()


def find_weights(service: Service, tenant: str, path: str, run: Run | None) -> tuple[Checkpoint, Run]:
    """The checkpoint that a path means: a URI, or (with a run) `NAME`, `weights/NAME` or `sampler_weights/NAME` of it."""
    if "://" in path or run is None:
        return service.checkpoints.find(tenant, path, may_be_public=True)
    kind, slash, name = path.partition("/")
    uri = CheckpointUri(run.id, kind, check_name(name)) if slash and kind in ("weights", "sampler_weights") else None  # pyright: ignore[reportArgumentType]
    return service.checkpoints.find(tenant, uri or CheckpointUri(run.id, "weights", check_name(path)))


def _load(with_state: bool) -> Handle:
    def handle(context: Context, body: wire.Load) -> bytes:
        run = context.the_run()
        checkpoint, source = find_weights(context.service, context.tenant, body.path, run)
        user_state = context.service.checkpoints.load(context.the_trainer(), run, checkpoint, source, with_state=with_state)
        return _result(user_state if with_state else None)

    return handle


async def _upload_to_hub(request: Request, caller: Caller, model: ModelName, body: wire.UploadToHub) -> wire.UploadStarted:
    """Refused (422): this server sends nothing to other services. Download the checkpoint, and upload it from there."""
    raise Invalid(
        "this server sends nothing to other services, and has kept no token: fetch the checkpoint (client.download_checkpoint), and upload its "
        "folder `adapter` from where you are (huggingface_hub.upload_folder)"
    )


async def _upload_status(request: Request, caller: Caller, model: ModelName, upload_id: str) -> wire.UploadStatus:
    """404: there are no uploads."""
    raise NotFound("there is no such upload")


_Nothing = wire.Result[None]
VERBS: dict[str, tuple[type[Any], Any, Handle, str]] = {
    "create": (wire.CreateModel, _Nothing, _create, "Waits until the base model is loaded."),
    "add_adapter_to_model": (wire.AddAdapter, wire.Result[wire.AdapterAdded], _add_adapter, "A new run: an adapter of this name for the session."),
    "forward": (wire.Forward, wire.Result[wire.ModelOutput], _forward("forward"), "Log-probabilities; the graph is kept for calculate_loss."),
    "forward_only": (wire.ForwardOnly, wire.Result[wire.ModelOutput], _forward("forward_only"), "Log-probabilities, without a graph."),
    "forward_backward": (wire.ForwardBackward, wire.Result[wire.ModelOutput], _forward("forward_backward"), "Loss and gradients, which accumulate."),
    "calculate_loss": (wire.CalculateLoss, wire.Result[float], _plain("calculate_loss"), "The loss of the last forward."),
    "backward": (wire.Backward, _Nothing, _plain("backward"), "Adds the gradients of the last loss."),
    "clip_grad_norm": (wire.ClipGradNorm, wire.Result[float], _plain("clip_grad_norm", "max_grad_norm"), "The norm before clipping."),
    "step": (wire.Step, _Nothing, _plain("step"), "One optimizer step."),
    "zero_grad": (wire.ZeroGrad, _Nothing, _plain("zero_grad"), "Drops gradients."),
    "lr_step": (wire.LrStep, wire.Result[float], _plain("lr_step"), "The learning rate of the next step."),
    "clip_grad_and_step": (wire.ClipGradAndStep, wire.Result[float], _plain("clip_grad_and_step", "max_grad_norm"), "Clip, step, zero, schedule."),
    "set_loss": (wire.SetLoss, _Nothing, _set_loss, "The loss, by a name of the list."),
    "set_optimizer": (wire.SetOptimizer, _Nothing, _set_optimizer, "A fresh optimizer."),
    "adjust_optimizer": (wire.AdjustOptimizer, _Nothing, _adjust_optimizer, "Other settings for the optimizer that is there; its state stays."),
    "set_lr_scheduler": (wire.SetLrScheduler, _Nothing, _set_lr_scheduler, "The learning-rate schedule."),
    "set_template": (wire.SetTemplate, _Nothing, _set_template, "How conversations are encoded."),
    "set_processor": (wire.SetProcessor, _Nothing, _set_processor, "The collator, by a name of the list."),
    "add_metric": (wire.AddMetric, _Nothing, _add_metric, "A metric, by a name of the list."),
    "apply_patch": (wire.ApplyPatch, _Nothing, _apply_patch, "A patch, by a name of the list (which is empty: always 422)."),
    "calculate_metric": (wire.CalculateMetric, wire.Result[dict[str, float]], _plain("calculate_metric"), "Means since the last call."),
    "get_state_dict": (wire.GetStateDict, wire.Result[dict[str, wire.TensorData]], _get_state_dict, "The adapter's matrices."),
    "get_train_configs": (wire.GetTrainConfigs, wire.Result[dict[str, Any]], _get_train_configs, "How the trainer and the adapter are set up."),
    "save": (wire.Save, wire.Saved, _save, "A checkpoint; whole and listed when this is answered."),
    "load": (wire.Load, _Nothing, _load(False), "Weights of a checkpoint; optimizer and counters stay."),
    "resume_from_checkpoint": (
        wire.ResumeFromCheckpoint,
        wire.Result[dict[str, Any]],
        _load(True),
        "Weights, optimizer and counters; the user_state.",
    ),
}
