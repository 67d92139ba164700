"""Loss scaling of float16 (Mixed Precision Training, arXiv:1710.03740, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ._errors import ConfigError

_GROWTH_INTERVAL = 1000
# Losses are sums, whose gradients are large: the scale may have to be less than one.
_SMALLEST = 2.0**-14


class LossScale:
    """By what losses are multiplied before backward: half after each step that overflows, twice after a thousand that do not.

    Args:
        initial: the scale before the first step.

    Raises:
        ConfigError: it is not a positive number.
    """

    def __init__(self, initial: float) -> None:
        if not 0 < initial < float("inf"):
            raise ConfigError(f"initial_loss_scale must be a positive number, got {initial}")
        self.value = float(initial)
        self._smallest = min(initial, _SMALLEST)
        self._steps = 0

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to run backward."""
        return loss * self.value

    def update(self, *, overflowed: bool) -> None:
        """Called after each step, taken or skipped."""
        self._steps = 0 if overflowed else self._steps + 1
        if overflowed:
            self.value = max(self.value / 2, self._smallest)
        elif self._steps == _GROWTH_INTERVAL:
            self.value, self._steps = self.value * 2, 0

    def state(self) -> dict[str, float]:
        """In plain JSON."""
        return {"scale": self.value, "steps": self._steps}

    def load(self, state: Mapping[str, float]) -> None:
        """As `state` gave it."""
        self.value, self._steps = float(state["scale"]), int(state["steps"])
