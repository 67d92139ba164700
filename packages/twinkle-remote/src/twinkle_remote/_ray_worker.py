"""The process on the other side: a generic Ray actor that holds one rank of a component."""

import os
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from twinkle_mesh import DeviceGroup, DeviceMesh, PlacementPlan, launcher_world_size
from twinkle_remote import _state
from twinkle_remote._dispatch import Part, check_enough
from twinkle_remote._errors import DispatchError, GroupError
from twinkle_remote._failures import Failure, format_remote_traceback, parts_of, summarize
from twinkle_remote._lazy import resolve, slots
from twinkle_remote._local import find_group
from twinkle_remote._meeting import Rendezvous, hold_port
from twinkle_remote._packing import pack, unpack
from twinkle_remote._protocol import Collect, Execute
from twinkle_remote._ray_api import ray
from twinkle_remote._shards import Inline, Result, Stop, fetch, keep


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A LazyResult among the arguments: how many of the upstream results are its, how they are collected, and whether this
    worker takes only its part of it."""

    num_results: int
    collect: Collect
    mesh: DeviceMesh
    sliced: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a worker is told about a call.

    method: its name. slots: the LazyResults in the arguments. part: which part of the batch arguments is this worker's. splits: see
    `keep`. allow_empty: see `remote_function`. timeout_s: for fetching. iterator: of which `__next__` is meant; None: of the object.
    """

    method: str
    slots: tuple[Slot, ...] = ()
    part: Part | None = None
    splits: tuple[int, ...] = ()
    allow_empty: bool = False
    timeout_s: float
    iterator: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Which worker this is. component_id: unique in the driver. component: the class's name."""

    component_id: int
    component: str
    group: str
    rank: int
    world_size: int
    groups: dict[str, DeviceGroup]


class WorkerRuntime:
    """The runtime in a worker: components of its own group are built in process."""

    mode: Literal["local", "torchrun", "ray"] = "ray"
    slices_in_loader = False
    plan: PlacementPlan | None = None
    trace = None

    def __init__(self, identity: Identity) -> None:
        self.groups = identity.groups
        self._group = identity.group

    def is_remote(self, group_name: str | None) -> bool:
        if group_name is not None and group_name != self._group:
            find_group(self.groups, group_name)
            raise GroupError(f"a worker of group {self._group!r} cannot build a component in group {group_name!r}: build it in the driver script")
        return False

    def mesh_for(self, group_name: str | None, mesh: DeviceMesh | None, execute: Execute) -> DeviceMesh:
        if mesh is None:
            mesh = DeviceMesh.from_sizes(dp_size=launcher_world_size())
        return mesh.with_device_type(self.groups[self._group].device_type)

    def create(self, cls: type, group_name: str, mesh: DeviceMesh, execute: Execute, args: Sequence[Any], kwargs: dict[str, Any]) -> NoReturn:
        raise AssertionError("components in a worker are built in process")

    def shutdown(self) -> None:
        raise GroupError("only the driver script calls shutdown()")

    def __enter__(self) -> "WorkerRuntime":
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None


class Worker:
    """One rank of a component. Every method returns rather than raises, so that a failure tells where it happened."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._host = ray.util.get_node_ip_address()
        self._listen_fd: int | None = None
        self._target: Any = None
        self._iterators: dict[int, Any] = {}

    def hello(self) -> int:
        """The process id: the process is up."""
        return os.getpid()

    def meet(self) -> tuple[str, int]:
        """Rank 0: hold the port where the ranks meet."""
        port = hold_port(self._host)
        self._listen_fd = port.listen_fd
        return port.host, port.port

    def build(self, header: Header, payload: Any, meeting: tuple[str, int], *upstream: Any) -> "Result | Failure":
        """Construct the component's object."""
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
            return Result(None, (0, 0), (Inline(None),), start_s, time.time())
        except (Exception, SystemExit) as error:
            return self._failure(header.method, error)

    def call(self, header: Header, payload: Any, *upstream: Any) -> "Result | Stop | Failure":
        """Call a method of the object, or advance one of its iterators."""
        start_s = time.time()
        try:
            failed = _first_failure(upstream)
            if failed is not None:
                return failed
            with _filled_slots(header, upstream) as shares:
                args, kwargs = unpack(payload)
            start_s = time.time()
            token = _state.active.set(frozenset({id(self._target)}))
            try:
                if header.iterator is not None:
                    value = next(self._iterators[header.iterator])
                else:
                    value = getattr(self._target, header.method)(*args, **kwargs)
            finally:
                _state.active.reset(token)
            end_s = time.time()
            if header.method == "__iter__":
                return Result(None, (0, 0), (Inline(self._keep_iterator(value)),), start_s, end_s)
            return keep(resolve(value), _share(header.part, shares), header.part, header.splits, start_s, end_s)
        except StopIteration as error:
            if header.method != "__next__":
                return self._failure(header.method, error)
            if header.iterator is not None:
                del self._iterators[header.iterator]
            return Stop(start_s, time.time())
        except (Exception, SystemExit) as error:
            return self._failure(header.method, error)

    def _keep_iterator(self, iterator: Any) -> int:
        number = max(self._iterators, default=0) + 1
        self._iterators[number] = iterator
        return number

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
        value, share = fetch(results, slot.collect, slot.mesh, header.part if slot.sliced else None, header.timeout_s)
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
