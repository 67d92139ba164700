"""What the control endpoints take and return. Answers are read tolerantly (a newer server may add fields), requests are strict."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

CheckpointType = Literal["weights", "sampler_weights"]
FutureState = Literal["queued", "running", "done", "failed", "lost", "cancelled"]
Count = Annotated[int, Field(ge=0)]


class Answer(BaseModel):
    """Base of what the server returns: fields that this version does not know are ignored."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="strings", protected_namespaces=())


class Request(BaseModel):
    """Base of what the server takes: unknown fields are errors, for a misspelt one would be ignored in silence; so are NaN and infinity."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


class ErrorBody(Answer):
    """The body of every answer from status 400 on. `detail` is a text, or pydantic's list of what is wrong with each argument."""

    detail: Any


class Health(Answer):
    """GET healthz and healthz/deep. `status` is 'ok' or says what is missing; `checks` (deep only) names each part and its state."""

    status: str
    checks: dict[str, Any] = Field(default_factory=dict)


def _as_model(value: Any) -> Any:
    return {"model_name": value} if isinstance(value, str) else value


class SupportedModel(Answer):
    """A base model that the server trains or samples from."""

    model_name: str
    max_length: int | None = None
    is_trainable: bool = True
    has_sampler: bool = False


class ServerCapabilities(Answer):
    """GET get_server_capabilities."""

    supported_models: list[Annotated[SupportedModel, BeforeValidator(_as_model)]]


class CapacityInfo(Answer):
    """GET capacity_info: how many LoRA adapters the server takes, over all tenants."""

    max_loras: int
    used_loras: int
    free_loras: int


class CreateSession(Request):
    """POST create_session."""

    metadata: dict[str, Any] | None = None


class Session(Answer):
    """What create_session returns."""

    session_id: str


class SessionHeartbeat(Request):
    """POST session_heartbeat; 404 for a session that the server does not know."""

    session_id: str


class HeartbeatAnswer(Answer):
    """What session_heartbeat returns."""

    status: str = "ok"


class Cursor(Answer):
    """Where a page of a list lies in the whole."""

    limit: int
    offset: int
    total_count: int


class TrainingRun(Answer):
    """One adapter in training (or a full model), from add_adapter_to_model on."""

    training_run_id: str
    base_model: str
    model_owner: str
    save_dir: str | None = None
    is_lora: bool = True
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, Any] | None = None


class TrainingRuns(Answer):
    """GET training_runs."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class Checkpoint(Answer):
    """A whole checkpoint of a run. `checkpoint_id` is `weights/NAME` (resumable) or `sampler_weights/NAME`."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    size_bytes: int
    public: bool = False
    twinkle_path: str
    base_model: str | None = None
    is_lora: bool = True
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    user_metadata: dict[str, Any] | None = None


class Checkpoints(Answer):
    """GET training_runs/{run_id}/checkpoints."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class CheckpointPath(Answer):
    """GET checkpoint_path/{run_id}/{checkpoint_id}. `path` is a file system path of the server."""

    path: str
    twinkle_path: str


class DeleteAnswer(Answer):
    """DELETE training_runs/{run_id}/checkpoints/{checkpoint_id}."""

    success: bool
    message: str | None = None


class WeightsInfoRequest(Request):
    """POST weights_info."""

    twinkle_path: str


class WeightsInfo(Answer):
    """What weights_info returns."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    lora_rank: int | None = None


class SessionInfo(Answer):
    """A live session."""

    session_id: str
    metadata: dict[str, Any] | None = None
    created_at: datetime
    seen_at: datetime


class QueueInfo(Answer):
    """The queue of a model or a sampler: calls that run and wait, of all tenants, and how many of those that wait are the caller's."""

    name: str
    running: int
    waiting: int
    waiting_own: int


class Overview(Answer):
    """GET overview: the caller's live sessions, and how busy the server is."""

    sessions: list[SessionInfo]
    queues: list[QueueInfo]
    capacity: CapacityInfo


class CurvePoint(Answer):
    """What a call on a run measured. number: grows with every point; step: optimizer steps taken before."""

    number: int
    step: int
    time: datetime
    loss: float | None = None
    measured: dict[str, float] = Field(default_factory=dict[str, float])


class Curve(Answer):
    """GET training_runs/{run_id}/curve: points behind the number `after`, oldest first."""

    points: list[CurvePoint]


class Future(Answer):
    """A call that the server works on: the answer (202) to a POST with `Prefer: respond-async`, and GET futures/{request_id}.

    result: once `status` is 'done', the `result` of a direct answer, or its whole body where that is not `{"result": ...}`. error: what went wrong,
    with 'failed' and 'lost'; error_status: the HTTP status that a direct answer would have had.
    """

    request_id: str
    status: FutureState
    result: Any = None
    error: str | None = None
    error_status: int | None = None
    queue_position: int | None = None


_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_RUN_ID = r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}"
_TWINKLE_PATH = re.compile(rf"twinkle://(?P<run>{_RUN_ID})/(?P<kind>weights|sampler_weights)/(?P<name>{_ID})")


class TwinklePath(Answer):
    """The parts of `twinkle://RUN/weights/NAME` or `twinkle://RUN/sampler_weights/NAME`."""

    run_id: str
    checkpoint_type: CheckpointType
    name: str

    @property
    def checkpoint_id(self) -> str:
        """`weights/NAME` or `sampler_weights/NAME`."""
        return f"{self.checkpoint_type}/{self.name}"

    def __str__(self) -> str:
        return f"twinkle://{self.run_id}/{self.checkpoint_id}"


def parse_twinkle_path(path: str) -> TwinklePath:
    """The parts of a checkpoint's URI.

    Ids and names are up to 128 ASCII letters, digits, '.', '_' and '-' (in ids also ':'), and begin with a letter or a digit: nothing that a file
    system or a URL reads in another way.

    Raises:
        ValueError: anything else.
    """
    found = _TWINKLE_PATH.fullmatch(path)
    if found is None:
        raise ValueError(
            f"{path!r:.200} is no checkpoint: twinkle://RUN/weights/NAME or twinkle://RUN/sampler_weights/NAME; ids and names are up to 128 letters, "
            "digits, '.', '_' and '-', a letter or digit first"
        )
    return TwinklePath.model_validate({"run_id": found["run"], "checkpoint_type": found["kind"], "name": found["name"]})


TrainingRun.model_rebuild()
