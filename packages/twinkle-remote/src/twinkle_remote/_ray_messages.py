"""What driver and workers tell one another about calls and about themselves."""

from dataclasses import dataclass
from typing import Any

from twinkle_mesh import DeviceGroup, DeviceMesh
from twinkle_remote._protocol import Collect
from twinkle_remote._views import Operation


@dataclass(frozen=True, slots=True)
class Leaf:
    """The value of a call: results first..first + num_results of those sent along, how they are collected, and over which mesh."""

    first: int
    num_results: int
    collect: Collect
    mesh: DeviceMesh


@dataclass(frozen=True, slots=True)
class Here:
    """A value that is sent along."""

    value: Any


@dataclass(frozen=True, slots=True)
class Node:
    """An operation on other trees."""

    operation: Operation
    inner: tuple["Tree", ...]


Tree = Leaf | Here | Node


@dataclass(frozen=True, slots=True)
class Slot:
    """A LazyResult among the arguments, and whether a worker takes only its part of it."""

    tree: Tree
    sliced: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a worker is told about a call.

    method: its name. slots: the LazyResults in the arguments. splits, compress_above_bytes: see `keep`. allow_empty: see
    `remote_function`. timeout_s: for fetching. iterator: of which `__next__` is meant; None: of the object. opens_iterator: whether the method
    returns an iterator that the worker is to keep. routed: the slots' recipes are sent along, rather than the results they are made of.
    """

    method: str
    slots: tuple[Slot, ...] = ()
    splits: tuple[int, ...] = ()
    allow_empty: bool = False
    timeout_s: float
    iterator: int | None = None
    opens_iterator: bool = False
    routed: bool = False
    compress_above_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds that things may take; see `initialize`."""

    start_timeout_s: float
    call_timeout_s: float
    peer_grace_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Which worker this is. component_id: unique. component: the class's name. token: what the control channel asks for.

    places: a reference to the runtime's `Places`, for a worker that builds components in other groups.
    """

    component_id: str
    component: str
    group: str
    rank: int
    world_size: int
    groups: dict[str, DeviceGroup]
    limits: Limits
    token: str
    places: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """What a worker says when its process is up. host: of its node, as Ray calls it. control_port: see `_control`."""

    pid: int
    host: str
    control_port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A component, as a handle carries it into another process. restarts: how often it had been restarted."""

    component_id: str
    class_name: str
    group_name: str
    mesh: DeviceMesh
    restarts: int
    actors: tuple[Any, ...]
    hellos: tuple[Hello, ...]
    limits: Limits
    token: str
