"""Best-fit decreasing bin packing (D. S. Johnson, "Near-optimal bin packing algorithms", 1973), over whole classes of equal lengths.

Lengths are whole numbers up to the capacity, so many rows are equally long and many bins have equally much space left. Rows are
taken from the longest to the shortest, and each goes where the least space is left that holds it. All rows of one length meet the bins of one
space alike, so a step here places as many rows as there are such bins: the packing is exactly that of row after row, at some
thousand steps for a million rows.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._checks import check_whole
from ._errors import DatasetError


@dataclass(frozen=True, kw_only=True, eq=False)
class Packs:
    """Which rows go together. rows: int64 `[N]`, the rows of pack 0, then of pack 1, ...; starts: int64 `[P + 1]`, where each pack begins."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        """The number of packs P."""
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """The rows of a pack."""
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        return self.rows[self.starts[index] : self.starts[index + 1]]

    def sums(self, values: NDArray[np.number]) -> NDArray[np.number]:
        """The sum over each pack of one value a row, `[P]`."""
        return np.add.reduceat(values[self.rows], self.starts[:-1]) if len(self) else values[:0]


def pack_lengths(lengths: ArrayLike, capacity: int, *, seed: int | None = None) -> Packs:
    """Packs rows of these lengths so that no pack is longer than the capacity, in as few packs as best-fit decreasing finds.

    Args:
        lengths: whole numbers `[N]`, from 1 to the capacity.
        capacity: the most tokens of a pack.
        seed: rows of equal length are taken in a random order, and the packs come in one; None: rows in their order, the longest packs first.

    Raises:
        DatasetError: a length below 1 or above the capacity. The message names the row.
    """
    sizes = whole_lengths(lengths)
    check_whole("capacity", capacity, 1)
    if wrong := np.flatnonzero((sizes < 1) | (sizes > capacity))[:1].tolist():
        raise DatasetError(f"row {wrong[0]} has {sizes[wrong[0]]} tokens; packs hold rows of 1 to {capacity}")
    rng = None if seed is None else np.random.default_rng(seed)
    shuffled = np.arange(len(sizes)) if rng is None else rng.permutation(len(sizes))
    # A stable sort of 16-bit numbers is a radix sort.
    keys = (capacity - sizes[shuffled]).astype(np.uint16 if capacity < 1 << 16 else np.int64)
    order = shuffled[np.argsort(keys, kind="stable")]
    bins, num_bins = _best_fit(sizes[order], capacity)
    if rng is not None:
        bins = rng.permutation(num_bins)[bins]
    counts = np.bincount(bins, minlength=num_bins)
    return Packs(rows=order[np.argsort(bins, kind="stable")], starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def whole_lengths(lengths: ArrayLike) -> NDArray[np.int64]:
    """Lengths as an array `[N]`.

    Raises:
        DatasetError: they are no list of whole numbers.
    """
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or (sizes.size and sizes.dtype.kind not in "iu"):
        raise DatasetError(f"lengths are a list of whole numbers, one a row, not {sizes.dtype} {sizes.shape}")
    return sizes.astype(np.int64)


def _best_fit(sizes: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], int]:
    """The bin of each of these rows, which are sorted from long to short, and the number of bins."""
    bounds = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    bins = [0] * len(sizes)
    # The open bins by the space left in them, the latest last; and the spaces that some bin has, sorted.
    with_space: dict[int, list[int]] = {}
    spaces: list[int] = []
    num_bins = 0
    for begin, end in pairwise(bounds):
        if begin == end:
            break
        size, row = int(sizes[begin]), begin
        while row < end:
            tightest = bisect_left(spaces, size)
            if tightest == len(spaces):
                space, each = capacity, capacity // size
                count = -(-(end - row) // each)
                chosen = list(range(num_bins, num_bins + count))
                num_bins += count
            else:
                space = spaces[tightest]
                each, stack = space // size, with_space[space]
                count = min(len(stack), -(-(end - row) // each))
                chosen = stack[: -count - 1 : -1]
                del stack[-count:]
                if not stack:
                    del spaces[tightest]
            # A bin stays the tightest until it holds no more of this length; the last one may get fewer.
            filled = min(count, (end - row) // each)
            bins[row : row + filled * each] = chosen[:filled] if each == 1 else [b for b in chosen[:filled] for _ in range(each)]
            row += filled * each
            _give_back(with_space, spaces, space - each * size, chosen[:filled])
            if filled < count:
                bins[row:end] = chosen[filled:] * (end - row)
                _give_back(with_space, spaces, space - (end - row) * size, chosen[filled:])
                row = end
    return np.array(bins, np.int64), num_bins


def _give_back(with_space: dict[int, list[int]], spaces: list[int], space: int, bins: list[int]) -> None:
    if space and bins:
        stack = with_space.setdefault(space, [])
        if not stack:
            insort(spaces, space)
        stack.extend(bins)
