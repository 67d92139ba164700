"""Loss sums, weights and metrics of whole calls, and their reduction over the ranks of a trainer."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ._errors import PeerError
from ._loss import LossOutput
from ._metrics import AnyMetric, MaxMetric, Metric, combine_metrics


@dataclass(frozen=True)
class Totals:
    """What some micro-batches gave together: plain numbers, no tensors. Empty totals are neutral."""

    loss_sum: float = 0.0
    weight: float = 0.0
    metrics: Mapping[str, AnyMetric] = field(default_factory=dict[str, AnyMetric])

    @classmethod
    def of(cls, outputs: Iterable[LossOutput]) -> Totals:
        """The totals of these loss outputs; copies them off the device."""
        totals = cls()
        for output in outputs:
            metrics: dict[str, AnyMetric] = {
                name: Metric(float(m.sum), float(m.weight)) if isinstance(m, Metric) else MaxMetric(float(m.value))
                for name, m in output.metrics.items()
            }
            totals = totals.combine(cls(float(output.sum.detach()), float(output.weight), metrics))
        return totals

    def combine(self, other: Totals) -> Totals:
        """Both together."""
        return Totals(self.loss_sum + other.loss_sum, self.weight + other.weight, combine_metrics(self.metrics, other.metrics))

    @property
    def loss(self) -> float:
        """The loss: sum / weight; NaN when nothing was weighed."""
        return self.loss_sum / self.weight if self.weight else float("nan")

    def metric_values(self) -> dict[str, float]:
        """Every metric as a float."""
        return {name: metric.compute() for name, metric in self.metrics.items()}


@dataclass(frozen=True, kw_only=True)
class ReduceGroups:
    """The process groups over which a trainer's totals are reduced, seen from one rank.

    data: the ranks that hold other data and the same part of the model (None: only this one).
    pipeline: the stages of this rank's pipeline (None: no pipeline). last_stage: the global rank of its last stage, where losses are.
    device: where the small tensors of the reduction live ('cpu' for gloo).
    """

    data: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    last_stage: int = 0
    device: torch.device | str = "cpu"

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes losses."""
        return self.pipeline is None or dist.get_rank() == self.last_stage


def reduce_sum(values: Iterable[float], groups: ReduceGroups) -> list[float]:
    """Each value summed over the data ranks, in double precision. Collective over the data group."""
    return _reduce(list(values), groups, dist.ReduceOp.SUM)


def reduce_max(values: Iterable[float], groups: ReduceGroups) -> list[float]:
    """The maximum of each value over the data ranks. Collective over the data group."""
    return _reduce(list(values), groups, dist.ReduceOp.MAX)


def reduce_totals(totals: Totals | None, groups: ReduceGroups, *, error: BaseException | None = None) -> Totals:
    """The totals of all ranks, the same on every rank. Collective over the data group of the last stage, then over each pipeline.

    totals: this rank's, None where it is not on the last stage. error: what this rank's own computation raised; it is raised here
    after the peers have been told, so that they raise PeerError instead of waiting in the next collective.

    Raises PeerError when another rank failed, or when ranks report different metrics.
    """
    if groups.is_last_stage:
        reduced, failure = _reduce_last_stage(totals or Totals(), groups, error)
    else:
        reduced, failure = Totals(), None
        if error is not None:
            raise error
    if groups.pipeline is not None:
        message: list[object] = [(reduced, failure)]
        dist.broadcast_object_list(message, src=groups.last_stage, group=groups.pipeline, device=torch.device(groups.device))
        received = message[0]
        assert isinstance(received, tuple)
        reduced, failure = received
    if error is not None:
        raise error
    if failure is not None:
        raise PeerError(failure)
    return reduced


def _reduce_last_stage(totals: Totals, groups: ReduceGroups, error: BaseException | None) -> tuple[Totals, str | None]:
    names = sorted(totals.metrics)
    kinds = [type(totals.metrics[name]).__name__ for name in names]
    # Equal on all ranks exactly when its maximum and minus the maximum of its negative agree.
    signature = float(zlib.crc32(repr((names, kinds)).encode())) if error is None else 0.0
    failed, largest, negative_smallest = reduce_max([0.0 if error is None else 1.0, signature, -signature], groups)
    if failed:
        return Totals(), f"rank {dist.get_rank()} stopped: the loss or the model failed on another rank of this trainer (its own error says why)" if (
            groups.data is not None
        ) else "the last pipeline stage failed (its own error says why)"
    if largest != -negative_smallest:
        return Totals(), f"ranks report different metrics (here {names}): a loss must name the same metrics on every rank"
    sums, weights, maxima = [totals.loss_sum, totals.weight], list[str](), list[str]()
    for name in names:
        metric = totals.metrics[name]
        if isinstance(metric, Metric):
            weights.append(name)
            sums += [float(metric.sum), float(metric.weight)]
        else:
            maxima.append(name)
    summed = reduce_sum(sums, groups)
    largest_values = reduce_max([totals.metrics[name].compute() for name in maxima], groups) if maxima else []
    metrics: dict[str, AnyMetric] = {}
    for i, name in enumerate(weights):
        metrics[name] = Metric(summed[2 + 2 * i], summed[3 + 2 * i])
    for name, value in zip(maxima, largest_values, strict=True):
        metrics[name] = MaxMetric(value)
    return Totals(summed[0], summed[1], metrics), None


def _reduce(values: list[float], groups: ReduceGroups, op: dist.ReduceOp.RedOpType) -> list[float]:
    if groups.data is None:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=groups.device)
    dist.all_reduce(tensor, op=op, group=groups.data)
    return tensor.tolist()
