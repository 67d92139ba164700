"""The connection to the database, and its migrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text

from .._errors import ConfigError

_LOCK = 0x7477_6E6B  # of PostgreSQL's advisory locks: one server migrates at a time


def open_engine(url: str) -> Engine:
    """An engine for SQLite (write-ahead log) or PostgreSQL (psycopg).

    Raises ConfigError for another database, or a driver that is not installed.
    """
    parsed = make_url(url)
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername == "postgresql+psycopg":
        try:
            return create_engine(parsed, pool_size=8, max_overflow=8, pool_pre_ping=True)
        except ModuleNotFoundError as error:
            raise ConfigError("PostgreSQL needs its driver: pip install 'twinkle-server[postgres]'") from error
    if parsed.drivername != "sqlite":
        raise ConfigError(f"the database is SQLite or PostgreSQL, not {parsed.drivername}")
    if parsed.database in (None, "", ":memory:"):
        raise ConfigError("SQLite needs a file: sqlite:////folder/server.db")
    assert parsed.database is not None
    Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(parsed, pool_size=8, max_overflow=8, connect_args={"timeout": 30})
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, record: Any) -> None:
    del record
    connection.isolation_level = None  # transactions are begun below, not by the driver
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "busy_timeout=30000"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and writes later fails when another has written between: writers say at once that they are.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def migrate(engine: Engine) -> None:
    """Brings the database to this version's tables; new ones are made."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.execution_options(writes=True).begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
