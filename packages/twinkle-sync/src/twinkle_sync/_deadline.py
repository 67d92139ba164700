"""One deadline shared by all the waits of a transfer."""

import time
from dataclasses import dataclass, field

from ._errors import TransferTimeout


@dataclass(frozen=True)
class Deadline:
    """`timeout_s` seconds from now, for everything that happens until then."""

    timeout_s: float
    _ends_at: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends_at", time.monotonic() + self.timeout_s)

    @property
    def left_s(self) -> float:
        """Seconds left, 0 when it is over."""
        return max(0.0, self._ends_at - time.monotonic())

    def remaining_s(self, waiting_for: str) -> float:
        """Seconds left for the wait that follows; TransferTimeout naming `waiting_for` when there are none."""
        left = self.left_s
        if not left:
            raise self.expired(waiting_for)
        return left

    def expired(self, waiting_for: str) -> TransferTimeout:
        """The error that says what was waited for and for how long."""
        return TransferTimeout(f"waited {self.timeout_s:g} s for {waiting_for}; raise timeout_s if the transfer only needs longer")
