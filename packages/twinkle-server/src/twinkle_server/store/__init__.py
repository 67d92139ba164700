"""What the server keeps in its database."""

from ._records import AuditEntry, Checkpoint, CheckpointKind, Future, FutureStatus, Key, Point, Run, Sampler, Session
from ._store import Store

__all__ = ["AuditEntry", "Checkpoint", "CheckpointKind", "Future", "FutureStatus", "Key", "Point", "Run", "Sampler", "Session", "Store"]
