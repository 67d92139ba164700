"""Memory for buckets, which is used again as soon as nobody looks at it any more."""

import threading
import weakref
from typing import Any

import torch

_KEPT = 2  # as many as a side has in use: one that travels, one that is made or loaded


class Buffers:
    """Lends byte tensors of one transfer. Memory comes back with the last view of it, so whoever receives a tensor may keep it as long as it likes.

    New memory costs more than the copy into it: the system clears each page at its first use.

    Args:
        device: where the bytes lie. On a GPU torch's own allocator does what this class does.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._free: list[torch.Tensor] = []
        self._num_lent = 0
        self._is_needed = False
        self._changed = threading.Condition()

    def take(self, size_bytes: int, *, wait_s: float = 0.0) -> torch.Tensor:
        """uint8 [size_bytes] of any content. While two are lent it waits, at most so long and until `need` says that somebody waits for this one."""
        if self._device != "cpu":
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        with self._changed:
            self._changed.wait_for(lambda: self._is_needed or self._num_lent < _KEPT, wait_s)
            self._free = [buffer for buffer in self._free if buffer.nbytes >= size_bytes]
            # Rounded up, since no two buckets are equally full: memory that is not touched costs nothing.
            whole = self._free.pop() if self._free else torch.empty(1 << (size_bytes - 1).bit_length(), dtype=torch.uint8)
            self._num_lent += 1
        # An array in between, which the storage of the tensor that is lent holds: it goes with the last view of that tensor.
        lent: Any = whole.numpy()[:]  # pyright: ignore[reportUnknownMemberType]
        weakref.finalize(lent, self._back, whole).atexit = False
        return torch.from_numpy(lent)[:size_bytes]  # pyright: ignore[reportUnknownMemberType]

    def need(self, now: bool) -> None:
        """Whether somebody waits for what is taken ahead, who then may keep the others for good."""
        with self._changed:
            self._is_needed = now
            self._changed.notify_all()

    def _back(self, whole: torch.Tensor) -> None:
        with self._changed:
            self._num_lent -= 1
            if len(self._free) + self._num_lent < _KEPT:
                self._free.append(whole)
            self._changed.notify_all()
