"""Routes that answer at once: sessions, sampling sessions, runs and checkpoints."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from sqlalchemy.exc import IntegrityError

from .._errors import BadRequest, Conflict, Exhausted, NotFound
from .._keys import Principal
from .._paths import CheckpointUri, parse_checkpoint_id, parse_uri
from .._service import Service
from ..http._auth import Caller, get_service, request_id
from ..http._json import StrictRoute
from ..store import Checkpoint, Run, Sampler, Session
from . import _wire as wire
from ._common import as_texts, check_metadata, trains
from ._futures import own_sampler
from ._handlers import tinker_uri

control_router = APIRouter(route_class=StrictRoute, tags=["tinker"])

SomeId = Annotated[str, Path(max_length=200)]
CheckpointId = Annotated[str, Path(max_length=160, description="`weights/NAME` or `sampler_weights/NAME`")]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=1_000_000_000)]


@control_router.get("/healthz", name="tinker_healthz")
async def healthz() -> wire.Health:
    """Whether the server answers. Needs no key."""
    return wire.Health()


@control_router.get("/get_server_capabilities", name="tinker_capabilities")
async def get_server_capabilities(request: Request, caller: Caller) -> wire.Capabilities:
    """The base models."""
    return wire.Capabilities(
        supported_models=[
            wire.SupportedModel(
                model_name=model.name, max_context_length=model.max_length, trainable=model.trainable, sampleable=model.sampler is not None
            )
            for model in get_service(request).config.models
        ]
    )


# Sessions.


@control_router.post("/client/config", name="tinker_client_config")
async def client_config(request: Request, caller: Caller, body: wire.ClientConfigRequest) -> wire.ClientConfig:
    """How the client shall behave."""
    return wire.ClientConfig(sample_max_concurrent_requests=min(2000, get_service(request).config.limits.queued_calls))


@control_router.post("/client/dynamic_config", name="tinker_dynamic_config")
async def dynamic_config(caller: Caller, body: wire.ClientConfigRequest) -> wire.Nothing:
    """What may change while a client runs: nothing."""
    return wire.Nothing()


@control_router.post("/create_session", name="tinker_create_session")
async def create_session(request: Request, caller: Caller, body: wire.CreateSession) -> wire.SessionCreated:
    """Begins a session, which heartbeats keep alive."""
    metadata = check_metadata(body.model_dump(exclude_none=True))
    session = await get_service(request).sessions.create(caller, {**metadata, "protocol": "tinker"})
    return wire.SessionCreated(session_id=session.id)


@control_router.post("/session_heartbeat", name="tinker_session_heartbeat")
async def session_heartbeat(request: Request, caller: Caller, body: wire.SessionHeartbeat) -> wire.HeartbeatAnswer:
    """Keeps a session alive; 410 for one that is over."""
    sessions = get_service(request).sessions
    await sessions.check(caller, body.session_id)
    sessions.beat(caller, body.session_id)
    return wire.HeartbeatAnswer()


@control_router.post("/telemetry", name="tinker_telemetry")
async def telemetry(caller: Caller, body: wire.Telemetry) -> wire.TelemetryAnswer:
    """Takes what the client tells about itself, and keeps nothing of it."""
    return wire.TelemetryAnswer()


@control_router.post("/sessions/{session_id}/finish", name="tinker_finish_session")
async def finish_session(request: Request, caller: Caller, session_id: SomeId, body: wire.FinishSession) -> wire.Nothing:
    """Ends a session. Its runs and checkpoints stay."""
    with contextlib.suppress(Exhausted):  # it is over already, and the first reason stands
        await get_service(request).sessions.end(caller, session_id)
    return wire.Nothing()


@control_router.get("/sessions", name="tinker_sessions")
async def sessions(request: Request, caller: Caller, limit: Limit = 20, offset: Offset = 0) -> wire.SessionList:
    """One's sessions, newest first."""
    service = get_service(request)
    found, _ = await service.io(lambda: service.store.page(Session, tenant=caller.tenant, limit=limit, offset=offset))
    return wire.SessionList(sessions=[session.id for session in found])


@control_router.get("/sessions/{session_id}", name="tinker_session")
async def session(request: Request, caller: Caller, session_id: SomeId) -> wire.SessionInfo:
    """A session's runs and sampling sessions."""
    service = get_service(request)

    def read() -> wire.SessionInfo:
        found = service.store.get(Session, session_id)
        if found is None or found.tenant != caller.tenant:
            raise NotFound(f"there is no session {session_id}")
        mine = {"session_id": session_id}
        runs, _ = service.store.page(Run, tenant=caller.tenant, where=mine, limit=10_000, newest_first=False)
        samplers, _ = service.store.page(Sampler, tenant=caller.tenant, where=mine, limit=10_000, newest_first=False)
        given = found.metadata.get("user_metadata")
        return wire.SessionInfo(
            training_run_ids=[run.id for run in runs],
            sampler_ids=[sampler.id for sampler in samplers],
            user_metadata=as_texts(given) if isinstance(given, dict) else None,
            display_name=found.metadata.get("display_name"),
        )

    return await service.io(read)


