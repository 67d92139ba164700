"""Which columns of a batch each rank of a sequence-parallel group has.

Ulysses ranks have a stretch each. Ring ranks have, of every sequence, one chunk counted from its begin and one counted from its end (zigzag), so that
causal attention is equal work for all. Both together: each ring rank's columns are cut into stretches.

Shape suffixes: B rows, T columns of the batch, P columns padded to what the layout needs, L columns of one rank.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinkle_data import Batch

from ._inputs import segment_bounds


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where the columns of a batch go.

    order_BP: the batch's column at each place, -1 at places that are padding; the first P / ranks places are the first rank's, and so on.
    place_BT: the place of each of the batch's columns. segments: where each sequence, or stretch of padding, begins among the B * P / ring
    columns of one ring rank, and the end; the same on all of them.
    """

    order_BP: NDArray[np.int64]
    place_BT: NDArray[np.int64]
    segments: Sequence[int]

    def of_rank(self, rank: int, ranks: int) -> NDArray[np.int64]:
        """The rank's part of `order_BP`, ``[B, L]``."""
        length = self.order_BP.shape[1] // ranks
        return self.order_BP[:, rank * length : (rank + 1) * length]


def divide(batch: Batch, *, ulysses: int, ring: int) -> Columns:
    """The columns of a batch over `ring` x `ulysses` ranks, those of one Ulysses group next to one another."""
    num_rows, num_columns = batch.input_ids.shape
    bounds = segment_bounds(batch)
    rows = [_row(bounds[(bounds >= row * num_columns) & (bounds <= (row + 1) * num_columns)] - row * num_columns, ring) for row in range(num_rows)]
    multiple = math.lcm(2 * ring, ring * ulysses) if ring > 1 else ulysses
    width = -(-max(len(row) for row, _ in rows) // multiple) * multiple
    order_BP = np.full((num_rows, width), -1, dtype=np.int64)
    segments = [0]
    for index, (row, lengths) in enumerate(rows):
        order_BP[index] = _zigzag(np.append(row, np.full(width - len(row), -1)), [*lengths, width - len(row)], ring)
        for length in [*lengths, width - len(row)]:
            if length:
                segments.append(segments[-1] + length // ring)
    place_BT = np.zeros((num_rows, num_columns), dtype=np.int64)
    row_index, places = np.nonzero(order_BP >= 0)
    place_BT[row_index, order_BP[row_index, places]] = places
    return Columns(order_BP=order_BP, place_BT=place_BT, segments=tuple(segments))


def _row(bounds: NDArray[np.int64], ring: int) -> tuple[NDArray[np.int64], list[int]]:
    """A row's columns, each segment padded to what zigzag needs, and the segments' lengths."""
    multiple = 2 * ring if ring > 1 else 1
    parts: list[NDArray[np.int64]] = []
    for begin, end in itertools.pairwise(bounds.tolist()):
        parts.append(np.append(np.arange(begin, end), np.full(-(end - begin) % multiple, -1)))
    return np.concatenate(parts).astype(np.int64), [len(part) for part in parts]


def _zigzag(row: NDArray[np.int64], lengths: Sequence[int], ring: int) -> NDArray[np.int64]:
    if ring == 1:
        return row
    segments = np.split(row, np.cumsum(lengths)[:-1])
    chunks = [np.split(segment, 2 * ring) for segment in segments if len(segment)]
    return np.concatenate([part for rank in range(ring) for each in chunks for part in (each[rank], each[2 * ring - 1 - rank])])
