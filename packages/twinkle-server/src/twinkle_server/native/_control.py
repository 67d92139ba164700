"""Health, sessions, runs and checkpoints."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from twinkle_client import types as wire

from .._errors import Forbidden
from .._paths import CheckpointUri, parse_checkpoint_id
from .._service import Service
from ..http._auth import Caller, get_service, request_id
from ..http._json import StrictRoute
from ..store import Checkpoint, Run
from ._answers import id_of_key
from ._examples import with_example

control_router = APIRouter(route_class=StrictRoute, tags=["control"])

RunId = Annotated[str, Path(max_length=128)]
CheckpointId = Annotated[str, Path(max_length=160, description="`weights/NAME` or `sampler_weights/NAME`")]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=1_000_000_000)]


@control_router.get("/healthz")
async def healthz() -> wire.Health:
    """Whether the server answers. Needs no key."""
    return wire.Health(status="ok")


@control_router.get("/healthz/deep")
async def healthz_deep(request: Request, response: Response) -> wire.Health:
    """Whether models and database are ready, too: 503 where they are not. Needs no key."""
    service = get_service(request)
    checks = await service.io(service.checks)
    ready = all(state == "ok" for state in checks.values())
    response.status_code = 200 if ready else 503
    return wire.Health(status="ok" if ready else "not ready", checks=checks)


@control_router.get("/get_server_capabilities")
async def get_server_capabilities(request: Request, caller: Caller) -> wire.ServerCapabilities:
    """The base models."""
    return wire.ServerCapabilities(
        supported_models=[
            wire.SupportedModel(
                model_name=model.name, max_length=model.max_length, is_trainable=model.trainable, has_sampler=model.sampler is not None
            )
            for model in get_service(request).config.models
        ]
    )


@control_router.get("/capacity_info")
async def capacity_info(request: Request, caller: Caller) -> wire.CapacityInfo:
    """How many adapters can be in memory, over all models. Others wait on disk, and idle ones make way for them."""
    largest, used = get_service(request).capacity
    return wire.CapacityInfo(max_loras=largest, used_loras=used, free_loras=largest - used)


@control_router.post("/create_session", openapi_extra=with_example("create_session"))
async def create_session(request: Request, caller: Caller, body: wire.CreateSession) -> wire.Session:
    """Begins a session, which heartbeats keep alive."""
    session = await get_service(request).sessions.create(caller, body.metadata, id_of_key("ses-", caller, request))
    return wire.Session(session_id=session.id)


@control_router.post("/session_heartbeat", openapi_extra=with_example("session_heartbeat"))
async def session_heartbeat(request: Request, caller: Caller, body: wire.SessionHeartbeat) -> wire.HeartbeatAnswer:
    """Keeps a session alive; 404 for one that is over or was never there."""
    get_service(request).sessions.beat(caller, body.session_id)
    return wire.HeartbeatAnswer()


@control_router.get("/training_runs")
async def training_runs(request: Request, caller: Caller, limit: Limit = 20, offset: Offset = 0, all_users: bool = False) -> wire.TrainingRuns:
    """Training runs, newest first. all_users: of all tenants, for keys with the scope 'admin'."""
    if all_users and not caller.is_admin:
        raise Forbidden("all_users needs a key with the scope 'admin'")
    service = get_service(request)

    def read() -> wire.TrainingRuns:
        runs, count = service.store.page(Run, tenant=None if all_users else caller.tenant, limit=limit, offset=offset, where={"ended_at": None})
        return wire.TrainingRuns(training_runs=runs_of(service, runs), cursor=wire.Cursor(limit=limit, offset=offset, total_count=count))

    return await service.io(read)


@control_router.get("/training_runs/{run_id}")
async def training_run(request: Request, caller: Caller, run_id: RunId) -> wire.TrainingRun:
    """A training run."""
    service = get_service(request)
    return await service.io(lambda: runs_of(service, [service.runs.visible(caller, run_id)])[0])


@control_router.get("/training_runs/{run_id}/checkpoints")
async def run_checkpoints(request: Request, caller: Caller, run_id: RunId) -> wire.Checkpoints:
    """A run's checkpoints, newest first; only whole ones."""
    service = get_service(request)

    def read() -> wire.Checkpoints:
        run = service.runs.visible(caller, run_id)  # one that has ended, too: its checkpoints stay
        return wire.Checkpoints(checkpoints=[checkpoint_of(each, run) for each in service.checkpoints.of_run(run)])

    return await service.io(read)