# Sampling sessions and models.


@control_router.post("/create_sampling_session", name="tinker_create_sampling_session")
async def create_sampling_session(request: Request, caller: Caller, body: wire.CreateSamplingSession) -> wire.SamplingSessionCreated:
    """A base model, or a checkpoint over it, to sample from."""
    service = get_service(request)
    await service.sessions.check(caller, body.session_id)
    sampler = await service.io(_create_sampler, service, caller, body)
    return wire.SamplingSessionCreated(sampling_session_id=sampler.id)


def _create_sampler(service: Service, caller: Principal, body: wire.CreateSamplingSession) -> Sampler:
    checkpoint, base_model = None, body.base_model
    if body.model_path is not None:
        uri = parse_uri(body.model_path, "tinker")
        _, run = service.checkpoints.find(caller.tenant, uri, may_be_public=True)
        checkpoint, base_model = str(uri), run.base_model
    if base_model is None:
        raise BadRequest("base_model or model_path is needed")
    if service.config.model(base_model) is None:
        raise NotFound(f"there is no base model {base_model[:200]!r}")
    if base_model not in service.samplers:
        raise BadRequest(f"{base_model} is trained here, but not sampled from")
    sampler = Sampler(
        id=f"{body.session_id}:sample:{body.sampling_session_seq_id}",
        tenant=caller.tenant,
        session_id=body.session_id,
        base_model=base_model,
        checkpoint=checkpoint,
        created_at=time.time(),
    )
    try:
        return service.store.add(sampler)
    except IntegrityError:
        before = own_sampler(service, caller, sampler.id)
        if (before.base_model, before.checkpoint) != (base_model, checkpoint):
            raise Conflict(f"{sampler.id} is there already, and is another") from None
        return before


@control_router.get("/samplers/{sampler_id}", name="tinker_sampler")
async def sampler(request: Request, caller: Caller, sampler_id: SomeId) -> wire.SamplerInfo:
    """A sampling session."""
    service = get_service(request)
    found = await service.io(own_sampler, service, caller, sampler_id)
    path = None if found.checkpoint is None else tinker_uri(parse_uri(found.checkpoint))
    return wire.SamplerInfo(sampler_id=found.id, base_model=found.base_model, model_path=path)


@control_router.post("/get_info", name="tinker_get_info")
async def get_info(request: Request, caller: Caller, body: wire.GetInfo) -> wire.ModelInfo:
    """What a model is. The tokenizer is that of the server's folder where client and server share a machine, else that of the model's name."""
    service = get_service(request)
    run = await service.io(service.runs.own, caller, body.model_id)
    model = service.config.model(run.base_model)
    tokenizer = model.path if model is not None and not service.config.is_public else None
    return wire.ModelInfo(
        model_id=run.id,
        model_data=wire.ModelData(model_name=run.base_model, tokenizer_id=tokenizer),
        lora_rank=run.lora.get("r", 8),
        model_name=run.base_model,
    )


# Runs and checkpoints.


@control_router.get("/training_runs", name="tinker_training_runs")
async def training_runs(request: Request, caller: Caller, limit: Limit = 20, offset: Offset = 0) -> wire.TrainingRuns:
    """One's training runs, newest first: those of the native interface, too."""
    service = get_service(request)

    def read() -> wire.TrainingRuns:
        runs, count = service.store.page(Run, tenant=caller.tenant, limit=limit, offset=offset)
        return wire.TrainingRuns(training_runs=_runs(service, runs), cursor=wire.Cursor(offset=offset, limit=limit, total_count=count))

    return await service.io(read)


@control_router.get("/training_runs/{run_id}", name="tinker_training_run")
async def training_run(request: Request, caller: Caller, run_id: SomeId) -> wire.TrainingRun:
    """A training run."""
    service = get_service(request)
    return await service.io(lambda: _runs(service, [service.runs.own(caller, run_id)])[0])


@control_router.get("/training_runs/{run_id}/checkpoints", name="tinker_run_checkpoints")
async def run_checkpoints(request: Request, caller: Caller, run_id: SomeId) -> wire.Checkpoints:
    """A run's checkpoints, newest first."""
    service = get_service(request)
    found = await service.io(lambda: service.checkpoints.of_run(service.runs.own(caller, run_id)))
    return wire.Checkpoints(checkpoints=[_checkpoint(each) for each in found])


