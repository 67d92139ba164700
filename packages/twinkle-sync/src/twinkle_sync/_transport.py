"""How messages travel: the protocol, and the registry of implementations."""

import importlib
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

from ._deadline import Deadline
from ._errors import ChannelMisuse
from ._messages import Message

_ENTRY_POINTS = "twinkle.transports"
_BUILT_IN = {
    "cuda_ipc": "twinkle_sync._cuda:CudaIpcTransport",
    "folder": "twinkle_sync._files:FolderTransport",
    "gloo": "twinkle_sync._gloo:GlooTransport",
    "memory": "twinkle_sync._memory:MemoryTransport",
    "nccl": "twinkle_sync._cuda:NcclTransport",
    "ray": "twinkle_sync._objects:RayTransport",
}


class Transport(Protocol):
    """Carries messages from rank 0 to every other rank, in order and without loss, or raises.

    An instance lives in each process that takes part and serves many transfers. Every wait ends at the deadline that it is
    given. After an error an instance is of no more use. One that carries buckets on GPUs has an attribute `device` ('cuda:0').
    """

    def listen(self, deadline: Deadline) -> str:
        """On rank 0, before anybody connects: be reachable, and return the address."""
        ...

    def connect(self, address: str, rank: int, world_size: int, deadline: Deadline) -> None:
        """Meet all other ranks at `address`. Rank 0 connects with the instance that listens."""
        ...

    def send(self, messages: Iterable[Message], deadline: Deadline) -> None:
        """On rank 0: send every message. An exception of the iterable passes through."""
        ...

    def receive(self, deadline: Deadline) -> Iterator[Message]:
        """On another rank: the messages of one transfer, up to its End or Abort."""
        ...

    def close(self) -> None:
        """Release sockets and memory; peers that still wait get an error. May be called twice."""
        ...


def make_transport(name: str) -> Transport:
    """A new transport.

    `name` is `memory`, `gloo`, `folder`, `ray`, `nccl`, `cuda_ipc`, one that another package registers under the entry point group
    `twinkle.transports`, or `package.module:Class`. ChannelMisuse when there is none of that name.
    """
    path = _BUILT_IN.get(name, name)
    if ":" in path:
        module, _, attribute = path.partition(":")
        factory: Any = getattr(importlib.import_module(module), attribute)
    else:
        found = {point.name: point for point in entry_points(group=_ENTRY_POINTS)}
        if name not in found:
            raise ChannelMisuse(f"no transport is called {name!r}; known are {sorted({*_BUILT_IN, *found})}")
        factory = found[name].load()
    return cast(Transport, factory())
