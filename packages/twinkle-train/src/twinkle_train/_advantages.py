"""Advantages from rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._errors import ConfigError, InputError

AdvantageScale = Literal["group", "batch", "none"]


def group_advantages(
    rewards: Sequence[float] | ArrayLike, num_samples: int, *, scale: AdvantageScale = "group", epsilon: float = 1e-4
) -> NDArray[np.float64]:
    """How much better each completion is than the mean of its group (GRPO, arXiv:2402.03300).

    rewards: [prompts * num_samples], the completions of one prompt beside one another. num_samples: completions a prompt.
    scale: 'group' divides by the standard deviation of the group (with num_samples - 1) plus `epsilon`; 'batch' by that of all rewards,
    which does not favour prompts that are nearly solved (arXiv:2508.08221); 'none' does not divide (Dr. GRPO, arXiv:2503.20783).

    Returns [prompts * num_samples]. A group of equal rewards gives zeros.

    Raises ConfigError for an unknown scale, an epsilon below zero or fewer than two samples a prompt (a completion alone has nothing to be
    compared with); InputError for rewards that are not finite or do not divide into groups.
    """
    if scale not in ("group", "batch", "none"):
        raise ConfigError(f"scale must be 'group', 'batch' or 'none', got {scale!r}")
    if not epsilon >= 0:
        raise ConfigError(f"epsilon must be >= 0, got {epsilon}")
    if num_samples < 2:
        raise ConfigError(f"group advantages need at least two samples a prompt, got {num_samples}: raise num_samples of the sampling")
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or values.size % num_samples:
        raise InputError(f"rewards of shape {values.shape} do not divide into groups of {num_samples}")
    if not np.isfinite(values).all():
        raise InputError(f"reward {int(np.argmin(np.isfinite(values)))} is not finite")
    groups = values.reshape(-1, num_samples)
    centred = groups - groups.mean(axis=1, keepdims=True)
    # A mean of equal numbers may differ from them in the last bit, which a tiny standard deviation would blow up.
    centred = np.where(groups.max(axis=1, keepdims=True) == groups.min(axis=1, keepdims=True), 0.0, centred)
    if scale == "none":
        return centred.reshape(-1)
    spread = groups.std(axis=1, ddof=1, keepdims=True) if scale == "group" else np.full((1, 1), values.std(ddof=1))
    divisor = spread + epsilon
    return np.divide(centred, divisor, out=np.zeros_like(centred), where=divisor > 0).reshape(-1)


@dataclass(frozen=True, kw_only=True)
class GRPOAdvantage:
    """`group_advantages` with its options fixed: `GRPOAdvantage(scale='batch')(rewards, num_samples)`."""

    scale: AdvantageScale = "group"
    epsilon: float = 1e-4

    def __call__(self, rewards: Sequence[float] | ArrayLike, num_samples: int) -> NDArray[np.float64]:
        """The advantages, [prompts * num_samples]. Raises what `group_advantages` raises."""
        return group_advantages(rewards, num_samples, scale=self.scale, epsilon=self.epsilon)
