"""Sessions: their heartbeats are kept in memory and written down in rounds, for there are many."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sqlalchemy.exc import IntegrityError

from ._config import ServerConfig
from ._errors import Busy, Exhausted, NotFound
from ._keys import Principal
from .store import Session, Store

IO = Callable[..., Awaitable[Any]]


class Sessions:
    """The live sessions of all tenants. Used on the event loop; io runs what blocks elsewhere."""

    def __init__(self, config: ServerConfig, store: Store, io: IO) -> None:
        self._config = config
        self._store = store
        self._io = io
        self._tenants: dict[str, str] = {}
        self._seen: dict[str, float] = {}  # by a clock that does not jump
        self._unwritten: set[str] = set()

    async def start(self) -> None:
        """Takes up the sessions of an earlier server; each has the whole time to its next heartbeat."""
        for session in await self._io(self._store.live_sessions):
            self._tenants[session.id], self._seen[session.id] = session.tenant, time.monotonic()

    async def create(self, principal: Principal, metadata: Mapping[str, Any] | None = None, session_id: str | None = None) -> Session:
        """A new session; Busy beyond the tenant's number. session_id: given, a second call returns the first one's session."""
        if session_id is not None:
            before = await self._io(self._store.get, Session, session_id)
            if before is not None and before.tenant == principal.tenant:
                return before
        if sum(tenant == principal.tenant for tenant in self._tenants.values()) >= self._config.limits.sessions:
            raise Busy(f"you have {self._config.limits.sessions} live sessions already", retry_after_s=self._config.retention.session_s)
        now = time.time()
        session = Session(
            id=session_id or f"ses-{secrets.token_hex(10)}", tenant=principal.tenant, metadata=dict(metadata or {}), created_at=now, seen_at=now
        )
        # Before it is written, so that it counts for requests that come meanwhile.
        self._tenants[session.id], self._seen[session.id] = session.tenant, time.monotonic()
        try:
            await self._io(self._store.add, session)
        except IntegrityError:  # the same request, sent again meanwhile
            if (before := await self._io(self._store.get, Session, session.id)) is None or before.tenant != principal.tenant:
                raise
            return before
        except BaseException:
            self._tenants.pop(session.id, None)
            self._seen.pop(session.id, None)
            raise
        return session

    def beat(self, principal: Principal, session_id: str) -> None:
        """A heartbeat. Raises NotFound for a session that is not the tenant's, or is over."""
        if self._tenants.get(session_id) != principal.tenant:
            raise NotFound(f"there is no live session {session_id[:100]}")
        self._seen[session_id] = time.monotonic()
        self._unwritten.add(session_id)

    async def check(self, principal: Principal, session_id: str) -> None:
        """Raises NotFound for a session that is not the tenant's, Exhausted for one that is over. Who makes requests is alive, as by a heartbeat."""
        if self._tenants.get(session_id) == principal.tenant:
            self.beat(principal, session_id)
            return
        session = await self._io(self._store.get, Session, session_id)
        if session is None or session.tenant != principal.tenant:
            raise NotFound(f"there is no session {session_id[:100]}")
        raise Exhausted(f"the session {session_id} is over")

    async def end(self, principal: Principal, session_id: str) -> None:
        """Ends a session; its runs stay. Raises as `check`."""
        await self.check(principal, session_id)
        await self._end(session_id)

    def is_live(self, session_id: str) -> bool:
        """Whether it beats."""
        return session_id in self._tenants

    def seen_at(self, session_id: str) -> float | None:
        """When a live session was last heard of, in seconds since 1970."""
        at = self._seen.get(session_id)
        return None if at is None else time.time() - (time.monotonic() - at)

    @property
    def count(self) -> int:
        """Live sessions."""
        return len(self._tenants)

    async def round(self) -> None:
        """Writes heartbeats down, and ends sessions that had none for too long."""
        await self.flush()
        oldest = time.monotonic() - self._config.retention.session_s
        for session_id in [name for name, at in self._seen.items() if at < oldest]:
            if self._seen.get(session_id, oldest) < oldest:  # it may have beaten, or ended, while others were being ended
                await self._end(session_id)

    async def flush(self) -> None:
        """Writes heartbeats down."""
        seen = {name: at for name in self._unwritten if (at := self.seen_at(name)) is not None}
        self._unwritten.clear()
        await self._io(self._store.touch_sessions, seen)

    async def _end(self, session_id: str) -> None:
        self._tenants.pop(session_id, None)
        seen_at = self.seen_at(session_id) or time.time()
        self._seen.pop(session_id, None)
        await self._io(self._store.change, Session, session_id, ended_at=time.time(), seen_at=seen_at)
