"""The database's tables. What a tenant names is text in a column; nothing of it becomes a path."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import BigInteger as _BigInteger
from sqlalchemy import Boolean, Column, Dialect, Float, ForeignKey, Index, Integer, LargeBinary, MetaData, String, Table, Text, UniqueConstraint
from sqlalchemy.types import TypeDecorator

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only in columns of type INTEGER.
BigInteger = _BigInteger().with_variant(Integer, "sqlite")


class Json(TypeDecorator[Any]):
    """Plain JSON as text: any string that a client can send fits, on every database."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """To text."""
        return None if value is None else json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """From text."""
        return None if value is None else json.loads(value)


keys = Table(
    "api_keys",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant", String(200), nullable=False, index=True),
    Column("label", String(200), nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    Column("scopes", Json, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53)),
    Column("revoked_at", Float(53)),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(200), nullable=False),
    Column("metadata", Json, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("seen_at", Float(53), nullable=False),
    Column("ended_at", Float(53)),
    Index(None, "tenant", "created_at"),
)

runs = Table(
    "runs",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=True),
    Column("id", String(128), nullable=False, unique=True),
    Column("tenant", String(200), nullable=False),
    Column("session_id", String(64), ForeignKey("sessions.id")),
    Column("base_model", String(200), nullable=False),
    Column("adapter", String(64), nullable=False, unique=True),
    Column("lora", Json, nullable=False),
    Column("label", String(200), nullable=False),
    Column("name", String(200), nullable=False),
    Column("metadata", Json, nullable=False),
    Column("setup", Json, nullable=False),
    Column("parked", String(64)),
    Column("dirty", Boolean, nullable=False),
    Column("corrupted", Boolean, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("next_seq", BigInteger, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("used_at", Float(53), nullable=False),
    Column("ended_at", Float(53)),
    Index(None, "tenant", "number"),
    # A session's adapters are found by the name that it gave them.
    Index(None, "session_id", "name"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=True),
    Column("run_id", String(128), ForeignKey("runs.id"), nullable=False),
    Column("tenant", String(200), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("name", String(200), nullable=False),
    Column("folder", String(64), nullable=False, unique=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("step", Integer, nullable=False),
    Column("resumable", Boolean, nullable=False),
    Column("public", Boolean, nullable=False),
    Column("metadata", Json, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53)),
    UniqueConstraint("run_id", "kind", "name"),
    Index(None, "tenant", "number"),
)

samplers = Table(
    "sampling_sessions",
    metadata,
    Column("id", String(160), primary_key=True),
    Column("tenant", String(200), nullable=False, index=True),
    Column("session_id", String(64), ForeignKey("sessions.id")),
    Column("base_model", String(200), nullable=False),
    Column("checkpoint", String(500)),
    Column("created_at", Float(53), nullable=False),
)

futures = Table(
    "futures",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("tenant", String(200), nullable=False),
    Column("queue", String(250), nullable=False),
    Column("kind", String(64), nullable=False),
    Column("run_id", String(128)),
    Column("seq", BigInteger),
    Column("dedup", String(250)),
    Column("request_id", String(200), nullable=False),
    Column("status", String(16), nullable=False, index=True),
    Column("payload", LargeBinary),
    Column("payload_digest", String(64), nullable=False),
    Column("result", LargeBinary),
    Column("media_type", String(100)),
    Column("error_status", Integer),
    Column("error", Text),
    Column("created_at", Float(53), nullable=False),
    Column("started_at", Float(53)),
    Column("finished_at", Float(53), index=True),
    UniqueConstraint("tenant", "dedup"),
    Index(None, "run_id"),
)

metrics = Table(
    "run_metrics",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=True),
    Column("run_id", String(128), ForeignKey("runs.id"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("at", Float(53), nullable=False),
    Column("measured", Json, nullable=False),
    Index(None, "run_id", "step"),
)

audit = Table(
    "audit_log",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=True),
    Column("at", Float(53), nullable=False, index=True),
    Column("tenant", String(200), nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("action", String(64), nullable=False),
    Column("target", String(500), nullable=False),
    Column("request_id", String(200), nullable=False),
)