@control_router.delete("/training_runs/{run_id}")
async def end_run(request: Request, caller: Caller, run_id: RunId) -> wire.DeleteAnswer:
    """Ends a run: its adapter and optimizer are gone, its checkpoints stay. Its name may be used again."""
    service = get_service(request)

    def end() -> Run:
        run = service.runs.end(caller, run_id)
        service.audit(caller, "end_run", run.id, request_id(request))
        return run

    run = await service.io(end)
    service.drop(run)
    return wire.DeleteAnswer(success=True)


@control_router.get("/checkpoint_path/{run_id}/{checkpoint_id:path}")
async def checkpoint_path(request: Request, caller: Caller, run_id: RunId, checkpoint_id: CheckpointId) -> wire.CheckpointPath:
    """Where a checkpoint is: its folder on the server, and its URI."""
    service = get_service(request)
    uri = parse_checkpoint_id(run_id, checkpoint_id)
    checkpoint, _ = await service.io(service.checkpoints.find, caller.tenant, uri)
    return wire.CheckpointPath(path=str(service.folders.path(checkpoint.folder)), twinkle_path=str(uri))


@control_router.delete("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}")
async def delete_checkpoint(request: Request, caller: Caller, run_id: RunId, checkpoint_id: CheckpointId) -> wire.DeleteAnswer:
    """Deletes that checkpoint and nothing else."""
    service = get_service(request)
    uri = parse_checkpoint_id(run_id, checkpoint_id)

    def delete() -> bool:
        checkpoint, _ = service.checkpoints.find(caller.tenant, uri)
        service.audit(caller, "delete_checkpoint", str(uri), request_id(request))
        return service.checkpoints.delete(checkpoint)

    done = await service.io(delete)
    return wire.DeleteAnswer(success=done, message=None if done else "it was deleted already")


@control_router.post("/weights_info", openapi_extra=with_example("weights_info"))
async def weights_info(request: Request, caller: Caller, body: wire.WeightsInfoRequest) -> wire.WeightsInfo:
    """What a checkpoint is of."""
    service = get_service(request)
    _, run = await service.io(service.checkpoints.find, caller.tenant, body.twinkle_path, may_be_public=True)
    return wire.WeightsInfo(training_run_id=run.id, base_model=run.base_model, model_owner=run.tenant, is_lora=True, lora_rank=run.lora.get("r", 8))


def runs_of(service: Service, runs: list[Run]) -> list[wire.TrainingRun]:
    """Runs as the wire has them. Blocks."""
    latest = service.checkpoints.latest(runs)
    return [_run(run, {kind: checkpoint_of(each, run) for (owner, kind), each in latest.items() if owner == run.id}) for run in runs]


def _run(run: Run, latest: dict[str, wire.Checkpoint]) -> wire.TrainingRun:
    return wire.TrainingRun(
        training_run_id=run.id,
        base_model=run.base_model,
        model_owner=run.tenant,
        save_dir=run.label or None,
        is_lora=True,
        corrupted=run.corrupted,
        lora_rank=run.lora.get("r", 8),
        last_request_time=_time(run.used_at),
        last_checkpoint=latest.get("weights"),
        last_sampler_checkpoint=latest.get("sampler_weights"),
        user_metadata=run.metadata or None,
    )


def checkpoint_of(checkpoint: Checkpoint, run: Run) -> wire.Checkpoint:
    """A checkpoint as the wire has it."""
    uri = CheckpointUri(checkpoint.run_id, checkpoint.kind, checkpoint.name)
    return wire.Checkpoint(
        checkpoint_id=f"{checkpoint.kind}/{checkpoint.name}",
        checkpoint_type=checkpoint.kind,
        time=_time(checkpoint.created_at),
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.public,
        twinkle_path=str(uri),
        base_model=run.base_model,
        is_lora=True,
        lora_rank=run.lora.get("r", 8),
        user_metadata=checkpoint.metadata or None,
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
