"""The control endpoints as calls: sessions, runs, checkpoints, capacity, health. The waiting and the asynchronous client share them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ._calls import Call, ask, get, post
from ._resources import (
    CapacityInfo,
    Checkpoint,
    CheckpointPath,
    Checkpoints,
    CreateSession,
    Curve,
    DeleteAnswer,
    Health,
    HeartbeatAnswer,
    ServerCapabilities,
    Session,
    SessionHeartbeat,
    TrainingRun,
    TrainingRuns,
    WeightsInfo,
    WeightsInfoRequest,
)
from ._settings import in_path

PAGE = 100  # runs in a page, where all are wanted


def health() -> Call[Health]:
    return get("{prefix}/healthz", Health)


def capabilities() -> Call[ServerCapabilities]:
    return get("{prefix}/get_server_capabilities", ServerCapabilities)


def capacity_info() -> Call[CapacityInfo]:
    return get("{prefix}/capacity_info", CapacityInfo)


def create_session(metadata: Mapping[str, Any] | None) -> Call[Session]:
    return post("{prefix}/create_session", CreateSession(metadata=None if metadata is None else dict(metadata)), Session.model_validate_json)


def session_heartbeat(session_id: str) -> Call[HeartbeatAnswer]:
    return ask("{prefix}/session_heartbeat", SessionHeartbeat(session_id=session_id), HeartbeatAnswer)


def training_runs(limit: int, offset: int, all_users: bool) -> Call[TrainingRuns]:
    params = {"limit": str(limit), "offset": str(offset)}
    return get("{prefix}/training_runs", TrainingRuns, params | ({"all_users": "true"} if all_users else {}))


def training_run(run_id: str) -> Call[TrainingRun]:
    return get(f"{{prefix}}/training_runs/{in_path(run_id)}", TrainingRun)


def training_curve(run_id: str, after: int) -> Call[Curve]:
    return get(f"{{prefix}}/training_runs/{in_path(run_id)}/curve", Curve, {"after": str(after)})


def checkpoints(run_id: str) -> Call[Checkpoints]:
    return get(f"{{prefix}}/training_runs/{in_path(run_id)}/checkpoints", Checkpoints)


def checkpoint_path(run_id: str, checkpoint_id: str) -> Call[CheckpointPath]:
    return get(f"{{prefix}}/checkpoint_path/{in_path(run_id, *checkpoint_id.split('/'))}", CheckpointPath)


def delete_checkpoint(run_id: str, checkpoint_id: str) -> Call[DeleteAnswer]:
    # Not repeatable: the second attempt after a lost answer would find nothing, and say so.
    path = f"{{prefix}}/training_runs/{in_path(run_id)}/checkpoints/{in_path(*checkpoint_id.split('/'))}"
    return Call(method="DELETE", path=path, read=DeleteAnswer.model_validate_json, is_repeatable=False)


def download_checkpoint(run_id: str, checkpoint_id: str) -> Call[bytes]:
    return Call(method="GET", path=f"{{prefix}}/download/{in_path(run_id, *checkpoint_id.split('/'))}", read=bytes)


def upload_checkpoint(run_id: str, name: str, checkpoint_type: str) -> Call[Checkpoint]:
    params = {"name": name} | ({"sampler": "true"} if checkpoint_type == "sampler_weights" else {})
    # Repeatable: with the body's digest the server knows it again.
    path = f"{{prefix}}/training_runs/{in_path(run_id)}/upload"
    return Call(method="POST", path=path, read=Checkpoint.model_validate_json, params=params, is_long=True)


def end_training_run(run_id: str) -> Call[DeleteAnswer]:
    # Not repeatable: as delete_checkpoint.
    return Call(method="DELETE", path=f"{{prefix}}/training_runs/{in_path(run_id)}", read=DeleteAnswer.model_validate_json, is_repeatable=False)


def weights_info(twinkle_path: str) -> Call[WeightsInfo]:
    return ask("{prefix}/weights_info", WeightsInfoRequest(twinkle_path=twinkle_path), WeightsInfo)


def latest_path(found: Iterable[Checkpoint]) -> str | None:
    """The URI of the newest checkpoint that can be resumed from."""
    resumable = [each for each in found if each.checkpoint_type == "weights"]
    return max(resumable, key=lambda each: each.time).twinkle_path if resumable else None
