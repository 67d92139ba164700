"""What the manager tells both sides, and what they tell about themselves."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from twinkle_mesh import launcher_rank

SyncMode = Literal["full", "delta", "lora"]


@dataclass(frozen=True, slots=True)
class Route:
    """One sender's connection: where its receivers meet it, and how many processes that makes."""

    address: str
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Everything that the two sides of one transfer must agree on.

    routes: by the rank of the sender. places: of a component that receives, for each of its ranks its sender's rank and its own number among that
    one's receivers, from 1 on (the sender is 0). dtype: what floating point tensors are sent as; 'same': the receiver refuses others than its own;
    None: as they are. keep: both sides keep what was sent under this number, which no other transfer has (versions are a manager's own), so that a
    later transfer may be a delta to it; 0: they keep nothing. base_version: such a number, what a delta is relative to; 0: everything is sent.
    adapter_name, adapter_config: of an adapter (peft's JSON)
    that is sent in place of the weights. merge: the weights are sent with that adapter merged into them.
    """

    transport: str
    routes: Mapping[int, Route]
    version: int
    bucket_size_bytes: int
    timeout_s: float
    verify: bool
    places: tuple[tuple[int, int], ...] = ()
    dtype: str | None = None
    keep: int = 0
    base_version: int = 0
    adapter_name: str = ""
    adapter_config: str = ""
    merge: bool = False

    @property
    def sends_weights(self) -> bool:
        """Whether the weights are sent, or an adapter alone."""
        return self.merge or not self.adapter_name


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where one rank of a component lives. can_send: it is of a trainer, and has whole weights. channel: the address of its open connection."""

    rank: int
    host: str
    pid: int
    can_send: bool = False
    channel: str = field(default="", compare=False)

    @classmethod
    def here(cls, *, can_send: bool = False, channel: str = "") -> "WorkerInfo":
        """This process."""
        return cls(launcher_rank(), socket.gethostname(), os.getpid(), can_send, channel)

    @property
    def process(self) -> tuple[str, int]:
        """What tells this process from all others."""
        return self.host, self.pid


def senders_of(receivers: Sequence[WorkerInfo], able: Sequence[WorkerInfo], num_senders: int | None) -> list[int]:
    """The rank of the trainer that sends to each receiver.

    able: the ranks with whole weights, in order. num_senders: how many of them send; receivers take turns. None: receivers hear of the first rank on
    their machine, those on machines without one of the first rank of one of the trainer's machines, which take turns. So on one machine, where
    all share the memory's bandwidth, one rank sends.
    """
    if num_senders is not None:
        return [able[index % num_senders].rank for index in range(len(receivers))]
    of_host = {worker.host: worker.rank for worker in reversed(able)}
    firsts = sorted(of_host.values())
    strangers = sorted({worker.host for worker in receivers} - of_host.keys())
    of_host |= {host: firsts[index % len(firsts)] for index, host in enumerate(strangers)}
    return [of_host[worker.host] for worker in receivers]
