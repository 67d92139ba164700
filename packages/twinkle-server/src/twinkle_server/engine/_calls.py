"""Calls and their futures: submitted, stored, run in their queue, waited for, and fetched again."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .._errors import ApiError, Busy, Conflict, Failed, Lost, NotFound, Unavailable, describe, error_of
from .._keys import Principal
from .._logging import log_context
from ..store import Future, Point, Run
from ._queue import CallQueue, Work

if TYPE_CHECKING:
    from .._service import Service
    from ._sampler import SamplerBackend
    from ._trainer import TrainerBackend

logger = logging.getLogger(__name__)

JSON = "application/json"
LOST = "the server stopped while this call ran. Whether it took effect is not known, and it was not repeated"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a handler returns: the bytes that go to the client. points: what it measured, of the run's curves; from its context."""

    body: bytes
    media_type: str = JSON
    points: tuple[Point, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a handler has, in the thread of its queue.

    run: the run that the call is on, as it is now. trainer, sampler: of the queue; the other of the two is None.
    """

    service: Service
    future: Future
    run: Run | None = None
    trainer: TrainerBackend | None = None
    sampler: SamplerBackend | None = None
    points: list[Point] = field(default_factory=list[Point])

    @property
    def tenant(self) -> str:
        """Whose call it is."""
        return self.future.tenant

    def the_run(self) -> Run:
        """The run; Conflict for a call that is on none."""
        if self.run is None:
            raise Conflict("this call needs a run")
        return self.run

    def measured(self, numbers: Mapping[str, float], step: int | None = None) -> None:
        """Adds a point to the run's curves, which is stored with the call's outcome. step: the run's when not given."""
        run = self.the_run()
        finite = {name: float(number) for name, number in numbers.items() if math.isfinite(number)}
        self.points.append((run.id, run.steps if step is None else step, finite))

    def the_trainer(self) -> TrainerBackend:
        """The trainer; Conflict where the model has none."""
        if self.trainer is None:
            raise Conflict("this model is not trained here")
        return self.trainer

    def the_sampler(self) -> SamplerBackend:
        """The sampler; Conflict where the model has none."""
        if self.sampler is None:
            raise Conflict("this model is not sampled from here")
        return self.sampler


@dataclass(frozen=True, kw_only=True)
class Handler:
    """How calls of a kind run. decode: bytes to a value; a ValueError is the client's. run: in the queue's thread."""

    decode: Callable[[bytes], Any]
    run: Callable[[Context, Any], Reply]


class Calls:
    """The calls of all queues."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._handlers: dict[str, Handler] = {}
        self._queues: dict[str, CallQueue] = {}
        self._live: dict[str, Work] = {}
        self._unstored: dict[str, tuple[Work, Reply | ApiError]] = {}
        self._is_open = False

    def register(self, kind: str, *, decode: Callable[[bytes], Any], run: Callable[[Context, Any], Reply]) -> None:
        """Says how calls of a kind run; kinds are stored, so a kind keeps its meaning over versions."""
        if kind in self._handlers:
            raise ValueError(f"there is a handler of {kind!r} already")
        self._handlers[kind] = Handler(decode=decode, run=run)

    def add_queue(self, queue: CallQueue) -> None:
        """Adds a queue, before `start`."""
        self._queues[queue.name] = queue

    def make_queue(self, name: str, *, concurrency: int, admits: Callable[[Work], bool] = lambda work: True) -> CallQueue:
        """Makes and adds the queue of a model or sampler."""
        limits = self._service.config.limits
        queue = CallQueue(
            name,
            self._execute,
            concurrency=concurrency,
            admits=admits,
            max_calls=limits.queued_calls,
            max_bytes=limits.queued_bytes,
            gap_s=limits.order_gap_s,
            capacity_s=limits.capacity_s,
        )
        self.add_queue(queue)
        return queue

    def queue(self, name: str) -> CallQueue:
        """The queue of that name; NotFound without one."""
        if name not in self._queues:
            raise NotFound(f"there is no {name.replace(':', ' ', 1)} here")
        return self._queues[name]

    @property
    def queues(self) -> dict[str, CallQueue]:
        """All queues, by name."""
        return self._queues

    async def start(self) -> None:
        """Takes up what an earlier server left: calls that ran are lost, those that waited wait again."""
        for future in await self._service.io(self._service.store.recover_futures, LOST):
            queue = self._queues.get(future.queue)
            work = Work(future)
            try:
                if queue is None or future.kind not in self._handlers:
                    raise NotFound(f"{future.queue} is not served any more")
                run = None if future.run_id is None else await self._service.io(self._service.store.get, Run, future.run_id)
                queue.put(work, 1 if run is None else run.next_seq)
                self._live[future.id] = work
            except ApiError as error:
                await self._service.io(self._finish, work, error)
        for queue in self._queues.values():
            queue.start()
        self._is_open = True

    async def stop(self, timeout_s: float = 30) -> None:
        """Lets running calls end; those that wait stay in the database."""
        self._is_open = False
        ended = await asyncio.gather(*(queue.stop(timeout_s) for queue in self._queues.values()))
        if not all(ended):
            logger.warning("calls still run after %g s; they will be reported as lost", timeout_s)

    async def submit(
        self,
        principal: Principal,
        kind: str,
        payload: bytes,
        *,
        queue: str,
        value: Any = None,
        run: Run | None = None,
        seq: int | None = None,
        dedup: str | None = None,
        request_id: str = "",
        durable: bool = True,
    ) -> Future:
        """Appends a call to a queue and returns its future at once.

        payload: what the kind's handler decodes; kept until the call has run. value: the decoded payload, if it is at hand. run: the run that it
        is on, the principal's own: calls of one run run one after another. seq: its number in the run, from 1; it waits for its predecessors.
        dedup: a name: the tenant's second call of the same name returns the first one's future. durable: the call survives the server, and its
        result can be fetched again; otherwise only who waits for it already (`call`) gets it.

        Raises Conflict for a dedup that was used with another payload, Busy when too many calls wait.
        """
        if kind not in self._handlers:
            raise ValueError(f"there is no handler of {kind!r}")
        if not self._is_open:
            raise Unavailable("the server is starting or stopping", retry_after_s=1)
        line = self.queue(queue)
        future = Future(
            id=f"fut-{secrets.token_hex(16)}",
            tenant=principal.tenant,
            queue=queue,
            kind=kind,
            run_id=None if run is None else run.id,
            seq=seq,
            dedup=dedup,
            request_id=request_id,
            payload=payload,
            created_at=time.time(),
        )
        work = Work(future, value, durable)
        next_seq = 1 if run is None else run.next_seq
        if durable:
            # To its end, whoever leaves: a call that is stored and in no queue would be waited for in vain.
            return await asyncio.shield(self._enter(line, work, next_seq))
        line.check_room(principal.tenant, len(payload))
        line.put(work, next_seq)
        self._live[future.id] = work
        return future

    async def _enter(self, line: CallQueue, work: Work, next_seq: int) -> Future:
        """Stores a call and puts it into its queue; of a name that is known, returns the call that has it."""
        future = work.future
        try:
            line.check_room(future.tenant, work.size_bytes)
        except Busy:
            known = None if future.dedup is None else await self._service.io(self._service.store.find_future, future.tenant, future.dedup)
            if known is None:
                raise
            stored, is_new = known, False
        else:
            stored, is_new = await self._service.io(self._store, future)
        if not is_new:
            _check_same(stored, future)
            return stored
        work.future = stored
        try:
            line.put(work, next_seq)
        except ApiError as error:
            return await self._service.io(self._finish, work, error)
        self._live[stored.id] = work
        return stored

    async def wait(self, principal: Principal, future_id: str, timeout_s: float = 0.0) -> Future:
        """The future, once it is finished, or as it is after that time. Raises NotFound for one that the tenant does not have."""
        work = self._live.get(future_id)
        if work is None:
            future = await self._service.io(self._service.store.get, Future, future_id)
        else:
            if work.future.tenant == principal.tenant and timeout_s > 0:
                try:
                    await asyncio.wait_for(work.done.wait(), timeout_s)
                except TimeoutError:
                    pass
                except asyncio.CancelledError:
                    self._abandon(work)
                    raise
            future = self._as_it_is(work)
        if future is None or future.tenant != principal.tenant:
            raise NotFound("there is no such future")
        return future

    async def call(
        self,
        principal: Principal,
        kind: str,
        payload: bytes,
        *,
        queue: str,
        value: Any = None,
        run: Run | None = None,
        dedup: str | None = None,
        request_id: str = "",
    ) -> Reply:
        """Submits a call and waits for its result, or raises its error. Only with a `dedup` is it stored."""
        durable = dedup is not None
        future = await self.submit(principal, kind, payload, queue=queue, value=value, run=run, dedup=dedup, request_id=request_id, durable=durable)
        future = await self.wait(principal, future.id, self._service.config.limits.call_s)
        return reply_of(future)

    def position(self, future: Future) -> int | None:
        """How many calls wait before it."""
        queue = self._queues.get(future.queue)
        return None if queue is None else queue.position(future.id)

    async def expire(self) -> None:
        """Ends calls that wait in vain."""
        for queue in self._queues.values():
            for work, error in queue.expire():
                work.outcome = await self._service.io(self._finish, work, error)
                work.done.set()
                self._live.pop(work.future.id, None)
        for work, outcome in list(self._unstored.values()):
            try:
                await self._service.io(self._finish, work, outcome)
            except Exception:  # the database still does not answer; the next round may find it well
                logger.exception("the outcome of %s could still not be stored", work.future.kind)
                return
            del self._unstored[work.future.id]
            self._live.pop(work.future.id, None)

    def _abandon(self, work: Work) -> None:
        """Nobody waits any more for a call that nobody else can ask for: it need not begin."""
        queue = self._queues.get(work.future.queue)
        if not work.durable and queue is not None and queue.withdraw(work):
            self._live.pop(work.future.id, None)

    def _as_it_is(self, work: Work) -> Future:
        if work.outcome is not None:
            return work.outcome
        running = any(work in queue.running for queue in self._queues.values())
        return replace(work.future, status="running" if running else "queued")

    def _store(self, future: Future) -> tuple[Future, bool]:
        digest = "" if future.dedup is None else _digest(future)
        return self._service.store.add_future(replace(future, payload_digest=digest))

    def _finish(self, work: Work, outcome: Reply | ApiError) -> Future:
        """Stores what came of a call; blocks."""
        store, key = self._service.store, work.future.id
        if isinstance(outcome, ApiError):
            if work.durable:
                store.finish_future(key, error_status=outcome.status, error=outcome.detail)
        elif work.durable:
            store.finish_future(key, result=outcome.body, media_type=outcome.media_type, points=outcome.points)
        elif outcome.points:
            store.add_metrics(outcome.points)
        return _ended(work.future, outcome)

    def _execute(self, work: Work) -> Future:
        """Runs a call, in its queue's thread. Whatever happens becomes its outcome. It is counted, timed, traced, and its log lines know it."""
        future, begun, waited_s = work.future, time.perf_counter(), time.monotonic() - work.arrived_at
        tracing = self._service.tracing
        attributes = {"twinkle.queue": future.queue, "twinkle.request_id": future.request_id, "twinkle.run_id": future.run_id or ""}
        with log_context(request_id=future.request_id, tenant=future.tenant), tracing.call(future.kind, attributes) as span:
            ended = self._run(work)
            if ended.status == "failed" and (ended.error_status or 500) >= 500:
                tracing.fail(span, ended.error or "")
        self._service.metrics.call(future.queue, future.kind, ended.status, wait_s=waited_s, run_s=time.perf_counter() - begun)
        return ended

    def _run(self, work: Work) -> Future:
        future = work.future
        try:
            if work.durable and not self._service.store.begin_future(future.id):
                self._live.pop(future.id, None)
                return _ended(future, Failed("this call was ended before it began"))
            try:
                outcome: Reply | ApiError = self._service.run_handler(self._handlers[future.kind], future, work.value)
            except (Exception, SystemExit) as error:  # whatever a call raises is the call's outcome, and the queue goes on
                outcome = describe(error)
                level = logging.ERROR if outcome.status >= 500 else logging.INFO
                logger.log(level, "%s of %s failed: %s", future.kind, future.tenant, error, exc_info=outcome.status >= 500)
        except Exception:  # the database does not answer, so this call has not begun
            logger.exception("%s could not begin", future.kind)
            outcome = Failed("the server's database does not answer; the call did not run")
        work.value = None
        try:
            ended = self._finish(work, outcome)
        except Exception:  # it is told from memory until the database answers again: see expire
            logger.exception("the outcome of %s could not be stored; it is tried again", future.kind)
            self._unstored[future.id] = (work, outcome)
            return _ended(future, outcome)
        self._live.pop(future.id, None)
        return ended


def reply_of(future: Future) -> Reply:
    """The result of a finished future, or its error raised."""
    if future.status == "done":
        return Reply(body=future.result or b"", media_type=future.media_type or JSON)
    if future.status == "failed":
        if future.error == LOST:
            raise Lost(LOST)
        raise error_of(future.error_status or 500, future.error or "the call failed")
    raise Unavailable(f"the call {future.id} has not finished; ask for it again", retry_after_s=1)


def _ended(future: Future, outcome: Reply | ApiError) -> Future:
    """The future with what came of it."""
    whole = replace(future, payload=None, finished_at=time.time())
    if isinstance(outcome, Reply):
        return replace(whole, status="done", result=outcome.body, media_type=outcome.media_type)
    return replace(whole, status="failed", error_status=outcome.status, error=outcome.detail)


def _digest(future: Future) -> str:
    return hashlib.sha256("\0".join((future.kind, future.queue, future.run_id or "", "")).encode() + (future.payload or b"")).hexdigest()


def _check_same(before: Future, future: Future) -> None:
    if before.payload_digest != _digest(future):
        raise Conflict("this idempotency key was used for another request")