@control_router.get("/checkpoints", name="tinker_checkpoints")
async def checkpoints(request: Request, caller: Caller, limit: Limit = 100, offset: Offset = 0) -> wire.Checkpoints:
    """One's checkpoints of all runs, newest first."""
    service = get_service(request)
    found, count = await service.io(lambda: service.store.page(Checkpoint, tenant=caller.tenant, limit=limit, offset=offset))
    return wire.Checkpoints(checkpoints=[_checkpoint(each) for each in found], cursor=wire.Cursor(offset=offset, limit=limit, total_count=count))


@control_router.put("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl", name="tinker_checkpoint_ttl")
async def set_ttl(request: Request, caller: Caller, run_id: SomeId, checkpoint_id: CheckpointId, body: wire.SetTtl) -> wire.Nothing:
    """How long a checkpoint is kept from now on."""
    expires_at = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
    await _change(request, caller, run_id, checkpoint_id, "set_ttl", expires_at=expires_at)
    return wire.Nothing()


@control_router.post("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/publish", name="tinker_publish_checkpoint")
async def publish(request: Request, caller: Caller, run_id: SomeId, checkpoint_id: CheckpointId) -> Response:
    """Lets everybody with a key load a checkpoint, and sample from it."""
    await _change(request, caller, run_id, checkpoint_id, "publish_checkpoint", public=True)
    return Response(status_code=204)


@control_router.delete("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/publish", name="tinker_unpublish_checkpoint")
async def unpublish(request: Request, caller: Caller, run_id: SomeId, checkpoint_id: CheckpointId) -> Response:
    """Keeps a checkpoint to oneself again."""
    await _change(request, caller, run_id, checkpoint_id, "unpublish_checkpoint", public=False)
    return Response(status_code=204)


@control_router.delete("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}", name="tinker_delete_checkpoint")
async def delete_checkpoint(request: Request, caller: Caller, run_id: SomeId, checkpoint_id: CheckpointId) -> wire.Nothing:
    """Deletes that checkpoint and nothing else."""
    service = get_service(request)

    def delete() -> None:
        checkpoint, uri = _own_checkpoint(service, caller, run_id, checkpoint_id)
        service.audit(caller, "delete_checkpoint", str(uri), request_id(request))
        service.checkpoints.delete(checkpoint)

    await service.io(delete)
    return wire.Nothing()


@control_router.post("/weights_info", name="tinker_weights_info")
async def weights_info(request: Request, caller: Caller, body: wire.WeightsInfoRequest) -> wire.WeightsInfo:
    """What a checkpoint, one's own or a public one, is of."""
    service = get_service(request)
    _, run = await service.io(service.checkpoints.find, caller.tenant, parse_uri(body.tinker_path, "tinker"), may_be_public=True)
    return wire.WeightsInfo(base_model=run.base_model, lora_rank=run.lora.get("r", 8), **trains(run.lora))


def _own_checkpoint(service: Service, caller: Principal, run_id: str, checkpoint_id: str) -> tuple[Checkpoint, CheckpointUri]:
    uri = parse_checkpoint_id(run_id, checkpoint_id)
    checkpoint, _ = service.checkpoints.find(caller.tenant, uri)
    return checkpoint, uri


async def _change(request: Request, caller: Principal, run_id: str, checkpoint_id: str, action: str, **values: object) -> None:
    service = get_service(request)

    def change() -> None:
        checkpoint, uri = _own_checkpoint(service, caller, run_id, checkpoint_id)
        service.audit(caller, action, str(uri), request_id(request))
        service.store.change_checkpoint(checkpoint, **values)

    await service.io(change)


def _runs(service: Service, runs: list[Run]) -> list[wire.TrainingRun]:
    """Runs as the wire has them. Blocks."""
    latest = service.checkpoints.latest(runs)
    return [_run(run, latest.get((run.id, "weights")), latest.get((run.id, "sampler_weights"))) for run in runs]


def _run(run: Run, weights: Checkpoint | None, sampler_weights: Checkpoint | None) -> wire.TrainingRun:
    return wire.TrainingRun(
        training_run_id=run.id,
        base_model=run.base_model,
        model_owner=run.tenant,
        corrupted=run.corrupted,
        lora_rank=run.lora.get("r", 8),
        last_request_time=_time(run.used_at),
        last_checkpoint=None if weights is None else _checkpoint(weights),
        last_sampler_checkpoint=None if sampler_weights is None else _checkpoint(sampler_weights),
        user_metadata=as_texts(run.metadata),
    )


def _checkpoint(checkpoint: Checkpoint) -> wire.Checkpoint:
    return wire.Checkpoint(
        checkpoint_id=f"{checkpoint.kind}/{checkpoint.name}",
        checkpoint_type="training" if checkpoint.kind == "weights" else "sampler",
        time=_time(checkpoint.created_at),
        tinker_path=tinker_uri(CheckpointUri(checkpoint.run_id, checkpoint.kind, checkpoint.name)),
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.public,
        user_metadata=as_texts(checkpoint.metadata),
        expires_at=None if checkpoint.expires_at is None else _time(checkpoint.expires_at),
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
