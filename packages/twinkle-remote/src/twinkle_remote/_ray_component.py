"""A component on Ray workers, as the driver sees it."""

import itertools
import logging
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_mesh import DeviceMesh
from twinkle_remote._dispatch import Share, share_out
from twinkle_remote._errors import ComponentLostError, RemoteError, RuntimeStateError, WorkerDiedError
from twinkle_remote._lazy import LazyResult, packing, read_slot
from twinkle_remote._packing import pack
from twinkle_remote._protocol import MethodSpec
from twinkle_remote._ray_api import ray
from twinkle_remote._ray_calls import CallSource, PendingCall, wait_for
from twinkle_remote._ray_worker import Header, Slot
from twinkle_remote._shards import Result, Stop, put

if TYPE_CHECKING:
    from twinkle_remote._ray_runtime import RayRuntime

logger = logging.getLogger("twinkle_remote")

_PACKAGE = Path(__file__).parent
_STORE_BYTES = 64 << 10
_numbers = itertools.count(1)


class RayComponent:
    """The workers of one component and the calls that are under way on them.

    actors: in order of rank. pids: of their processes, for messages.
    """

    def __init__(self, runtime: "RayRuntime", class_name: str, group_name: str, mesh: DeviceMesh, call_timeout_s: float) -> None:
        self.number = next(_numbers)
        self.class_name = class_name
        self.group_name = group_name
        self.mesh = mesh
        self.actors: list[Any] = []
        self.pids: list[int] = []
        self._runtime = weakref.ref(runtime)
        self._call_timeout_s = call_timeout_s
        self._lost: str | None = None
        self._calls: list[PendingCall] = []

    def describe(self) -> str:
        return f"{self.class_name} on {len(self.actors)} worker(s) of group {self.group_name!r}"

    def call(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a remote method on the workers."""
        self._open_runtime()
        self._raise_uncollected()
        args = tuple(_at_hand(arg) for arg in args)
        kwargs = {name: _at_hand(value) for name, value in kwargs.items()}
        num_workers = 1 if spec.execute == "first" else len(self.actors)
        call = self.submit("call", spec, share_out(spec, args, kwargs, num_workers, self.mesh))
        if spec.name == "__iter__":
            wait_for([call], None)
            numbers = [result.pieces[0].value for result in call.results if isinstance(result, Result)]
            return self._iterate(spec, numbers)
        if spec.name == "__next__":
            return self._next_value(spec, call)
        lazy = LazyResult(CallSource(call, self.mesh, spec.collect, self.runtime_is_open))
        return lazy.get() if spec.returns_value else lazy

    def submit(
        self, actor_method: str, spec: MethodSpec, shares: Sequence[Share], iterators: Sequence[int] = (), extra: tuple[Any, ...] = ()
    ) -> PendingCall:
        """Start a call. shares: the arguments of each worker that takes part, by rank. extra: more arguments for the actor."""
        if self._lost is not None:
            raise ComponentLostError(f"{self.describe()} has no workers any more ({self._lost}): build it anew")
        runtime = self._open_runtime()
        timeout_s = self._call_timeout_s if spec.timeout_s is None else spec.timeout_s
        splits = runtime.known_splits()
        packed: dict[int, tuple[Any, list[Slot], list[Any], list[PendingCall]]] = {}
        upstream: dict[int, PendingCall] = {}
        references: list[Any] = []
        for rank, share in enumerate(shares):
            if id(share) not in packed:
                packed[id(share)] = _pack_share(share)
            payload, slots, results, calls = packed[id(share)]
            upstream.update((id(call), call) for call in calls)
            header = Header(
                method=spec.name,
                slots=tuple(slots),
                part=share.part,
                splits=splits,
                allow_empty=spec.allow_empty,
                timeout_s=timeout_s,
                iterator=iterators[rank] if iterators else None,
            )
            references.append(getattr(self.actors[rank], actor_method).remote(header, payload, *extra, *results))
        call = PendingCall(self, spec, references, list(upstream.values()), driver_line(), timeout_s)
        self._calls.append(call)
        return call

    def calls_before(self, call: PendingCall) -> list[PendingCall]:
        """The unfinished calls that these workers got before `call`."""
        return list(itertools.takewhile(lambda other: other is not call, self._calls))

    def call_finished(self, call: PendingCall) -> None:
        """Called by a call that has finished. One that has failed is remembered until somebody has seen its error."""
        if call.error is None and call in self._calls:
            self._calls.remove(call)
        if (runtime := self._runtime()) is not None and runtime.trace is not None:
            runtime.trace.add("driver", None, call.name, call.submit_s, time.time(), line=call.line, failed=call.error is not None)

    def record_span(self, call: PendingCall, rank: int, start_s: float, end_s: float) -> None:
        """A worker has answered."""
        if (runtime := self._runtime()) is not None and runtime.trace is not None:
            runtime.trace.add(f"{self.class_name} #{self.number} ({self.group_name})", rank, call.spec.name, start_s, end_s)

    def worker_died(self, call: PendingCall, rank: int, cause: Exception) -> None:
        """A worker's process has ended under a call."""
        if self._lost is not None:
            call.reported = True  # as what ended the component was
            call.fail(
                ComponentLostError(f"{call.name}, called from {call.line}: {self.describe()} has no workers any more ({self._lost}): build it anew")
            )
            return
        runtime = self._runtime()
        pid = self.pids[rank] if rank < len(self.pids) else None
        tail = "" if runtime is None or pid is None else runtime.log_tail(pid)
        error = WorkerDiedError(
            f"the worker of rank {rank} of {self.describe()} (process {pid}) ended during {call.name}, called from {call.line}; all workers of "
            f"this component have been ended: build it anew\n  {cause}".rstrip()
            + (f"\nIts last output:\n{tail}" if tail else "")
        )
        call.fail(error)
        self.kill(f"the worker of rank {rank} ended during {call.name}")

    def kill(self, reason: str) -> None:
        """End the workers at once. Later calls say why."""
        if self._lost is None:
            self._lost = reason
            for actor in self.actors:
                ray.kill(actor)

    def unreported_errors(self) -> list[RemoteError]:
        """Errors of calls whose results nobody collected."""
        errors = [call.error for call in list(self._calls) if call.poll() and call.error is not None and not call.reported]
        self._calls = [call for call in self._calls if not call.finished]
        return errors

    def runtime_is_open(self) -> bool:
        """Whether the runtime is not shut down."""
        runtime = self._runtime()
        return runtime is not None and runtime.is_open

    def _raise_uncollected(self) -> None:
        """Raise the error of an earlier call that nobody has seen. Looks only as far as the first call that still runs."""
        while self._calls:
            call = self._calls[0]
            if not call.poll():
                return
            if call in self._calls:  # a call that has gone well has left by itself
                self._calls.remove(call)
            if not call.reported:
                call.raise_error()

    def _iterate(self, spec: MethodSpec, numbers: Sequence[int]) -> Iterator[Any]:
        advance = MethodSpec(
            name="__next__",
            parameters=(),
            dispatch="all",
            execute=spec.execute,
            collect=spec.collect,
            sync=spec.sync,
            lazy_collect=spec.lazy_collect,
            timeout_s=spec.timeout_s,
            allow_empty=False,
        )
        share = Share((), {})
        while True:
            call = self.submit("call", advance, [share] * len(numbers), numbers)
            try:
                value = self._next_value(advance, call)
            except StopIteration:
                return
            yield value

    def _next_value(self, spec: MethodSpec, call: PendingCall) -> Any:
        """Wait for `__next__`; its value stays where it is unless the method says otherwise."""
        wait_for([call], None)
        if any(isinstance(result, Stop) for result in call.results):
            raise StopIteration
        lazy = LazyResult(CallSource(call, self.mesh, spec.collect, self.runtime_is_open))
        return lazy.get() if spec.sync or not spec.lazy_collect else lazy

    def _open_runtime(self) -> "RayRuntime":
        runtime = self._runtime()
        if runtime is None or not runtime.is_open:
            raise RuntimeStateError(f"{self.class_name} was built before shutdown(): its workers are gone; build it anew after initialize()")
        return runtime


def _pack_share(share: Share) -> tuple[Any, list[Slot], list[Any], list[PendingCall]]:
    """The share's arguments as bytes, with slots where LazyResults were; the slots; the upstream results, and calls, they need."""
    numbers: dict[tuple[int, bool], int] = {}
    slots: list[Slot] = []
    results: list[Any] = []
    calls: list[PendingCall] = []

    def register(lazy: LazyResult, sliced: bool) -> tuple[Any, ...]:
        source = lazy.source
        if not isinstance(source, CallSource) or not source.call.component.runtime_is_open():
            return (_value, (lazy.get(),))
        source.call.raise_error()
        if (key := (id(lazy), sliced)) not in numbers:
            numbers[key] = len(slots)
            slots.append(Slot(num_results=len(source.ranks), collect=source.collect_how, mesh=source.mesh, sliced=sliced))
            results.extend(source.call.references[rank] for rank in source.ranks)
            calls.append(source.call)
        return (read_slot, (numbers[key],))

    token = packing.set(register)
    try:
        packed = pack((share.args, share.kwargs))
    finally:
        packing.reset(token)
    # Large arguments are stored once, for all the workers that get them.
    return (put(packed) if len(packed) > _STORE_BYTES else packed), slots, results, calls


def _at_hand(value: Any) -> Any:
    """The value of a LazyResult that is not on workers (any more), else `value`."""
    return value.get() if isinstance(value, LazyResult) and not _is_on_workers(value) else value


def _is_on_workers(lazy: LazyResult) -> bool:
    return isinstance(lazy.source, CallSource) and lazy.source.call.component.runtime_is_open()


def _value(value: Any) -> Any:
    return value


def driver_line() -> str:
    """The innermost line outside this package: 'file:line'."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent == _PACKAGE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
