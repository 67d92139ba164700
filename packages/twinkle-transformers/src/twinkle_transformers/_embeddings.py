"""Sequences as vectors, and a contrastive loss of them over all rows of a call.

Shape suffixes: B rows, T columns, S sequences of this rank, N of all ranks, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray

from twinkle_data import Batch, PackedFeature
from twinkle_train import ConfigError, InputError, LossOutput, Metric, Row

Pooling = Literal["last", "mean"]
_POOLINGS = ("last", "mean")
GROUP = "group"


def check_pooling(pooling: str) -> None:
    """ConfigError for an unknown one."""
    if pooling not in _POOLINGS:
        raise ConfigError(f"pooling is 'last' or 'mean', not {pooling!r}")


def pool(hidden_BTH: torch.Tensor, batch: Batch, pooling: Pooling, *, normalize: bool) -> torch.Tensor:
    """One float32 vector a sequence of the batch, ``[S, H]``: that of its last token, or the mean of all; of length 1 if normalized."""
    hidden_NH = hidden_BTH.float().flatten(0, 1)
    begins = batch.rows * batch.input_ids.shape[1] + batch.starts
    if pooling == "last":
        pooled_SH = hidden_NH[torch.as_tensor(begins + batch.lengths - 1, device=hidden_NH.device)]
    else:
        pooled_SH = torch.stack([hidden_NH[begin : begin + length].mean(0) for begin, length in zip(begins, batch.lengths, strict=True)])
    return F.normalize(pooled_SH, dim=-1) if normalize else pooled_SH


def row_of(batches: Sequence[Batch]) -> NDArray[np.int64]:
    """Which of the rows each sequence of the micro-batches is of, in order; the untrained copies that fill up micro-batches come last."""
    num_rows = [0, *np.cumsum([batch.feature_ids.max() + 1 for batch in batches]).tolist()]
    return np.concatenate([first + batch.feature_ids for first, batch in zip(num_rows, batches, strict=False)])


def group_ids(features: Sequence[Row], batches: Sequence[Batch]) -> NDArray[np.int64]:
    """The group of each sequence, ``[S]``.

    Raises:
        InputError: one has none, or not a whole number.
    """
    found: list[int] = []
    for index, row in enumerate(features):
        for one in row.features if isinstance(row, PackedFeature) else (row,):
            group = one.user_data.get(GROUP)
            if not isinstance(group, int) or isinstance(group, bool):
                raise InputError(f"inputs[{index}].user_data[{GROUP!r}] is {group!r}: give each sequence the whole number of the group it belongs to")
            found.append(group)
    if len(found) != (row_of(batches) < len(features)).sum():
        raise InputError("the positions of a row begin anew: give several sequences as a PackedFeature, each with its group")
    return np.asarray(found, dtype=np.int64)


@dataclass(frozen=True)
class Contrast:
    """What a rank's sequences contribute. gradient_SH: of `loss.sum` over all ranks, with respect to this rank's vectors."""

    loss: LossOutput
    gradient_SH: torch.Tensor


def contrast(mine_SH: torch.Tensor, groups_S: NDArray[np.int64], temperature: float, group: Any) -> Contrast:
    """The normalized-temperature cross-entropy of sequences with those of their group as positives and all others of the call as negatives
    (SimCLR, arXiv:2002.05709; several positives as in SupCon, arXiv:2004.11362). Collective.

    mine_SH: of length 1, without a graph. A sequence that is alone in its group is a negative only. group: the ranks that hold other rows.
    """
    vectors_NH, ids_N, first = _gather(mine_SH, torch.as_tensor(groups_S, device=mine_SH.device), group)
    vectors_NH = vectors_NH.detach().requires_grad_()
    mine = slice(first, first + len(mine_SH))
    with torch.enable_grad():
        itself_NN = torch.eye(len(vectors_NH), dtype=torch.bool, device=vectors_NH.device)
        scores_NN = (vectors_NH @ vectors_NH.T / temperature).masked_fill(itself_NN, float("-inf"))
        positive_NN = (ids_N[:, None] == ids_N[None]) & ~itself_NN
        count_N = positive_NN.sum(1)
        losses_N = -torch.where(positive_NN, scores_NN.log_softmax(-1), 0.0).sum(1) / count_N.clamp(min=1)
        (gradient_NH,) = torch.autograd.grad(losses_N.sum(), vectors_NH)
    has_one_N = count_N > 0
    nearest_N = positive_NN.gather(1, scores_NN.argmax(1, keepdim=True))[:, 0]
    weight = has_one_N[mine].sum().float()
    accuracy = Metric((nearest_N & has_one_N)[mine].sum(), weight)
    return Contrast(LossOutput(losses_N[mine].sum().detach(), weight, {"nearest_is_positive": accuracy}), gradient_NH[mine])


def _gather(mine_SH: torch.Tensor, ids_S: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Those of all ranks, in order of rank, and where this one's begin."""
    if group is None:
        return mine_SH, ids_S, 0
    sizes = [torch.zeros(1, dtype=torch.long, device=ids_S.device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(ids_S)], device=ids_S.device), group=group)
    counts = [int(size.item()) for size in sizes]

    def all_of(tensor: torch.Tensor) -> torch.Tensor:
        padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    return all_of(mine_SH), all_of(ids_S), sum(counts[: group.rank()])
