"""Learning-rate schedules: pure functions of the number of optimizer steps taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ._errors import ConfigError

ScheduleName = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LRSchedule:
    """The factor on the base learning rate after a number of steps.

    During the first `warmup_steps` steps the factor rises linearly, (step + 1) / warmup_steps, so that the first step already
    trains. Then 'constant' stays at 1; 'linear' and 'cosine' fall to `min_lr_ratio`, which they reach at `total_steps` and keep.

    Raises ConfigError for an unknown name or impossible numbers; 'linear' and 'cosine' need `total_steps`.
    """

    name: ScheduleName = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in ("constant", "linear", "cosine"):
            raise ConfigError(f"unknown schedule {self.name!r}; known are constant, linear, cosine")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps must be >= 0, got {self.warmup_steps}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"min_lr_ratio must be in [0, 1], got {self.min_lr_ratio}")
        if self.name == "constant":
            return
        if self.total_steps is None:
            raise ConfigError(f"schedule {self.name!r} needs total_steps, the number of optimizer steps of the whole run")
        if self.total_steps <= self.warmup_steps:
            raise ConfigError(f"total_steps ({self.total_steps}) must exceed warmup_steps ({self.warmup_steps})")

    def factor(self, step: int) -> float:
        """The factor for the step that follows `step` steps already taken (0 for the first)."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant" or self.total_steps is None:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        fall = 1 - done if self.name == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * fall
