"""A dataset whose rows are packs of another's."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._balance import CostKind, sequence_costs
from ._bins import Packs, pack_lengths, whole_lengths
from ._checks import check_whole
from ._dataset import Dataset, row_name
from ._errors import DatasetError
from ._fitting import Fitting, TooLong, checked_feature
from ._packed import PackedFeature
from ._rows import RowName
from ._skipped import Skipped, warn_of_skipped
from ._workers import WorkerPool

_ROWS_A_TASK = 256


class PackingDataset(Dataset):
    """The rows of an encoded dataset, packed: each row of this one is a `PackedFeature` of at most `max_length` tokens.

    Best-fit decreasing over the whole set fills more than 99.9 % of the packs' tokens where rows are short beside a pack. For that the length
    of every row must be known: all are read once, here. Sequences of a row are read again when the row is.

    Packs depend on the rows' lengths and the seed alone. A `DataLoader` shares those of a global batch out so that the data ranks pay the
    same (its option `balance`).

    Args:
        dataset: rows that are `InputFeature`s (`Dataset.encode`), by index; anything that `Dataset` takes.
        max_length: the most tokens of a pack.
        too_long: what becomes of a longer row: 'error', 'drop' (counted in `skipped`, and told in a warning), 'left' and 'right' (cut away on
            that side) or 'split' (packed in pieces).
        seed: rows of equal length meet in a random order, and packs come in one.
        lengths: of all rows, `[N]`, where they are known; nothing is read then. A row that turns out to have another length is an error.
        num_workers: processes that read the rows for their lengths; 0: this one.
        worker_timeout_s: seconds that a worker may take for 256 rows.

    Raises:
        SequenceTooLongError: a row is too long, and `too_long` is 'error'.
        FormatError: a row that is no `InputFeature`.
        DatasetError: wrong settings, or nothing to pack. Errors name the row.
        WorkerError, LoaderTimeoutError: a worker that died, or was not done in time.
    """

    def __init__(
        self,
        dataset: Dataset | Iterable[Any] | Any,
        max_length: int,
        *,
        too_long: TooLong = "error",
        seed: int = 0,
        lengths: ArrayLike | None = None,
        num_workers: int = 0,
        worker_timeout_s: float = 600.0,
    ) -> None:
        check_whole("seed", seed, 0)
        check_whole("num_workers", num_workers, 0)
        rows = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
        fitting = Fitting(max_length, too_long)
        known = _read_lengths(rows, num_workers, worker_timeout_s) if lengths is None else whole_lengths(lengths)
        if known.shape != (len(rows),):
            raise DatasetError(f"lengths has shape {known.shape}, and the dataset {len(rows)} rows")
        self._pieces = _Pieces(rows, known, fitting)
        warn_of_skipped(self._pieces.skipped)
        self._packs = pack_lengths(self._pieces.lengths, max_length, seed=seed)
        super().__init__(_PackedRows(self._pieces, self._packs))

    @property
    def fill(self) -> float:
        """The share of the packs' tokens that are not empty."""
        return float(self._pieces.lengths.sum() / (len(self._packs) * self._pieces.fitting.max_length))

    @property
    def fingerprint(self) -> str:
        """A checksum of which sequence is in which pack (CRC-32); a saved position of a loader belongs to one."""
        parts = (self._pieces.rows, self._pieces.lengths, self._packs.rows, self._packs.starts)
        value = 0
        for part in parts:
            value = zlib.crc32(np.ascontiguousarray(part).tobytes(), value)
        return f"{value:08x}"

    def row_costs(self, kind: CostKind) -> NDArray[np.float64]:
        """What each pack costs: its tokens, or, for 'cost', the sum of its sequences' squares."""
        return np.asarray(self._packs.sums(sequence_costs(self._pieces.lengths, kind)), np.float64)


class _Pieces:
    """All sequences that are packed: rows, or parts of rows that are too long."""

    def __init__(self, dataset: Dataset, lengths: NDArray[np.int64], fitting: Fitting) -> None:
        self.dataset, self.row_lengths, self.fitting = dataset, lengths, fitting
        long = np.flatnonzero(lengths > fitting.max_length).tolist()
        become = {row: fitting.lengths(int(lengths[row]), self._name(row)) for row in long}
        self.skipped = sum((fitting.dropped(int(lengths[row]), self._name(row)) for row in long if not become[row]), Skipped())
        counts = np.ones(len(lengths), np.int64)
        counts[long] = [len(become[row]) for row in long]
        self.rows = np.repeat(np.arange(len(lengths)), counts)
        first = np.cumsum(counts) - counts
        self.indices = np.arange(len(self.rows)) - first[self.rows]
        self.lengths = lengths[self.rows]
        for row in long:
            self.lengths[first[row] : first[row] + counts[row]] = become[row]
        if not len(self.rows):
            raise DatasetError("there is nothing to pack: the dataset has no rows, or none that fits")

    def _name(self, row: int) -> RowName:
        return row_name(self.dataset, row)

    def read(self, number: int) -> Any:
        row = int(self.rows[number])
        feature = checked_feature(self.dataset[row], self._name(row))
        if len(feature) != self.row_lengths[row]:
            raise DatasetError(
                f"{self._name(row)} has {len(feature)} tokens, and had {self.row_lengths[row]} when it was packed: a row must stay as it is"
            )
        return self.fitting.piece(feature, int(self.indices[number]))


class _PackedRows(Sequence[PackedFeature]):
    """Packs by index, read when they are asked for."""

    def __init__(self, pieces: _Pieces, packs: Packs) -> None:
        self._pieces, self._packs = pieces, packs
        self.skipped = pieces.skipped

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, index: int) -> PackedFeature:  # pyright: ignore[reportIncompatibleMethodOverride]
        return PackedFeature(features=[self._pieces.read(number) for number in self._packs[index].tolist()])


def _read_lengths(rows: Dataset, num_workers: int, timeout_s: float) -> NDArray[np.int64]:
    def lengths_of(part: range) -> list[int]:
        return [len(checked_feature(rows[row], row_name(rows, row))) for row in part]

    tasks = [range(start, min(start + _ROWS_A_TASK, len(rows))) for start in range(0, len(rows), _ROWS_A_TASK)]
    if not num_workers:
        return np.array([length for part in tasks for length in lengths_of(part)], np.int64)
    pool = WorkerPool(lengths_of, num_workers, timeout_s=timeout_s, what="the length of rows")
    try:
        found: list[int] = []
        for number, part in enumerate(tasks):
            pool.submit(part)
            if number >= 2 * num_workers:
                found += pool.take()
        while len(pool):
            found += pool.take()
    finally:
        pool.close()
    return np.array(found, np.int64)
