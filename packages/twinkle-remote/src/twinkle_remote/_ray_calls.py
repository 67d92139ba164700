"""Calls under way on Ray workers: waiting for them, and finding out at once when one has failed."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from twinkle_mesh import DeviceMesh
from twinkle_remote._collect import contributors
from twinkle_remote._errors import CallTimeoutError, RemoteError, RuntimeStateError, WorkerDiedError, WorkerError
from twinkle_remote._failures import Failure, fresh, to_exception
from twinkle_remote._lazy import CallLike
from twinkle_remote._packing import unpack
from twinkle_remote._protocol import Collect, MethodSpec
from twinkle_remote._ray_api import ray
from twinkle_remote._shards import Inline, Result, Stop, Stored, heard
from twinkle_remote._traffic import traffic
from twinkle_remote._views import Batch, Recipe

if TYPE_CHECKING:
    from twinkle_remote._ray_component import RayComponent

logger = logging.getLogger("twinkle_remote")

T = TypeVar("T")

# So long a call is waited for as a whole, which costs one request to Ray; then rank by rank, so that a failure beside a hung peer is seen.
_TOGETHER_S = 0.05
# A result that is here already is taken also after a deadline that its call has just kept.
_MIN_FETCH_S = 1.0
# Others may have failed before the first to say so: their answers are on the way.
_CAUSE_WAIT_S = 0.5
# The threads of this process that wait for remote calls.
_waiting: set[int] = set()


def waits_for_a_call() -> bool:
    """Whether this process waits for a remote call, whose own deadline bounds the wait."""
    return bool(_waiting)


class PendingCall:
    """One call on the workers of a component.

    references: what each worker will say (a Result, Stop or Failure), in order of rank. upstream: the calls whose results are among
    its arguments. line: of the driver script, for messages.
    earlier: the unfinished calls before it, once the component has forgotten them. claimed: somebody will wait for it. waiters: the threads that do.
    """

    def __init__(
        self, component: "RayComponent", spec: MethodSpec, references: Sequence[Any], upstream: Sequence["PendingCall"], line: str, timeout_s: float
    ) -> None:
        self.component = component
        self.spec = spec
        self.references = tuple(references)
        self.upstream = tuple(upstream)
        self.line = line
        self.timeout_s = timeout_s
        self.crew_number = component.restarts
        self.submit_s = time.time()
        self.results: list[Result | Stop | Failure | None] = [None] * len(self.references)
        self.error: RemoteError | None = None
        self.reported = False
        self.earlier: Sequence[PendingCall] = ()
        self.claimed = False
        self.waiters: set[int] = set()
        self._lock = threading.RLock()

    @property
    def name(self) -> str:
        return f"{self.component.class_name}.{self.spec.title}"

    @property
    def finished(self) -> bool:
        """Whether all workers have answered or the call has failed."""
        return self.error is not None or all(result is not None for result in self.results)

    @property
    def is_awaited(self) -> bool:
        """Whether its error, if it has one, goes to somebody who waits for it."""
        return self.claimed or bool(self.waiters)

    @property
    def is_next(self) -> bool:
        """Whether nothing that is not finished has to come before it."""
        return not self.upstream and not self.component.calls_before(self)

    def running_ranks(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank, result in enumerate(self.results) if result is None]

    def poll(self) -> bool:
        """Take in what has arrived, without waiting; whether the call is finished."""
        if not self.finished:
            waiting = {self.references[rank]: rank for rank in self.running_ranks()}
            arrived, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
            for reference in arrived:
                self.take(waiting[reference])
        return self.finished

    def take(self, rank: int) -> None:
        """Take in the answer of one worker, which has arrived. Ends in `error` if it is not a result."""
        with self._lock:
            if self.results[rank] is not None or self.error is not None:
                return
            try:
                answer = heard(ray.get(self.references[rank]))
            except ray.exceptions.RayError as error:
                if _is_death(error):
                    self.component.worker_died(self, rank, error)
                    return
                self.fail(WorkerError(f"{self.name} on rank {rank} of {self.component.describe()}, called from {self.line}: {error}"))
                return
            self._answered(rank, answer)
            self._finish_if_all_answered()

    def take_together(self, timeout_s: float) -> None:
        """Take in the answers of all workers if they are there within `timeout_s`, a short time; else, or if one has died, none."""
        try:
            answers = ray.get(list(self.references), timeout=timeout_s)
        except ray.exceptions.RayError:  # what it is, `take` finds out
            return
        with self._lock:
            missing = self.running_ranks()
            for rank in missing:
                if self.error is None:
                    self._answered(rank, heard(answers[rank]))
            if missing:
                self._finish_if_all_answered()

    def _answered(self, rank: int, answer: Result | Stop | Failure) -> None:
        self.results[rank] = answer
        if isinstance(answer, Failure):
            self._failed(answer)
        else:
            self.component.costs.add_answer(self.spec.name, rank, self.submit_s, answer)

    def _finish_if_all_answered(self) -> None:
        if self.error is None and self.finished:
            self.upstream = self.earlier = ()
            self.component.call_finished(self)

    def fail(self, error: RemoteError) -> None:
        """The call has failed with `error`."""
        with self._lock:
            if self.error is None:
                self.error = error
                self.upstream = self.earlier = ()
                self.component.call_finished(self)

    def raise_error(self) -> None:
        """Raises the call's error, if it has failed."""
        if self.error is not None:
            self.reported = True
            raise fresh(self.error)

    def take_late(self, rank: int) -> None:
        """Take in the answer of a worker after the call has failed: only whether it lives matters."""
        try:
            answer = heard(ray.get(self.references[rank]))
        except ray.exceptions.RayError as error:
            answer = Stop(0.0, 0.0)
            if _is_death(error):
                self.component.kill(f"the worker of rank {rank} ended during {self.name}, which had failed on another rank", self.crew_number)
        self.results[rank] = answer

    def _failed(self, failure: Failure) -> None:
        """Fail with the earliest failure, and see to the workers that still run."""
        note = ""
        if failure.component_id == self.component.id:
            failure = replace(self._earliest_failure(failure), method=self.spec.title)
            note = self.component.after_failure(self, self.running_ranks(), failure.summary)
        else:
            self.reported = True  # as a failure of the call that it comes from
        self.fail(to_exception(failure, unpack, self.line, note))

    def _earliest_failure(self, failure: Failure) -> Failure:
        """The first to fail is the cause; it may not be the first to be heard of."""
        waiting = {self.references[rank]: rank for rank in self.running_ranks()}
        if waiting:
            arrived, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=_CAUSE_WAIT_S)
            for reference in arrived:
                self.take_late(waiting[reference])
        return min((result for result in self.results if isinstance(result, Failure)), key=lambda one: one.end_s, default=failure)


