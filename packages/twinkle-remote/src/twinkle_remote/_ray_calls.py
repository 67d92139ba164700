"""Calls under way on Ray workers: waiting for them, and finding out at once when one has failed."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from twinkle_mesh import DeviceMesh
from twinkle_remote._collect import contributors
from twinkle_remote._errors import CallTimeoutError, RemoteError, RuntimeStateError, WorkerDiedError, WorkerError
from twinkle_remote._failures import Failure, to_exception
from twinkle_remote._lazy import Source
from twinkle_remote._packing import unpack
from twinkle_remote._protocol import Collect, MethodSpec
from twinkle_remote._ray_api import ray
from twinkle_remote._shards import Inline, Result, Stop, fetch

if TYPE_CHECKING:
    from twinkle_remote._ray_component import RayComponent

logger = logging.getLogger("twinkle_remote")

PEER_GRACE_S = 1.0


class PendingCall:
    """One call on the workers of a component.

    references: what each worker will say (a Result, Stop or Failure), in order of rank. upstream: the calls whose results are among
    its arguments. line: of the driver script, for messages.
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
        self.submit_s = time.time()
        self.results: list[Result | Stop | Failure | None] = [None] * len(self.references)
        self.error: RemoteError | None = None
        self.reported = False
        self._lock = threading.RLock()

    @property
    def name(self) -> str:
        return f"{self.component.class_name}.{self.spec.name}"

    @property
    def finished(self) -> bool:
        """Whether all workers have answered or the call has failed."""
        return self.error is not None or all(result is not None for result in self.results)

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
                answer = ray.get(self.references[rank])
            except ray.exceptions.RayError as error:
                if isinstance(error, ray.exceptions.RayActorError) and not isinstance(error, ray.exceptions.RayTaskError):
                    self.component.worker_died(self, rank, error)
                    return
                self.fail(WorkerError(f"{self.name} on rank {rank} of {self.component.describe()}, called from {self.line}: {error}"))
                return
            self.results[rank] = answer
            if isinstance(answer, Failure):
                self._failed(answer)
            else:
                self.component.record_span(self, rank, answer.start_s, answer.end_s)
                if self.finished:
                    self.upstream = ()
                    self.component.call_finished(self)

    def fail(self, error: RemoteError) -> None:
        """The call has failed with `error`."""
        with self._lock:
            if self.error is None:
                self.error = error
                self.upstream = ()
                self.component.call_finished(self)

    def raise_error(self) -> None:
        """Raises the call's error, if it has failed."""
        if self.error is not None:
            self.reported = True
            raise self.error

    def _failed(self, failure: Failure) -> None:
        """Raise the earliest failure; end the workers that hang in the call because of it."""
        note = ""
        if failure.component_id == self.component.number:
            failure = self._earliest_failure(failure)
            hung = self.running_ranks()
            if hung:
                note = (
                    f"ranks {hung} were still in the call {PEER_GRACE_S:g} s later, so all workers of this component have been ended: build it anew"
                )
        else:
            self.reported = True  # as a failure of the call that it comes from
        error = to_exception(failure, unpack, self.line, note)
        self.fail(error)
        if note:
            self.component.kill(f"{self.name} failed: {failure.summary}")

    def _earliest_failure(self, failure: Failure) -> Failure:
        """Give the peers a moment: some may finish well, and the first to fail is the cause."""
        waiting = {self.references[rank]: rank for rank in self.running_ranks()}
        if waiting:
            arrived, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=PEER_GRACE_S)
            for reference in arrived:
                try:
                    self.results[waiting[reference]] = ray.get(reference)
                except ray.exceptions.RayError:  # died because its peer did
                    continue
        return min((result for result in self.results if isinstance(result, Failure)), key=lambda one: one.end_s, default=failure)


def wait_for(calls: Sequence[PendingCall], timeout_s: float | None) -> None:
    """Wait until all calls have finished. Raises the first failure of any of them, of a call they wait for, or of one before them on the
    same workers; CallTimeoutError after `timeout_s` or, if that is None, after the longest deadline of the calls and of those that they wait
    for, which ends the workers that hang.
    """
    limit_s = own_limit_s(calls) if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    while True:
        watched = _with_blockers(calls)
        for call in watched:
            if call.poll() and (call in calls or not call.reported):
                call.raise_error()
        open_calls = [call for call in watched if not call.finished]
        if all(call.finished for call in calls):
            return
        waiting = {call.references[rank]: (call, rank) for call in open_calls for rank in call.running_ranks()}
        left_s = deadline - time.monotonic()
        arrived, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, left_s))
        if not arrived and left_s <= 0:
            raise _timed_out(calls, open_calls, limit_s, final=timeout_s is None)
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
    message = f"{', '.join(call.name for call in calls)} did not finish within {limit_s:g} s, called from {calls[0].line}: {late}"
    if not final:
        return CallTimeoutError(message)
    error = CallTimeoutError(f"{message}. Their workers have been ended: build these components anew, with a larger timeout_s or call_timeout_s")
    for call in open_calls:
        call.fail(error)
        call.reported = True
    for component in {call.component for call in open_calls}:
        component.kill(f"{calls[0].name} did not finish within {limit_s:g} s")
    return error


class CallSource:
    """The value of a call, for a LazyResult."""

    def __init__(self, call: PendingCall, mesh: DeviceMesh, collect: Collect, is_open: Callable[[], bool]) -> None:
        self.call = call
        self.mesh = mesh
        self.collect_how: Collect = collect
        self.ranks = contributors(collect, len(call.references), mesh)
        self._is_open = is_open

    def ready(self) -> bool:
        self._check_open()
        return self.call.poll()

    def collect(self, timeout_s: float | None) -> Any:
        self._check_open()
        wait_for([self.call], timeout_s)
        results = [result for rank in self.ranks if isinstance(result := self.call.results[rank], Result)]
        if not self._is_open() and not all(isinstance(piece, Inline) for result in results for piece in result.pieces):
            raise self._too_late()  # Ray 2.60 would start a new cluster to look for the pieces
        try:
            return fetch(results, self.collect_how, self.mesh, None, self.call.timeout_s if timeout_s is None else timeout_s)[0]
        except ray.exceptions.GetTimeoutError as error:
            raise CallTimeoutError(f"the result of {self.call.name}, called from {self.call.line}, did not arrive in time: {error}") from error
        except ray.exceptions.RayError as error:
            raise WorkerDiedError(f"the result of {self.call.name}, called from {self.call.line}, is lost: its worker has ended ({error})") from error

    def wait_all(self, sources: Sequence[Source], timeout_s: float | None) -> None:
        self._check_open()
        wait_for([source.call for source in sources if isinstance(source, CallSource)], timeout_s)

    def _check_open(self) -> None:
        if not self._is_open() and not self.call.finished:
            raise self._too_late()

    def _too_late(self) -> RuntimeStateError:
        return RuntimeStateError(f"the result of {self.call.name} was not collected before shutdown()")
