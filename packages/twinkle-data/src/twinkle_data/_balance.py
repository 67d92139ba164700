"""Sharing rows out so that every data rank does the same work.

Shape suffixes: N rows, R ranks, K kinds of cost.
"""

import heapq
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._errors import DatasetError

CostKind = Literal["tokens", "cost"]


def sequence_costs(lengths: ArrayLike, kind: CostKind) -> NDArray[np.float64]:
    """What each sequence costs: its tokens, or, for 'cost', their square, as attention does.

    Raises:
        DatasetError: another kind.
    """
    sizes = np.asarray(lengths, np.float64)
    if kind not in ("tokens", "cost"):
        raise DatasetError(f"there is no cost {kind!r}; there are 'tokens' and 'cost' (their square)")
    return sizes if kind == "tokens" else sizes**2


def balanced_order(costs: ArrayLike, num_ranks: int) -> NDArray[np.int64]:
    """An order of rows whose even, contiguous slices (`DeviceMesh.get_slice`) cost as nearly the same as a search finds.

    The largest rows first to the rank that has least (Graham's LPT with as many rows a rank as its slice has); then rows of the fullest
    rank change places with rows of others while the sum of squares falls. Within a slice rows keep their order. Deterministic.

    Args:
        costs: `[N]`, or `[N, K]` to balance several kinds at once; not negative.
        num_ranks: R, over how many.

    Returns:
        the rows' indices, int64 `[N]`.

    Raises:
        DatasetError: a negative cost, or one that is not finite.
    """
    weights = np.asarray(costs, np.float64)
    weights = weights[:, None] if weights.ndim == 1 else weights
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise DatasetError("a row's cost is negative or not finite")
    num_rows = len(weights)
    if num_ranks <= 1 or num_rows <= 1:
        return np.arange(num_rows)
    means = weights.sum(0) / num_ranks
    weights = weights / np.where(means > 0, means, 1)
    ranks = _longest_first(weights, num_ranks)
    _swap(weights, ranks, num_ranks)
    return np.argsort(ranks, kind="stable")


def _longest_first(weights_NK: NDArray[np.float64], num_ranks: int) -> NDArray[np.int64]:
    """The rank of each row."""
    share, longer = divmod(len(weights_NK), num_ranks)
    room = [share + (rank < longer) for rank in range(num_ranks)]
    totals = weights_NK.sum(1)
    ranks = np.zeros(len(weights_NK), np.int64)
    loads = [(0.0, rank) for rank in range(num_ranks) if room[rank]]
    for row in np.argsort(-totals, kind="stable").tolist():
        load, rank = loads[0]
        ranks[row] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heapreplace(loads, (load + totals[row], rank))
        else:
            heapq.heappop(loads)
    return ranks


def _swap(weights_NK: NDArray[np.float64], ranks: NDArray[np.int64], num_ranks: int) -> None:
    """Exchanges rows between ranks in place, while that helps the fullest rank."""
    loads_RK = np.zeros((num_ranks, weights_NK.shape[1]))
    np.add.at(loads_RK, ranks, weights_NK)
    for _ in range(4 * len(ranks)):
        fullest = int(loads_RK.max(1).argmax())
        own, others = np.flatnonzero(ranks == fullest), np.flatnonzero(ranks != fullest)
        # What the fullest rank loses and the other gains, for each pair.
        moved = weights_NK[own][:, None] - weights_NK[others][None]
        gap = loads_RK[fullest] - loads_RK[ranks[others]]
        gain = (moved * (gap[None] - moved)).sum(-1)  # half of what the sum of squares falls by
        best = int(gain.argmax())
        if gain.flat[best] <= 1e-9:
            return
        row, other = own[best // len(others)], others[best % len(others)]
        loads_RK[fullest] -= moved.reshape(-1, moved.shape[-1])[best]
        loads_RK[ranks[other]] += moved.reshape(-1, moved.shape[-1])[best]
        ranks[row], ranks[other] = ranks[other], fullest
