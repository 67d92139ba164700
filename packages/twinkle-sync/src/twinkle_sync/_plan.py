"""What the manager tells both sides, and what they tell about themselves."""

import os
import socket
from dataclasses import dataclass

from twinkle_mesh import launcher_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Everything that the two sides of one transfer must agree on."""

    transport: str
    address: str
    world_size: int
    version: int
    bucket_size_bytes: int
    timeout_s: float
    verify: bool


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