def _is_death(error: Exception) -> bool:
    """Whether a worker's process has ended, rather than that something went wrong in it."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return False
    return isinstance(error, (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError, ray.exceptions.WorkerCrashedError))


def wait_for(calls: Sequence[PendingCall], timeout_s: float | None) -> None:
    """Wait until all calls have finished. Raises the first failure of any of them, of a call they wait for, or of one before them on the
    same workers; CallTimeoutError after `timeout_s` or, if that is None, after the longest deadline of the calls and of those that they wait
    for, which ends the workers that hang.
    """
    me = threading.get_ident()
    for call in calls:
        call.waiters.add(me)
    try:
        if len(calls) == 1:
            if not calls[0].finished and calls[0].is_next:
                calls[0].take_together(_TOGETHER_S if timeout_s is None else min(_TOGETHER_S, timeout_s))
            if calls[0].finished:
                calls[0].raise_error()
                return
        limit_s = own_limit_s(calls) if timeout_s is None else timeout_s
        _waiting.add(me)
        _wait_until(calls, time.monotonic() + limit_s, limit_s, final=timeout_s is None)
    finally:
        _waiting.discard(me)
        for call in calls:
            call.waiters.discard(me)


def _wait_until(calls: Sequence[PendingCall], deadline: float, limit_s: float, *, final: bool) -> None:
    while True:
        watched = _with_blockers(calls)
        for call in watched:
            if call.poll() and (call in calls or not (call.reported or call.is_awaited)):
                call.raise_error()
        open_calls = [call for call in watched if not call.finished]
        if all(call.finished for call in calls):
            return
        waiting = {call.references[rank]: (call, rank) for call in open_calls for rank in call.running_ranks()}
        left_s = deadline - time.monotonic()
        arrived, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, left_s))
        if not arrived and left_s <= 0:
            raise fresh(_timed_out(calls, open_calls, limit_s, final=final))
        for reference in arrived:
            call, rank = waiting[reference]
            call.take(rank)


def own_limit_s(calls: Sequence[PendingCall]) -> float:
    """Seconds for the calls where the caller sets none. A short call behind a long one, in its queue or upstream, gets the long one's."""
    return max(call.timeout_s for call in (*calls, *(call for call in _with_blockers(calls) if not call.finished)))


def _with_blockers(calls: Iterable[PendingCall]) -> list[PendingCall]:
    """The calls and all unfinished ones that they may be waiting for, each before those that wait for it."""
    found: dict[int, PendingCall] = {}

    def visit(call: PendingCall) -> None:
        stack = [(call, False)]
        while stack:
            one, explored = stack.pop()
            if explored:
                found.setdefault(id(one), one)
                continue
            if id(one) in found or id(one) in opened:
                continue
            opened.add(id(one))
            stack.append((one, True))
            if not one.finished:
                stack.extend((other, False) for other in (*one.upstream, *one.component.calls_before(one)))

    opened: set[int] = set()
    for call in calls:
        visit(call)
    return list(found.values())


