"""Metrics that add up over micro-batches, calls and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A weighted mean in the making: `sum` of weighted values over `weight`. Parts are combined by adding both.

    Both are floats or 0-d tensors without a graph.
    """

    sum: Tensor | float
    weight: Tensor | float

    def combine(self, other: Metric) -> Metric:
        """The metric of both parts together."""
        return Metric(self.sum + other.sum, self.weight + other.weight)

    def compute(self) -> float:
        """The mean; NaN when nothing was counted."""
        weight = float(self.weight)
        return float(self.sum) / weight if weight else float("nan")


@dataclass(frozen=True)
class MaxMetric:
    """A maximum in the making: `value` is a float or a 0-d tensor without a graph."""

    value: Tensor | float

    def combine(self, other: MaxMetric) -> MaxMetric:
        """The larger of both; NaN wins, so that it is seen."""
        mine, theirs = float(self.value), float(other.value)
        return MaxMetric(theirs if theirs != theirs or theirs > mine else mine)

    def compute(self) -> float:
        """The maximum."""
        return float(self.value)


AnyMetric = Metric | MaxMetric
"""A metric of either kind."""


def combine_metrics(first: Mapping[str, AnyMetric], second: Mapping[str, AnyMetric]) -> dict[str, AnyMetric]:
    """Both mappings together; a name in both is combined.

    Raises TypeError when one name is a Metric here and a MaxMetric there.
    """
    combined = dict(first)
    for name, metric in second.items():
        mine = combined.get(name)
        combined[name] = metric if mine is None else _combine(name, mine, metric)
    return combined


def _combine(name: str, mine: AnyMetric, other: AnyMetric) -> AnyMetric:
    match mine, other:
        case Metric(), Metric():
            return mine.combine(other)
        case MaxMetric(), MaxMetric():
            return mine.combine(other)
        case _:
            raise TypeError(f"metric {name!r} is a {type(mine).__name__} here and a {type(other).__name__} there")
