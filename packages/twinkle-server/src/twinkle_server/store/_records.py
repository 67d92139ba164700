"""Rows of the tables, as they leave the store. Times are seconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FutureStatus = Literal["queued", "running", "done", "failed"]
CheckpointKind = Literal["weights", "sampler_weights"]
# Of a run's curves: the run's id, the step, and what was measured.
Point = tuple[str, int, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Key:
    """An API key; `digest` is the SHA-256 of its secret."""

    id: str
    tenant: str
    label: str
    digest: bytes = field(repr=False)
    scopes: list[str]
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Session:
    """A client's session. ended_at: when it was finished, or its heartbeats had stopped for long enough."""

    id: str
    tenant: str
    metadata: dict[str, Any]
    created_at: float
    seen_at: float
    ended_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One adapter of one tenant in training.

    adapter: its name on the trainer, unique on the server. label: the client's `save_dir`. name: the client's `adapter_name`, by which its session
    finds it. setup: the calls of set_loss and kin that bring it back as it was, by verb. parked: the folder that holds its state.
    dirty: memory holds what the disk does not. corrupted: that was lost. next_seq: of its numbered calls, the next to run.
    """

    id: str
    tenant: str
    session_id: str | None = None
    base_model: str
    adapter: str
    lora: dict[str, Any]
    label: str = ""
    name: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    setup: dict[str, Any] = field(default_factory=dict)
    parked: str | None = None
    dirty: bool = False
    corrupted: bool = False
    steps: int = 0
    next_seq: int = 1
    created_at: float
    used_at: float
    ended_at: float | None = None
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint. folder: its folder's name. resumable: it holds optimizer states. digest: SHA-256 of its manifest."""

    run_id: str
    tenant: str
    kind: CheckpointKind
    name: str
    folder: str
    size_bytes: int
    digest: str
    step: int
    resumable: bool
    public: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    created_at: float
    expires_at: float | None = None
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A sampling session: a base model, or a checkpoint (its URI) over it."""

    id: str
    tenant: str
    session_id: str | None = None
    base_model: str
    checkpoint: str | None = None
    created_at: float


@dataclass(frozen=True, kw_only=True)
class Future:
    """A call and, once it is there, what came of it.

    queue: 'model:NAME' or 'sampler:NAME'. kind: which handler runs it. seq: its number within its run, where calls are numbered.
    dedup: a name that only one call of the tenant has. result: with status 'done'; error_status and error: with 'failed'.
    """

    id: str
    tenant: str
    queue: str
    kind: str
    run_id: str | None = None
    seq: int | None = None
    dedup: str | None = None
    request_id: str = ""
    status: FutureStatus = "queued"
    payload: bytes | None = field(default=None, repr=False)
    payload_digest: str = ""
    result: bytes | None = field(default=None, repr=False)
    media_type: str | None = None
    error_status: int | None = None
    error: str | None = None
    created_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    number: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether it has a result or an error."""
        return self.status in ("done", "failed")


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """Who did what; never a secret."""

    at: float
    tenant: str
    key_id: str
    action: str
    target: str
    request_id: str