def _timed_out(calls: Sequence[PendingCall], open_calls: Sequence[PendingCall], limit_s: float, *, final: bool) -> CallTimeoutError:
    late = "; ".join(f"{call.name}: ranks {call.running_ranks()} of group {call.component.group_name!r} still run" for call in open_calls)
    message = f"{', '.join(call.name for call in calls)} did not finish within {limit_s:.3g} s, called from {calls[0].line}: {late}"
    if not final:
        return CallTimeoutError(message)
    stacks = "\n".join(call.component.stacks(call.running_ranks()) for call in open_calls)
    error = CallTimeoutError(
        f"{message}. Their workers have been ended; if it was only slow, raise timeout_s or call_timeout_s before you build them anew\n{stacks}"
    )
    for call in open_calls:
        call.fail(error)
        call.reported = True
        call.component.kill(f"{calls[0].name} did not finish within {limit_s:.3g} s", call.crew_number)
    return error


class CallSource:
    """The value of a call, for a LazyResult."""

    def __init__(self, call: PendingCall, mesh: DeviceMesh, collect: Collect, is_open: Callable[[], bool], *, no_copies: bool = False) -> None:
        self.call = call
        self.mesh = mesh
        self.collect_how: Collect = collect
        self.ranks = contributors(collect, len(call.references), mesh, no_copies=no_copies)
        self._is_open = is_open

    def claim(self) -> None:
        self.call.claimed = True

    def ready(self) -> bool:
        with self.call.component.in_use():
            self._check_open()
            return self.call.poll()

    def open(self, timeout_s: float | None) -> Batch:
        begin = time.monotonic()
        with self.call.component.in_use():
            self._check_open()
            wait_for([self.call], timeout_s)
        fetch_s = self.call.timeout_s if timeout_s is None else max(_MIN_FETCH_S, timeout_s - (time.monotonic() - begin))
        return self._fetched(fetch_s)

    def value(self) -> Any:
        """Wait for the call, and collect its value."""
        wait_for([self.call], None)
        return self._fetched(self.call.timeout_s).whole().run(None)

    def _fetched(self, fetch_s: float) -> "_Fetched":
        results = [result for rank in self.ranks if isinstance(result := self.call.results[rank], Result)]
        is_here = all(isinstance(piece, Inline) for result in results for piece in result.pieces)

        def check() -> None:
            if not is_here and not self._is_open():
                raise self._too_late()  # Ray 2.60 would start a new cluster to look for the pieces

        return _Fetched(self.call, Stored(results, self.collect_how, self.mesh, fetch_s), check)

    def calls(self) -> Sequence[CallLike]:
        return (self,)

    def wait_all(self, sources: Sequence[CallLike], timeout_s: float | None) -> None:
        with self.call.component.in_use():
            self._check_open()
            wait_for([source.call for source in sources if isinstance(source, CallSource)], timeout_s)

    def _check_open(self) -> None:
        if not self._is_open() and not self.call.finished:
            raise self._too_late()

    def _too_late(self) -> RuntimeStateError:
        return RuntimeStateError(f"the result of {self.call.name} was not collected before shutdown()")


class _Fetched:
    """The value of a call, fetched into the driver when it is asked for."""

    def __init__(self, call: PendingCall, stored: Stored, check: Callable[[], None]) -> None:
        self._call = call
        self._stored = stored
        self._check = check

    @property
    def length(self) -> int | None:
        return _fetching(self._call, self._check, lambda: self._stored.length)

    def recipe(self, start: int, stop: int) -> Recipe:
        return _DriverRecipe(self._call, self._check, lambda: self._stored.recipe(start, stop))

    def whole(self) -> Recipe:
        return _DriverRecipe(self._call, self._check, self._stored.whole)


class _DriverRecipe:
    def __init__(self, call: PendingCall, check: Callable[[], None], make: Callable[[], Recipe]) -> None:
        self._call = call
        self._check = check
        self._make = make

    def run(self, timeout_s: float | None) -> Any:
        start_s, fetched_bytes = time.time(), traffic.fetched_bytes
        value = _fetching(self._call, self._check, lambda: self._make().run(self._call.timeout_s if timeout_s is None else timeout_s))
        self._call.component.costs.add_collect(self._call.spec.name, self._call.name, start_s, traffic.fetched_bytes - fetched_bytes)
        return value


def _fetching(call: PendingCall, check: Callable[[], None], ask: Callable[[], T]) -> T:
    """What `ask` returns; ray's errors as ours. check: raises where Ray is gone."""
    try:
        with call.component.in_use():
            check()
            return ask()
    except ray.exceptions.GetTimeoutError as error:
        raise CallTimeoutError(f"the result of {call.name}, called from {call.line}, did not arrive in time: {error}") from error
    except ray.exceptions.RayError as error:
        raise WorkerDiedError(f"the result of {call.name}, called from {call.line}, is lost: its worker has ended ({error})") from error
