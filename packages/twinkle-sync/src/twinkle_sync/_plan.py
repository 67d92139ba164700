"""What the manager tells both sides, and what they tell about themselves."""

import os
import socket
from dataclasses import dataclass
from typing import Literal

from twinkle_mesh import launcher_rank

SyncMode = Literal["full", "delta", "lora"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Everything that the two sides of one transfer must agree on.

    first_receiver: number of a component's rank 0 among all receivers, from 1 on (the sender is 0). dtype: what floating point tensors are sent
    as; 'same': the receiver refuses others than its own; None: as they are. keep: both sides keep what was sent under this number, which no other
    transfer has (versions are a manager's own), so that a later transfer may be a delta to it; 0: they keep nothing. base_version: such a number,
    what a delta is relative to; 0: everything is sent. adapter_name, adapter_config: of an adapter (peft's JSON)
    that is sent in place of the weights. merge: the weights are sent with that adapter merged into them.
    """

    transport: str
    address: str
    world_size: int
    version: int
    bucket_size_bytes: int
    timeout_s: float
    verify: bool
    first_receiver: int = 1
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
    """Where one rank of a component lives."""

    rank: int
    host: str
    pid: int

    @classmethod
    def here(cls) -> "WorkerInfo":
        """This process."""
        return cls(launcher_rank(), socket.gethostname(), os.getpid())

    @property
    def process(self) -> tuple[str, int]:
        """What tells this process from all others."""
        return self.host, self.pid
