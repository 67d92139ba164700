"""Learning-rate schedules: pure functions of the number of optimizer steps taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ._errors import ConfigError

ScheduleName = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True)
class LRSchedule:
    """The factor on the base learning rate after a number of steps.

    During the first `warmup_steps` steps the factor rises linearly, (step + 1) / warmup_steps, so that the first step already
    trains. Then 'constant' stays at 1; 'linear' and 'cosine' fall to `min_lr_ratio`, which they reach at `total_steps` and keep; 'wsd'
    (warm-up, stable, decay; arXiv:2404.06395) stays at 1 and falls linearly in the last `decay_steps` of them (default: a tenth).

    Raises ConfigError for an unknown name or impossible numbers; all but 'constant' need `total_steps`, and only 'wsd' has `decay_steps`.
    """

    name: ScheduleName = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(ScheduleName):
            raise ConfigError(f"unknown schedule {self.name!r}; known are {', '.join(get_args(ScheduleName))}")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps must be >= 0, got {self.warmup_steps}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"min_lr_ratio must be in [0, 1], got {self.min_lr_ratio}")
        if self.decay_steps is not None and self.name != "wsd":
            raise ConfigError(f"schedule {self.name!r} has no decay_steps; only 'wsd' has")
        if self.name == "constant":
            return
        if self.total_steps is None:
            raise ConfigError(f"schedule {self.name!r} needs total_steps, the number of optimizer steps of the whole run")
        if self.total_steps <= self.warmup_steps:
            raise ConfigError(f"total_steps ({self.total_steps}) must exceed warmup_steps ({self.warmup_steps})")
        if self.decay_steps is not None and not 0 < self.decay_steps <= self.total_steps - self.warmup_steps:
            raise ConfigError(
                f"decay_steps must be in [1, {self.total_steps - self.warmup_steps}], the steps after the warm-up, got {self.decay_steps}"
            )

    def factor(self, step: int) -> float:
        """The factor for the step that follows `step` steps already taken (0 for the first)."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant" or self.total_steps is None:
            return 1.0
        length = self.total_steps - self.warmup_steps
        if self.name == "wsd":
            length = min(length, self.decay_steps or max(1, self.total_steps // 10))
        done = min(1.0, max(0.0, (step - (self.total_steps - length)) / length))
        fall = 0.5 * (1 + math.cos(math.pi * done)) if self.name == "cosine" else 1 - done
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * fall
