"""Comparison of named tensors with a tolerance that says which one is worst."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far numbers of a trainer may be from the reference's. The defaults are for fp32.

    loss: absolute, for losses and metrics of order 1; sums are taken in double, so what remains is the rounding of single
    log-probabilities (2 ** -24 of values up to 16, averaged).
    logprobs: absolute, for a single token: a few roundings of a logit up to about 30.
    tensor: relative to the largest entry of a gradient tensor; a matrix product of a few hundred terms in another order rounds by
    about 1e-6, and a backward through some layers adds up ten times that.
    everything: relative to the largest entry of all gradients, for tensors whose own gradient is rounding (a bias before a softmax).
    norm: relative, for the gradient norm.
    """

    loss: float = 1e-6
    logprobs: float = 2e-5
    tensor: float = 5e-5
    everything: float = 5e-6
    norm: float = 1e-5


FP32 = Tolerance()


def compare_numbers(what: str, actual: float, expected: float, atol: float, rtol: float = 0.0) -> None:
    """Raises AssertionError when they differ by more than atol + rtol * |expected|, or are not finite."""
    allowed = atol + rtol * abs(expected)
    if not abs(actual - expected) <= allowed:
        raise AssertionError(f"{what}: {actual!r}, expected {expected!r}; they differ by {abs(actual - expected):.3g}, allowed is {allowed:.3g}")


def compare_tensors(
    what: str,
    actual: Mapping[str, NDArray[np.floating[Any]]],
    expected: Mapping[str, NDArray[np.floating[Any]]],
    *,
    rtol: float,
    atol: float,
) -> None:
    """Raises AssertionError naming the worst tensor when any entry differs by more than rtol * max |expected tensor| + atol.

    A name that is missing, or a shape that differs, is an error too. `lm_head.weight` may be there beside the embedding that it is tied to.
    """
    missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys() - {"lm_head.weight"})
    if missing or extra:
        raise AssertionError(f"{what}: missing {missing[:5]}, unexpected {extra[:5]} ({len(missing)} and {len(extra)} names)")
    worst_name, worst_ratio, worst_difference = "", 0.0, 0.0
    for name, want in expected.items():
        have = actual[name]
        if have.shape != want.shape:
            raise AssertionError(f"{what}: {name} has shape {have.shape}, expected {want.shape}")
        difference = float(np.abs(have.astype(np.float64) - want).max())
        allowed = rtol * float(np.abs(want).max()) + atol
        ratio = difference / allowed if allowed else (float("inf") if difference else 0.0)
        if not ratio <= worst_ratio:  # NaN is worst
            worst_name, worst_ratio, worst_difference = name, ratio, difference
    if not worst_ratio <= 1:
        raise AssertionError(f"{what}: {worst_name} differs by up to {worst_difference:.3g}, {worst_ratio:.3g} times what is allowed")


def largest(tensors: Mapping[str, NDArray[np.floating[Any]]]) -> float:
    """The largest absolute entry of all tensors."""
    return max(float(np.abs(tensor).max()) for tensor in tensors.values())
