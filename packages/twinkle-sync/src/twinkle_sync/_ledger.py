"""The running account of a transfer: how much was sent, and a digest of all of it."""

import hashlib
from dataclasses import dataclass
from typing import Any, cast

import torch
import xxhash

from ._errors import TensorNotSupported
from ._spec import TensorSpec


@dataclass(frozen=True, slots=True)
class TransferReceipt:
    """What one side of a transfer saw. Both sides' receipts must be equal."""

    version: int
    num_tensors: int
    size_bytes: int
    digest: str


class Checksum:
    """XXH3 (64 bits) of the bytes that were added so far.

    About 8 GiB/s on one core, four times what zlib's CRC-32 does; one wrong transfer in 2^64 would pass.
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def add(self, data: torch.Tensor) -> None:
        """Continue with a contiguous uint8 tensor. One on a GPU is copied to the host for it."""
        if data.numel():
            self._state.update(memoryview(cast(Any, data.cpu().numpy())))

    @property
    def value(self) -> int:
        """The checksum so far."""
        return self._state.intdigest()


class Ledger:
    """Counts tensors and folds name, dtype, shape and checksum of each, in order, into one BLAKE2b digest (64 bits).

    The digest depends on the order of the tensors and not on how they were cut into buckets, so that the same weights give the same digest
    under any bucket size. It finds mistakes, not attackers.
    """

    def __init__(self) -> None:
        self.num_tensors = 0
        self.size_bytes = 0
        self._names: set[str] = set()
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, spec: TensorSpec, checksum: int) -> None:
        """Enter one whole tensor whose bytes have this `Checksum`; TensorNotSupported when its name was there before."""
        if spec.name in self._names:
            raise TensorNotSupported(f"{spec.name} was yielded twice; a weight source yields each name once")
        self._names.add(spec.name)
        self.num_tensors += 1
        self.size_bytes += spec.size_bytes
        self._digest.update(f"{spec.name}\0{spec.dtype}\0{spec.shape}\0{checksum}\n".encode())

    def receipt(self, version: int) -> TransferReceipt:
        """The account so far."""
        return TransferReceipt(version, self.num_tensors, self.size_bytes, self._digest.hexdigest())
