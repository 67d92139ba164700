"""The process on the other side: a generic Ray actor that holds one rank of a component."""

import inspect
import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from twinkle_remote import _event_loop, _state
from twinkle_remote._control import ControlServer
from twinkle_remote._dispatch import Part, check_enough
from twinkle_remote._errors import DispatchError, WorkerDiedError
from twinkle_remote._failures import Failure, format_remote_traceback, parts_of, summarize
from twinkle_remote._lazy import resolve, slots
from twinkle_remote._meeting import Rendezvous, hold_port
from twinkle_remote._packing import pack, unpack
from twinkle_remote._ray_api import ray
from twinkle_remote._ray_calls import waits_for_a_call
from twinkle_remote._ray_messages import Header, Hello, Identity
from twinkle_remote._ray_worker_runtime import WorkerRuntime
from twinkle_remote._shards import Inline, Result, Stop, fetch, keep
from twinkle_remote._traffic import Timing, traffic


class Worker:
    """One rank of a component. Every method returns rather than raises, so that a failure tells where it happened."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._host = ray.util.get_node_ip_address()
        self._listen_fd: int | None = None
        self._target: Any = None
        self._iterators: dict[int, Any] = {}
        self._opened = 0
        self._control = ControlServer(self._host, identity.token, waits_for_a_call)

    def hello(self) -> Hello:
        """The process is up."""
        return Hello(pid=os.getpid(), host=self._host, control_port=self._control.port)

    def meet(self) -> tuple[str, int]:
        """Rank 0: hold the port where the ranks meet."""
        port = hold_port(self._host)
        self._listen_fd = port.listen_fd
        return port.host, port.port

    def build(self, header: Header, payload: Any, meeting: tuple[str, int], restarts: int, *upstream: Any) -> "Result | Failure":
        """Construct the component's object; after a restart its `restore` method is called too."""
        identity = self._identity
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = meeting[0], str(meeting[1])
        place = Rendezvous(host=meeting[0], port=meeting[1], listen_fd=self._listen_fd, rank=identity.rank, world_size=identity.world_size)
        _state.become_worker(_state.WorkerState(host=self._host, rendezvous=place), WorkerRuntime(identity))
        start_s = time.time()
        try:
            failed = _first_failure(upstream)
            if failed is not None:
                return failed
            with _filled_slots(header, upstream):
                (cls, args, kwargs), _ = unpack(payload)
            self._target = cls(*args, **kwargs)
            if restarts and hasattr(self._target, "restore"):
                with _state.running(self._target):
                    _event_loop.finish(self._target.restore())
            return Result(None, (0, 0), (Inline(None),), start_s, time.time())
        except (Exception, SystemExit) as error:
            return self._failure(header.method, error)

    def call(self, header: Header, payload: Any, *upstream: Any) -> "Result | Stop | Failure":
        """Call a method of the object, or advance one of its iterators."""
        received_s = start_s = time.time()
        fetched_bytes, stored_bytes = traffic.fetched_bytes, traffic.stored_bytes
        try:
            failed = _first_failure(upstream)
            if failed is not None:
                return failed
            with _filled_slots(header, upstream) as shares:
                args, kwargs = unpack(payload)
            fetched_bytes = traffic.fetched_bytes - fetched_bytes
            start_s = time.time()
            with _state.running(self._target):
                value = _run(self._target, self._iterators, header, args, kwargs)
            end_s = time.time()
            if header.opens_iterator:
                return Result(None, (0, 0), (Inline(self._keep_iterator(value)),), start_s, end_s)
            result = keep(resolve(value), _share(header.part, shares), header.part, header.splits, start_s, end_s)
            return replace(result, timing=Timing(received_s, time.time(), fetched_bytes, traffic.stored_bytes - stored_bytes))
        except StopIteration as error:
            if header.method != "__next__":
                return self._failure(header.method, error)
            if header.iterator is not None:
                self._iterators.pop(header.iterator, None)
            return Stop(start_s, time.time())
        except (Exception, SystemExit) as error:
            return self._failure(header.method, error)

    def close_iterator(self, which: "Header | int", *_: Any) -> "Result | Failure":
        """Close an iterator that nobody will advance any more. which: its number, or the header of a call that somebody waits for."""
        start_s = time.time()
        number = which.iterator if isinstance(which, Header) else which
        iterator = self._iterators.pop(number or 0, None)
        try:
            if isinstance(iterator, Generator):
                with _state.running(self._target):
                    iterator.close()
            return Result(None, (0, 0), (Inline(None),), start_s, time.time())
        except Exception as error:
            return self._failure("close", error)

    def _keep_iterator(self, iterator: Any) -> int:
        self._opened += 1
        self._iterators[self._opened] = iter(iterator)
        return self._opened

    def _failure(self, method: str, error: BaseException) -> Failure:
        packed = None
        if isinstance(error, Exception):
            try:
                packed = pack(parts_of(error))
            except Exception:  # an exception may hold anything; without it the driver gets a WorkerError with this traceback
                packed = None
        identity = self._identity
        return Failure(
            component_id=identity.component_id,
            component=identity.component,
            group=identity.group,
            method=method,
            rank=identity.rank,
            end_s=time.time(),
            summary=summarize(error),
            remote_traceback=format_remote_traceback(error),
            packed=packed,
        )


