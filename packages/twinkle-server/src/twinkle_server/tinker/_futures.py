"""Routes that take time: they answer with a promise at once, and retrieve_future has what came of it.

Requests on a model are numbered, and run by their numbers whatever order they arrive in; a repeated one gets the first one's promise.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from .._errors import BadRequest, Conflict, NotFound
from .._keys import Principal
from .._paths import parse_uri
from .._service import Service, sampler_queue, trainer_queue
from ..http._auth import Caller, get_service, request_id
from ..http._json import StrictRoute
from ..store import Future, Run, Sampler
from . import _wire as wire
from ._codec import PROTOBUF, read_header
from ._common import check_metadata, lora_fields

futures_router = APIRouter(route_class=StrictRoute, tags=["tinker"])

_POLL_S = 30.0  # the SDK gives up after 45
_PROTOBUF_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}}},
}


@futures_router.post("/create_model", name="tinker_create_model")
async def create_model(request: Request, caller: Caller, body: wire.CreateModel) -> wire.Promise:
    """A new adapter on a base model; its id is `SESSION:train:NUMBER`."""
    service = get_service(request)
    if body.optimizer_config is not None and body.optimizer_config.get("type", "adamw") != "adamw":
        raise BadRequest("this server trains with Adam: optimizer_config.type is 'adamw'")
    lora = lora_fields(body.lora_config or wire.LoraConfig(rank=8))
    return await _begin_run(request, service, caller, "tinker.create_model", body, body.base_model, lora)


@futures_router.post("/load_weights", name="tinker_load_weights")
async def load_weights(request: Request, caller: Caller, body: wire.LoadWeights) -> wire.Promise:
    """A checkpoint into a model that is there (model_id, seq_id) or into a new one (session_id, model_seq_id)."""
    service = get_service(request)
    uri = parse_uri(body.path, "tinker")
    if body.model_id is not None and body.seq_id is not None and body.session_id is None:
        return await _submit_on_run(request, service, caller, "tinker.load_weights", body.model_id, body.seq_id, await request.body(), body)
    if body.model_id is not None or body.session_id is None or body.model_seq_id is None:
        raise BadRequest("load_weights needs model_id and seq_id, or session_id and model_seq_id")
    _, source = await service.io(service.checkpoints.find, caller.tenant, uri, may_be_public=True)
    base_model = body.base_model or source.base_model
    if base_model != source.base_model:
        raise BadRequest(f"the checkpoint is of {source.base_model}, not of {base_model}")
    return await _begin_run(request, service, caller, "tinker.load_weights", body, base_model, source.lora)


@futures_router.post("/forward_backward", name="tinker_forward_backward", openapi_extra=_PROTOBUF_BODY)
async def forward_backward(request: Request, caller: Caller) -> wire.Promise:
    """Loss, log-probabilities and (unless `forward_only`) gradients of a batch; the body is a protobuf ForwardBackwardRequest."""
    body = await request.body()
    model_id, seq_id = read_header(body)
    return await _submit_on_run(request, get_service(request), caller, "tinker.forward_backward", model_id, seq_id, body)


@futures_router.post("/optim_step", name="tinker_optim_step")
async def optim_step(request: Request, caller: Caller, body: wire.OptimStep) -> wire.Promise:
    """A step of Adam with the gradients so far: the sum over tokens, not divided."""
    return await _submit_numbered(request, caller, "tinker.optim_step", body)


@futures_router.post("/save_weights", name="tinker_save_weights")
async def save_weights(request: Request, caller: Caller, body: wire.SaveWeights) -> wire.Promise:
    """A checkpoint to train on from."""
    return await _submit_numbered(request, caller, "tinker.save_weights", body)


@futures_router.post("/save_weights_for_sampler", name="tinker_save_weights_for_sampler")
async def save_weights_for_sampler(request: Request, caller: Caller, body: wire.SaveWeightsForSampler) -> wire.Promise:
    """A checkpoint to sample from, or (without a name) a sampling session with these weights."""
    return await _submit_numbered(request, caller, "tinker.save_weights_for_sampler", body)


@futures_router.post("/unload_model", name="tinker_unload_model")
async def unload_model(request: Request, caller: Caller, body: wire.UnloadModel) -> wire.Promise:
    """Ends a run. Its checkpoints stay, what was not saved is gone."""
    service = get_service(request)
    run = await service.io(service.runs.own, caller, body.model_id)
    future = await service.calls.submit(
        caller,
        "tinker.unload_model",
        await request.body(),
        queue=trainer_queue(run.base_model),
        value=body,
        run=run,
        dedup=f"tinker:unload:{run.id}",
        request_id=request_id(request),
    )
    return wire.Promise(request_id=future.id, model_id=run.id)


@futures_router.post("/asample", name="tinker_asample")
async def asample(request: Request, caller: Caller, body: wire.Sample) -> wire.Promise:
    """Completions of a prompt with their log-probabilities, and with `prompt_logprobs` those of the prompt."""
    service = get_service(request)
    sampler = await service.io(own_sampler, service, caller, body.sampling_session_id)
    future = await service.calls.submit(
        caller,
        "tinker.asample",
        await request.body(),
        queue=sampler_queue(sampler.base_model),
        value=body,
        dedup=f"tinker:{sampler.id}:{body.seq_id}",
        request_id=request_id(request),
    )
    return wire.Promise(request_id=future.id, sample_sequence_ids=[f"{future.id}:{index}" for index in range(body.num_samples)])


@futures_router.post(
    "/retrieve_future",
    name="tinker_retrieve_future",
    response_model=None,
    responses={
        200: {"description": "What the call returned, or that it failed", "content": {"application/json": {}, PROTOBUF: {}}},
        408: {"model": wire.TryAgain, "description": "Not yet"},
    },
)
async def retrieve_future(request: Request, caller: Caller, body: wire.RetrieveFuture) -> Response:
    """The result of a promise, waited for up to 30 seconds. It can be fetched again."""
    service = get_service(request)
    future = await service.calls.wait(caller, body.request_id, min(_POLL_S, service.config.limits.wait_s))
    if future.status == "done":
        return Response(future.result or b"", media_type=future.media_type)
    if future.status == "failed":
        status = future.error_status or 500
        failed = wire.RequestFailed(error=future.error or "the call failed", category="user" if 400 <= status < 500 and status != 429 else "server")
        return JSONResponse(failed.model_dump())
    again = wire.TryAgain(request_id=future.id, queue_state="paused_capacity" if _is_paused(service, future) else "active")
    return JSONResponse(again.model_dump(), 408)


def own_sampler(service: Service, caller: Principal, sampler_id: str) -> Sampler:
    """The tenant's sampling session; NotFound without one. Blocks."""
    sampler = service.store.get(Sampler, sampler_id)
    if sampler is None or sampler.tenant != caller.tenant:
        raise NotFound(f"there is no sampling session {sampler_id[:200]}")
    return sampler


