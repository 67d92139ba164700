"""What the server keeps: every method is one transaction, and blocks: call it off the event loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any, TypeVar

from sqlalchemy import Connection, RowMapping, Table, and_, bindparam, delete, func, insert, or_, select, text, update
from sqlalchemy.exc import IntegrityError

from . import _tables as tables
from ._engine import migrate, open_engine
from ._records import AuditEntry, Checkpoint, Future, Key, Point, Run, Sampler, Session

Record = TypeVar("Record", Key, Session, Run, Checkpoint, Sampler, Future)

_GENERATED = "number"


class Store:
    """The database. Safe to use from several threads.

    url: SQLAlchemy's. The tables are made or migrated when it is opened.
    """

    def __init__(self, url: str) -> None:
        self._engine = open_engine(url)
        self._writer = self._engine.execution_options(writes=True)
        migrate(self._engine)

    def close(self) -> None:
        """Closes the connections."""
        self._engine.dispose()

    def ping(self) -> None:
        """Raises what the database raises when it does not answer."""
        with self._read() as connection:
            connection.execute(text("SELECT 1"))

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with self._writer.begin() as connection:
            yield connection

    # Any record.

    def add(self, record: Record) -> Record:
        """Inserts a record; raises `sqlalchemy.exc.IntegrityError` when one of its unique values is taken."""
        table = _TABLES[type(record)]
        with self._write() as connection:
            return _insert(connection, table, record)

    def change(self, kind: type[Record], key: str, **values: Any) -> None:
        """Sets columns of the record of that id."""
        table = _TABLES[kind]
        with self._write() as connection:
            connection.execute(update(table).where(table.c.id == key).values(**values))

    def get(self, kind: type[Record], key: str) -> Record | None:
        """The record of that id."""
        if "\0" in key:  # which PostgreSQL takes in no text
            return None
        table = _TABLES[kind]
        with self._read() as connection:
            return _one(kind, connection.execute(select(table).where(table.c.id == key)).mappings().first())

    def page(
        self,
        kind: type[Record],
        *,
        tenant: str | None = None,
        limit: int = 20,
        offset: int = 0,
        where: Mapping[str, Any] | None = None,
        newest_first: bool = True,
    ) -> tuple[list[Record], int]:
        """Some records, newest first, and how many there are in all. tenant: None for all tenants'. where: columns that must equal."""
        table = _TABLES[kind]
        conditions = [table.c[name] == value for name, value in (where or {}).items()]
        if tenant is not None:
            conditions.append(table.c.tenant == tenant)
        order = table.c.number if _GENERATED in table.c else table.c.created_at
        with self._read() as connection:
            rows = connection.execute(
                select(table).where(and_(True, *conditions)).order_by(order.desc() if newest_first else order).limit(limit).offset(offset)
            ).mappings()
            found = [_record(kind, row) for row in rows]
            if len(found) < limit and (found or not offset):
                return found, offset + len(found)
            return found, connection.execute(select(func.count()).select_from(table).where(and_(True, *conditions))).scalar_one()

    # Keys.

    def live_keys(self, now: float | None = None) -> list[Key]:
        """Keys that are neither revoked nor expired."""
        at = time.time() if now is None else now
        table = tables.keys
        live = and_(table.c.revoked_at.is_(None), or_(table.c.expires_at.is_(None), table.c.expires_at > at))
        with self._read() as connection:
            return [_record(Key, row) for row in connection.execute(select(table).where(live).order_by(table.c.created_at)).mappings()]

    def revoke_key(self, key_id: str) -> bool:
        """Whether there was such a key that was not revoked yet."""
        table = tables.keys
        with self._write() as connection:
            done = connection.execute(update(table).where(table.c.id == key_id, table.c.revoked_at.is_(None)).values(revoked_at=time.time()))
            return done.rowcount == 1

    # Sessions.

    def live_sessions(self) -> list[Session]:
        """Sessions that have not ended."""
        with self._read() as connection:
            rows = connection.execute(select(tables.sessions).where(tables.sessions.c.ended_at.is_(None))).mappings()
            return [_record(Session, row) for row in rows]

    def touch_sessions(self, seen: Mapping[str, float]) -> None:
        """Writes when sessions were seen last."""
        if not seen:
            return
        statement = update(tables.sessions).where(tables.sessions.c.id == bindparam("key")).values(seen_at=bindparam("at"))
        with self._write() as connection:
            connection.execute(statement, [{"key": key, "at": at} for key, at in seen.items()])

    # Runs.

    def count_runs(self, tenant: str) -> int:
        """A tenant's runs that have not ended."""
        table = tables.runs
        with self._read() as connection:
            return connection.execute(select(func.count()).where(table.c.tenant == tenant, table.c.ended_at.is_(None))).scalar_one()

    def find_run(self, tenant: str, session_id: str | None, base_model: str, name: str) -> Run | None:
        """The newest run that a session gave that name (without a session: the tenant's newest of that name)."""
        if "\0" in name + (session_id or "") + base_model:
            return None
        table = tables.runs
        conditions = [table.c.tenant == tenant, table.c.base_model == base_model, table.c.name == name, table.c.ended_at.is_(None)]
        if session_id is not None:
            conditions.append(table.c.session_id == session_id)
        with self._read() as connection:
            return _one(Run, connection.execute(select(table).where(*conditions).order_by(table.c.number.desc()).limit(1)).mappings().first())

    def end_run(self, run_id: str) -> None:
        """A run is over: it is not found by its name any more, which may be used again, and its parked state is nobody's."""
        with self._write() as connection:
            over = {"ended_at": time.time(), "dirty": False, "parked": None}
            connection.execute(update(tables.runs).where(tables.runs.c.id == run_id).values(over))

    def mark_lost_runs(self) -> list[str]:
        """At a start: runs whose state was in memory only are corrupted now; their ids."""
        table = tables.runs
        with self._write() as connection:
            lost = list(connection.execute(select(table.c.id).where(table.c.dirty.is_(True))).scalars())
            connection.execute(update(table).where(table.c.dirty.is_(True)).values(dirty=False, corrupted=True))
            return lost

    def add_metrics(self, points: Sequence[Point]) -> None:
        """Numbers of steps, for curves."""
        with self._write() as connection:
            _insert_points(connection, points)

    def metrics(self, run_id: str, limit: int = 1000, after: int = 0) -> list[dict[str, Any]]:
        """The last rows of a run's curves after a row number, oldest first: number, step, at, measured."""
        table = tables.metrics
        query = select(table.c.number, table.c.step, table.c.at, table.c.measured).where(table.c.run_id == run_id, table.c.number > after)
        with self._read() as connection:
            rows = connection.execute(query.order_by(table.c.number.desc()).limit(limit)).mappings()
            return [dict(row) for row in reversed(list(rows))]

    # Checkpoints.

    def find_checkpoint(self, run_id: str, kind: str, name: str) -> Checkpoint | None:
        """The checkpoint of that name."""
        table = tables.checkpoints
        query = select(table).where(table.c.run_id == run_id, table.c.kind == kind, table.c.name == name)
        with self._read() as connection:
            return _one(Checkpoint, connection.execute(query).mappings().first())

    def latest_checkpoints(self, run_ids: Sequence[str], now: float) -> dict[tuple[str, str], Checkpoint]:
        """The newest checkpoints of runs that have not expired, by run and kind."""
        if not run_ids:
            return {}
        table = tables.checkpoints
        live = and_(table.c.run_id.in_(run_ids), or_(table.c.expires_at.is_(None), table.c.expires_at > now))
        newest = select(func.max(table.c.number)).where(live).group_by(table.c.run_id, table.c.kind)
        with self._read() as connection:
            found = [_record(Checkpoint, row) for row in connection.execute(select(table).where(table.c.number.in_(newest))).mappings()]
            return {(each.run_id, each.kind): each for each in found}

    def put_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Records a checkpoint in place of the one of its name, which is returned."""
        table = tables.checkpoints
        mine = and_(table.c.run_id == checkpoint.run_id, table.c.kind == checkpoint.kind, table.c.name == checkpoint.name)
        with self._write() as connection:
            old = _one(Checkpoint, connection.execute(select(table).where(mine)).mappings().first())
            if old is not None:
                connection.execute(delete(table).where(table.c.number == old.number))
            _insert(connection, table, checkpoint)
            return old

    def change_checkpoint(self, checkpoint: Checkpoint, **values: Any) -> None:
        """Sets columns of a checkpoint."""
        with self._write() as connection:
            connection.execute(update(tables.checkpoints).where(tables.checkpoints.c.folder == checkpoint.folder).values(**values))

    def drop_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Forgets exactly that checkpoint; whether it was still there."""
        with self._write() as connection:
            return connection.execute(delete(tables.checkpoints).where(tables.checkpoints.c.folder == checkpoint.folder)).rowcount == 1

    def checkpoint_bytes(self, tenant: str) -> int:
        """The size of all of a tenant's checkpoints."""
        table = tables.checkpoints
        with self._read() as connection:
            return int(connection.execute(select(func.coalesce(func.sum(table.c.size_bytes), 0)).where(table.c.tenant == tenant)).scalar_one())

    def expired_checkpoints(self, now: float, older_than: float | None) -> list[Checkpoint]:
        """Checkpoints whose time has come."""
        table = tables.checkpoints
        over = and_(table.c.expires_at.is_not(None), table.c.expires_at <= now)
        if older_than is not None:
            over = or_(over, and_(table.c.expires_at.is_(None), table.c.created_at <= older_than))
        with self._read() as connection:
            return [_record(Checkpoint, row) for row in connection.execute(select(table).where(over)).mappings()]

    def known_folders(self) -> set[str]:
        """The folders of all checkpoints and parked runs."""
        with self._read() as connection:
            folders = set(connection.execute(select(tables.checkpoints.c.folder)).scalars())
            return folders | set(connection.execute(select(tables.runs.c.parked).where(tables.runs.c.parked.is_not(None))).scalars())

    # Futures.

    def add_future(self, future: Future) -> tuple[Future, bool]:
        """Stores a call; or, where the tenant has one of the same `dedup`, returns that and False."""
        try:
            return self.add(future), True
        except IntegrityError:
            if future.dedup is not None and (before := self.find_future(future.tenant, future.dedup)) is not None:
                return before, False
            raise

    def find_future(self, tenant: str, dedup: str) -> Future | None:
        """The tenant's call of that name."""
        table = tables.futures
        with self._read() as connection:
            return _one(Future, connection.execute(select(table).where(table.c.tenant == tenant, table.c.dedup == dedup)).mappings().first())

    def begin_future(self, future_id: str) -> bool:
        """Marks a call as running, before it runs; False when it was not waiting any more."""
        table = tables.futures
        with self._write() as connection:
            begun = connection.execute(
                update(table).where(table.c.id == future_id, table.c.status == "queued").values(status="running", started_at=time.time())
            )
            return begun.rowcount == 1

    def finish_future(
        self,
        future_id: str,
        *,
        result: bytes | None = None,
        media_type: str | None = None,
        error_status: int | None = None,
        error: str | None = None,
        points: Sequence[Point] = (),
    ) -> None:
        """Stores what came of a call, and what it measured; its payload is not needed any more."""
        table = tables.futures
        values: dict[str, Any] = {"payload": None, "finished_at": time.time()}
        if error_status is None:
            values |= {"status": "done", "result": result, "media_type": media_type}
        else:
            values |= {"status": "failed", "error_status": error_status, "error": error}
        with self._write() as connection:
            connection.execute(update(table).where(table.c.id == future_id).values(**values))
            _insert_points(connection, points)

    def recover_futures(self, lost: str) -> list[Future]:
        """At a start: calls that were running have failed with this error; those that had not begun are returned in order."""
        table = tables.futures
        with self._write() as connection:
            connection.execute(
                update(table)
                .where(table.c.status == "running")
                .values(status="failed", error_status=500, error=lost, payload=None, finished_at=time.time())
            )
            return [
                _record(Future, row)
                for row in connection.execute(select(table).where(table.c.status == "queued").order_by(table.c.number)).mappings()
            ]

    # Retention.

    def forget(self, *, futures_before: float, audit_before: float) -> int:
        """Deletes finished calls and log entries that are older; how many."""
        with self._write() as connection:
            gone = connection.execute(delete(tables.futures).where(tables.futures.c.finished_at < futures_before)).rowcount
            return gone + connection.execute(delete(tables.audit).where(tables.audit.c.at < audit_before)).rowcount

    # The audit log.

    def log(self, entry: AuditEntry) -> None:
        """Appends to the audit log."""
        with self._write() as connection:
            connection.execute(insert(tables.audit).values(**asdict(entry)))

    def audit_entries(self, limit: int = 100) -> list[AuditEntry]:
        """The newest entries, newest first."""
        names = [each.name for each in fields(AuditEntry)]
        query = select(*[tables.audit.c[name] for name in names]).order_by(tables.audit.c.number.desc()).limit(limit)
        with self._read() as connection:
            return [AuditEntry(**row) for row in connection.execute(query).mappings()]


_TABLES: dict[type[Any], Table] = {
    Key: tables.keys,
    Session: tables.sessions,
    Run: tables.runs,
    Checkpoint: tables.checkpoints,
    Sampler: tables.samplers,
    Future: tables.futures,
}


def _insert_points(connection: Connection, points: Sequence[Point]) -> None:
    for run_id, step, measured in points:
        connection.execute(insert(tables.metrics).values(run_id=run_id, step=step, at=time.time(), measured=dict(measured)))


def _insert(connection: Connection, table: Table, record: Record) -> Record:
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    number = values.pop(_GENERATED, None)
    done = connection.execute(insert(table).values(**values))
    if number is None:
        return record
    key = done.inserted_primary_key
    assert key is not None, "the table numbers its rows"
    values[_GENERATED] = key[0]
    return type(record)(**values)


def _record(kind: type[Record], row: RowMapping) -> Record:
    return kind(**row)


def _one(kind: type[Record], row: RowMapping | None) -> Record | None:
    return None if row is None else _record(kind, row)
