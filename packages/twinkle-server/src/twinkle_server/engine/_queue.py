"""The order in which calls run. Used on the event loop only; calls themselves run in threads.

Calls of one run run one after another: numbered ones by their number, whatever order they arrive in, others as they arrive. Between tenants the one
that has had the least time goes first (weighted fair queueing with equal weights; Demers, Keshav, Shenker 1989), so that a tenant with a
thousand waiting calls delays another's one by at most the call that runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from .._errors import Busy, Conflict
from ..store import Future

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Work:
    """A call on its way. value: its decoded payload; None where it came from the database. outcome: set together with `done`."""

    future: Future
    value: Any = None
    durable: bool = True
    arrived: int = 0
    arrived_at: float = field(default_factory=time.monotonic)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Future | None = None

    @property
    def size_bytes(self) -> int:
        """Of its payload."""
        return len(self.future.payload or b"")


@dataclass(eq=False)
class _Line:
    """The calls of one run, in order. held: numbered calls whose predecessors have not come."""

    tenant: str
    ready: deque[Work] = field(default_factory=deque)
    held: dict[int, Work] = field(default_factory=dict)
    next_seq: int = 1
    held_since: float = 0.0
    is_active: bool = False


class CallQueue:
    """The calls of one model, or of one sampler.

    name: its own. run: what runs a call, in a thread; it must not raise. concurrency: calls that run at a time. admits: whether a call may begin
    now (asked while no call runs where concurrency is 1). max_calls, max_bytes: of one tenant, waiting. gap_s: how long a numbered call waits for a
    missing predecessor. capacity_s: how long a call waits to be admitted.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Work], Future],
        *,
        concurrency: int = 1,
        admits: Callable[[Work], bool] = lambda work: True,
        max_calls: int = 512,
        max_bytes: int = 1 << 30,
        gap_s: float = 600,
        capacity_s: float = 600,
    ) -> None:
        self.name = name
        self._run = run
        self._admits = admits
        self._max_calls, self._max_bytes = max_calls, max_bytes
        self._gap_s, self._capacity_s = gap_s, capacity_s
        self._concurrency = concurrency
        self.pool = ThreadPoolExecutor(concurrency, thread_name_prefix=name)
        self._lines: dict[str, _Line] = {}
        self._counts: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._times: dict[str, float] = {}
        self._clock = 0.0
        self._arrivals = 0
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self.running: set[Work] = set()

    def start(self) -> None:
        """Begins to run calls."""
        self._tasks = [asyncio.create_task(self._work(), name=f"{self.name}-{index}") for index in range(self._concurrency)]

    async def stop(self, timeout_s: float) -> bool:
        """Lets what runs come to its end, and begins nothing more; False when it did not end in time."""
        self._is_stopping = True
        self._wake.set()
        if not self._tasks:
            return True
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        return not late

    def wake(self) -> None:
        """Looks again for a call that may begin, since what `admits` depends on has changed."""
        self._wake.set()

    def check_room(self, tenant: str, size_bytes: int) -> None:
        """Raises Busy when a tenant has as many calls waiting as it may."""
        if self._counts.get(tenant, 0) >= self._max_calls:
            raise Busy(f"{self._max_calls} of your calls wait for {self.name} already", retry_after_s=1)
        if self._bytes.get(tenant, 0) + size_bytes > self._max_bytes:
            raise Busy(f"your calls that wait for {self.name} hold {self._bytes.get(tenant, 0)} bytes already", retry_after_s=1)

    def put(self, work: Work, next_seq: int = 1) -> None:
        """Appends a call. next_seq: which of its run's numbered calls comes next, where the queue does not know the run yet.

        Raises Conflict for a number that has run.
        """
        future = work.future
        self._arrivals += 1
        work.arrived = self._arrivals
        line = self._lines.setdefault(future.run_id or future.id, _Line(future.tenant, next_seq=next_seq))
        if future.seq is None:
            line.ready.append(work)
        elif future.seq < line.next_seq:
            raise Conflict(f"the call number {future.seq} of this run has run; the next is {line.next_seq}")
        else:
            if not line.held:
                line.held_since = time.monotonic()
            line.held[future.seq] = work
            self._release(line)
        tenant = future.tenant
        if not self._counts.get(tenant):
            self._times[tenant] = max(self._times.get(tenant, 0.0), self._clock)
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
        self._bytes[tenant] = self._bytes.get(tenant, 0) + work.size_bytes
        self._wake.set()

    def withdraw(self, work: Work) -> bool:
        """Takes out a call that waits; False when it does not wait any more."""
        key = work.future.run_id or work.future.id
        line = self._lines.get(key)
        if line is None or work not in line.ready:
            return False
        line.ready.remove(work)
        self._count_out(work)
        self._forget_if_empty(key, line)
        return True

    def position(self, future_id: str) -> int | None:
        """How many calls arrived before this one and still wait; None when it does not wait."""
        waiting = [work for line in self._lines.values() for work in (*line.ready, *line.held.values())]
        mine = next((work for work in waiting if work.future.id == future_id), None)
        return None if mine is None else sum(work.arrived < mine.arrived for work in waiting)

    def is_paused(self, run_id: str) -> bool:
        """Whether the next call of a run waits for room among the adapters in memory."""
        line = self._lines.get(run_id)
        return bool(line and line.ready and not line.is_active and not self._admits(line.ready[0]))

    @property
    def length(self) -> int:
        """Calls that wait."""
        return sum(self._counts.values())

    def lengths(self) -> dict[str, int]:
        """Calls that wait, by tenant."""
        return {tenant: count for tenant, count in self._counts.items() if count}

    def expire(self) -> list[tuple[Work, Conflict | Busy]]:
        """Takes out calls that wait in vain: for a predecessor that never came, or for room. The caller finishes them with these errors."""
        now = time.monotonic()
        expired: list[tuple[Work, Conflict | Busy]] = []
        for key, line in list(self._lines.items()):
            if line.held and now - line.held_since > self._gap_s:
                missing = line.next_seq
                for work in line.held.values():
                    expired.append((work, Conflict(f"the call number {missing} of this run never came, so number {work.future.seq} did not run")))
                line.next_seq = max(line.held) + 1
                line.held.clear()
            if line.ready and not line.is_active and now - line.ready[0].arrived_at > self._capacity_s and not self._admits(line.ready[0]):
                expired.append((line.ready.popleft(), Busy("all adapters in memory hold unfinished steps; try again later", retry_after_s=30)))
            self._forget_if_empty(key, line)
        for work, _ in expired:
            self._count_out(work)
        return expired

    def _release(self, line: _Line) -> None:
        while (work := line.held.pop(line.next_seq, None)) is not None:
            line.ready.append(work)
            line.next_seq += 1
            line.held_since = time.monotonic()

    def _take(self) -> tuple[str, _Line, Work] | None:
        heads = [(key, line, line.ready[0]) for key, line in self._lines.items() if line.ready and not line.is_active]
        heads.sort(key=lambda head: (self._times.get(head[1].tenant, 0.0), head[2].arrived))
        for key, line, work in heads:
            if self._admits(work):
                line.ready.popleft()
                line.is_active = True
                self._clock = self._times.get(line.tenant, 0.0)
                self._count_out(work)
                return key, line, work
        return None

    def _count_out(self, work: Work) -> None:
        tenant = work.future.tenant
        self._counts[tenant] -= 1
        self._bytes[tenant] -= work.size_bytes
        if not self._counts[tenant]:
            del self._counts[tenant], self._bytes[tenant]

    def _forget_if_empty(self, key: str, line: _Line) -> None:
        # Lines of runs stay while the server does: they know which number is next.
        if not line.ready and not line.held and not line.is_active and line.next_seq == 1:
            self._lines.pop(key, None)

    async def _work(self) -> None:
        while not self._is_stopping:
            taken = self._take()
            if taken is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            key, line, work = taken
            self.running.add(work)
            begun = time.monotonic()
            try:
                work.outcome = await asyncio.get_running_loop().run_in_executor(self.pool, self._run, work)
            except Exception:  # `run` should not raise; if it does, one call fails and not the queue
                logger.exception("%s: a call failed outside its handler", self.name)
                work.outcome = replace(work.future, status="failed", error_status=500, error="the call failed on the server")
            finally:
                tenant = work.future.tenant
                self._times[tenant] = self._times.get(tenant, 0.0) + max(time.monotonic() - begun, 1e-4)
                self.running.discard(work)
                line.is_active = False
                self._forget_if_empty(key, line)
                work.done.set()
                self._wake.set()
