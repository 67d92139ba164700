"""What the losses share."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ._errors import ConfigError
from ._metrics import MaxMetric, Metric

Reduction = Literal["mean", "sum"]
"""Whether gradients are divided by the loss's weight before a step, or stay those of the sum."""


def check_reduction(reduction: str) -> None:
    """ConfigError unless it is 'mean' or 'sum'."""
    if reduction not in get_args(Reduction):
        raise ConfigError(f"reduction must be 'mean' or 'sum', got {reduction!r}")


def total(values: Tensor) -> Tensor:
    """The sum, 0-d, in double: thousands of tokens are summed, and the same tokens must give the same sum however they are split."""
    return values.sum(dtype=torch.float64)


def mean_metric(values_BT: Tensor, trained_BT: Tensor) -> Metric:
    """The mean over trained tokens."""
    return Metric(total(torch.where(trained_BT, values_BT.detach(), 0.0)), total(trained_BT))


def max_metric(values_BT: Tensor, trained_BT: Tensor) -> MaxMetric:
    """The maximum over trained tokens of values that are not negative."""
    return MaxMetric(torch.where(trained_BT, values_BT.detach(), 0.0).max())


def sequence_means(values_BT: Tensor, mask_BT: Tensor, sequence_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Per sequence, in order of their ids, the mask-weighted mean of the values, and whether the sequence has any weight; both [sequences]."""
    ids, index = torch.unique(sequence_ids_BT, return_inverse=True)
    index, dtype = index.reshape(-1), torch.float64
    zeros = torch.zeros(len(ids), dtype=dtype, device=values_BT.device)
    sums = zeros.index_add(0, index, (values_BT * mask_BT).reshape(-1).to(dtype))
    weights = zeros.index_add(0, index, mask_BT.reshape(-1).to(dtype))
    counted = weights > 0
    return sums / torch.where(counted, weights, 1.0), counted