def _is_paused(service: Service, future: Future) -> bool:
    return future.run_id is not None and future.status == "queued" and service.calls.queue(future.queue).is_paused(future.run_id)


async def _begin_run(
    request: Request, service: Service, caller: Principal, kind: str, body: wire.CreateModel | wire.LoadWeights, base_model: str, lora: Any
) -> wire.Promise:
    assert body.session_id is not None, "the caller has checked it"
    await service.sessions.check(caller, body.session_id)
    run, _ = await service.io(
        service.runs.create,
        caller,
        base_model,
        lora,
        run_id=f"{body.session_id}:train:{body.model_seq_id}",
        session_id=body.session_id,
        metadata=check_metadata(body.user_metadata),
    )
    if run.base_model != base_model or dict(run.lora) != dict(lora):
        raise Conflict(f"{run.id} is there already, and is another model")
    future = await service.calls.submit(
        caller,
        kind,
        await request.body(),
        queue=trainer_queue(run.base_model),
        value=body,
        run=run,
        dedup=f"tinker:create:{run.id}",
        request_id=request_id(request),
    )
    return wire.Promise(request_id=future.id, model_id=run.id)


async def _submit_numbered(request: Request, caller: Principal, kind: str, body: wire.OnModel) -> wire.Promise:
    return await _submit_on_run(request, get_service(request), caller, kind, body.model_id, body.seq_id, await request.body(), body)


async def _submit_on_run(
    request: Request, service: Service, caller: Principal, kind: str, model_id: str, seq_id: int, payload: bytes, value: Any = None
) -> wire.Promise:
    run: Run = await service.io(service.runs.own, caller, model_id)
    future = await service.calls.submit(
        caller,
        kind,
        payload,
        queue=trainer_queue(run.base_model),
        value=value,
        run=run,
        seq=seq_id,
        dedup=f"tinker:{run.id}:{seq_id}",
        request_id=request_id(request),
    )
    return wire.Promise(request_id=future.id, model_id=run.id)