# Not a method: Ray 2.60 wraps every method of an actor, also those that nobody calls from outside, which costs time and shows in tracebacks.
def _run(target: Any, iterators: dict[int, Any], header: Header, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if header.iterator is not None:
        iterator = iterators.get(header.iterator)
        if iterator is None:  # at its end, or closed, before this prefetched step came
            raise StopIteration
        return next(iterator)
    attribute = getattr(target, header.method)
    if isinstance(inspect.getattr_static(target, header.method, None), property):
        return attribute
    return _event_loop.finish(attribute(*args, **kwargs))


def _first_failure(upstream: Sequence[Any]) -> Failure | None:
    return min((result for result in upstream if isinstance(result, Failure)), key=lambda failure: failure.end_s, default=None)


def _share(part: Part | None, shares: list[tuple[int, int, int]]) -> tuple[int, int, int] | None:
    if shares:
        return shares[0]
    if part is None or part.total is None:
        return None
    bounds = part.bounds(part.total)
    return bounds.start, bounds.stop, part.total


@contextmanager
def _filled_slots(header: Header, upstream: Sequence[Any]) -> Any:
    """Fetch what the slots need, for the unpacking inside; yields the (start, stop, total) of those that were cut."""
    values: list[Any] = []
    shares: list[tuple[int, int, int]] = []
    first = 0
    for slot in header.slots:
        results = upstream[first : first + slot.num_results]
        first += slot.num_results
        try:
            value, share = fetch(results, slot.collect, slot.mesh, header.part if slot.sliced else None, header.timeout_s)
        except ray.exceptions.RayError as error:
            raise WorkerDiedError(
                f"a LazyResult among the arguments of {header.method} is lost: its worker has ended, or could not be reached within "
                f"{header.timeout_s:g} s ({summarize(error)})"
            ) from error
        values.append(value)
        if share is not None:
            shares.append(share)
    totals = {share[2] for share in shares}
    if header.part is not None and header.part.total is not None:
        totals.add(header.part.total)
    if len(totals) > 1:
        raise DispatchError(
            f"{header.method}: its lists and arrays are cut into the same parts, but they have {', '.join(map(str, sorted(totals)))} items: "
            f"make them equally long, or use dispatch='all' or a dispatch function"
        )
    if shares and header.part is not None:
        check_enough(header.method, "a LazyResult", shares[0][2], header.part.parts, "ranks", header.allow_empty)
    token = slots.set(values)
    try:
        yield shares
    finally:
        slots.reset(token)
