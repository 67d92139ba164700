"""Loss scaling of float16 (Mixed Precision Training, arXiv:1710.03740, section 3.2). Imported only once the platform is chosen.

megatron-core's own scaler decides on the scale. Its optimizer would divide the gradients by it only when it steps, but here they are measured,
clipped and exported before: they are divided when they have been reduced.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler


class LossScale:
    """By what losses are multiplied before backward: half after each step that overflows, twice after a thousand that do not.

    Args:
        initial: the scale before the first step.
    """

    def __init__(self, initial: float) -> None:
        # Losses are sums, whose gradients are large: the scale may have to be less than one.
        self._scaler: Any = DynamicGradScaler(
            initial_scale=initial, min_scale=min(initial, 2.0**-14), growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, hysteresis=1
        )

    @property
    def value(self) -> float:
        """The scale."""
        return float(self._scaler.scale)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to run backward."""
        return loss * self.value

    def update(self, *, overflowed: bool) -> None:
        """Called after each step, taken or skipped."""
        self._scaler.update(overflowed)

    def state(self) -> dict[str, float]:
        """In plain JSON."""
        return {name: float(value) for name, value in self._scaler.state_dict().items()}

    def load(self, state: Mapping[str, float]) -> None:
        """As :meth:`state` gave it."""
        self._scaler.load_state_dict(
            {
                "scale": torch.tensor([state["scale"]], dtype=torch.float32),
                "growth_tracker": int(state["growth_tracker"]),
                "hysteresis_tracker": int(state["hysteresis_tracker"]),
            }
        )
