"""The process on the other side: a generic Ray actor that holds one rank of a component."""

import inspect
import os
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

from twinkle_remote import _event_loop, _state
from twinkle_remote._collect import unweighted
from twinkle_remote._control import ControlServer
from twinkle_remote._failures import Failure, format_remote_traceback, parts_of, summarize
from twinkle_remote._lazy import resolve
from twinkle_remote._meeting import Rendezvous, hold_port
from twinkle_remote._packing import pack
from twinkle_remote._ray_api import ray
from twinkle_remote._ray_calls import waits_for_a_call
from twinkle_remote._ray_messages import Header, Hello, Identity
from twinkle_remote._ray_routing import filled_slots, first_failure, given_of
from twinkle_remote._ray_wire import read, unpack_arguments
from twinkle_remote._ray_worker_runtime import WorkerRuntime
from twinkle_remote._shards import Given, Result, Stop, heard, inline, keep
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

    def build(self, packed: Any, meeting: tuple[str, int], restarts: int, *following: Any) -> Any:
        """Construct the component's object; after a restart its `restore` method is called too. following: what belongs to the message. Answers with
        a Result or Failure, as `heard` reads it.
        """
        identity = self._identity
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = meeting[0], str(meeting[1])
        place = Rendezvous(host=meeting[0], port=meeting[1], listen_fd=self._listen_fd, rank=identity.rank, world_size=identity.world_size)
        _state.become_worker(_state.WorkerState(host=self._host, rendezvous=place), WorkerRuntime(identity))
        start_s = time.time()
        try:
            message, upstream = read(packed, following)
            answers = [heard(answer) for answer in upstream]
            failed = first_failure(answers)
            if failed is not None:
                return failed
            with filled_slots(message, answers):
                (cls, args, kwargs), _ = unpack_arguments(message)
            self._target = cls(*args, **kwargs)
            if restarts and hasattr(self._target, "restore"):
                with _state.running(self._target):
                    _event_loop.finish(self._target.restore())
            return _nothing(start_s)
        except BaseException as error:  # also a SystemExit or a CancelledError: the caller hears of it, and its peers are seen to
            return self._failure("__init__", error)

    def call(self, packed: Any, *following: Any) -> Any:
        """Call a method of the object, or advance one of its iterators. following: what belongs to the message. Answers with a Result, Stop or
        Failure, as `heard` reads it.
        """
        received_s = start_s = time.time()
        fetched_bytes, stored_bytes = traffic.fetched_bytes, traffic.stored_bytes
        method = "a call"
        iterator: int | None = None
        try:
            message, upstream = read(packed, following)
            header = message.header
            method, iterator = header.method, header.iterator
            if upstream or header.slots:
                answers = [heard(answer) for answer in upstream]
                failed = first_failure(answers)
                if failed is not None:
                    return failed
                with filled_slots(message, answers) as given:
                    args, kwargs = unpack_arguments(message)
            else:
                given = given_of(message)
                args, kwargs = unpack_arguments(message)
            fetched_bytes = traffic.fetched_bytes - fetched_bytes
            start_s = time.time()
            with _state.running(self._target):
                value = _run(self._target, self._iterators, header, args, kwargs)
            end_s = time.time()
            if header.opens_iterator:
                return Result(None, (0, 0), (inline(self._keep_iterator(value)),), start_s, end_s).answer()
            value, weight = unweighted(resolve(value))
            given = _as_given(given, args, kwargs)
            result = keep(value, given, message.part, header.splits, start_s, end_s, weight, header.compress_above_bytes)
            return result.answer(Timing(received_s, time.time(), fetched_bytes, traffic.stored_bytes - stored_bytes))
        except StopIteration as error:
            if method != "__next__":
                return self._failure(method, error)
            if iterator is not None:
                self._iterators.pop(iterator, None)
            return Stop(start_s, time.time())
        except BaseException as error:  # also a SystemExit or a CancelledError: the caller hears of it, and its peers are seen to
            return self._failure(method, error)

    def close_iterator(self, which: Any, *_: Any) -> Any:
        """Close an iterator that nobody will advance any more. which: its number, or the message of a call that somebody waits for."""
        start_s = time.time()
        number: int | None = which if isinstance(which, int) else read(which, ())[0].header.iterator
        iterator = self._iterators.pop(number or 0, None)
        try:
            if isinstance(iterator, Generator):
                with _state.running(self._target):
                    iterator.close()
            return _nothing(start_s)
        except BaseException as error:
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
    if _is_property(cast("type[Any]", type(target)), header.method):
        return attribute
    return _event_loop.finish(attribute(*args, **kwargs))


@cache
def _is_property(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name, None), property)


def _nothing(start_s: float) -> Any:
    return Result(None, (0, 0), (inline(None),), start_s, time.time()).answer()


def _as_given(given: Given | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Given | None:
    """`given`, with whether it is a tuple, which a tuple that is returned may go with."""
    if given is None:
        return None
    as_tuple = any(type(value) is tuple and len(cast("tuple[Any, ...]", value)) == given.stop - given.start for value in (*args, *kwargs.values()))
    return replace(given, as_tuple=True) if as_tuple else given
