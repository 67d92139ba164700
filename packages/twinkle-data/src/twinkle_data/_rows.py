"""Sequences of rows that are read through others: mapped, chosen, joined. Each tells where its rows come from (`places`).

`part(rows, start, stop)` is a piece of such a sequence that can be sent to another process: what lies in files is sent as places in
files, what lies in memory as the rows themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._errors import DataError, DatasetError
from ._places import Places, joined_places, places_of
from ._skipped import Skipped, left_out, warn_of_skipped


class RowName:
    """'row 3', or 'row 3 (data.jsonl, line 5)' where the source is known. The text is made when it is asked for."""

    __slots__ = ("_first", "_index", "_rows")

    def __init__(self, rows: Any, index: int, first: int = 0) -> None:
        self._rows, self._index, self._first = rows, index, first

    def __str__(self) -> str:
        places = places_of(self._rows)
        return f"row {self._first + self._index}" + ("" if places is None else f" ({places.tell(self._index)})")


@dataclass(frozen=True)
class Failed:
    """Stands for a row that cannot be read, until somebody asks for it."""

    error: DataError


def row_at(rows: Any, index: int) -> Any:
    """`rows[index]`, of a source that nobody knows.

    Raises:
        DatasetError: it raised StopIteration, which would end whatever loop asks for the row.
    """
    try:
        return rows[index]
    except StopIteration as error:
        raise DatasetError(f"{RowName(rows, index)}: the source raised StopIteration, so there is no such row") from error


def row_or_failed(rows: Any, index: int) -> Any:
    """The row, or `Failed` where it cannot be read."""
    try:
        return row_at(rows, index)
    except DataError as error:
        return Failed(error)


Fn = Callable[[RowName, Any], Any]
"""A function of a row's name (for errors) and the row."""


def part(rows: Any, start: int, stop: int) -> Any:
    """Rows `[start, stop)` as a sequence of its own, fit to be pickled. A row that cannot be read raises when it is asked for there."""
    piece = getattr(rows, "part", None)
    return read_part(rows, start, stop) if piece is None else piece(start, stop)


def read_part(rows: Any, start: int, stop: int) -> "Listed":
    """The same, with the rows read now."""
    return Listed([row_or_failed(rows, index) for index in range(start, stop)], _piece_of_places(rows, start, stop))


def _piece_of_places(rows: Any, start: int, stop: int) -> Places | None:
    places = places_of(rows)
    return None if places is None else places.take(slice(start, stop))


class Listed(Sequence[Any]):
    """Rows in memory that remember where they come from; `Failed` ones raise."""

    def __init__(self, rows: Sequence[Any], places: Places | None = None, skipped: Skipped | None = None) -> None:
        self._rows, self.places, self.skipped = rows, places, skipped

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[index]
        if type(row) is Failed:
            raise row.error
        return row

    def part(self, start: int, stop: int) -> "Listed":
        return Listed(self._rows[start:stop], _piece_of_places(self, start, stop))


class Mapped(Sequence[Any]):
    """fn(name, row) of every row, computed when it is read."""

    def __init__(self, rows: Sequence[Any], fn: Fn, first: int = 0) -> None:
        self._rows, self._fn, self._first = rows, fn, first

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def places(self) -> Places | None:
        return places_of(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._fn(RowName(self._rows, index, self._first), self._rows[index])

    def part(self, start: int, stop: int) -> "Mapped":
        return Mapped(part(self._rows, start, stop), self._fn, self._first + start)


class Selected(Sequence[Any]):
    """Rows at given indices."""

    def __init__(self, rows: Sequence[Any], indices: NDArray[np.int64]) -> None:
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    @cached_property
    def places(self) -> Places | None:
        places = places_of(self._rows)
        return None if places is None else places.take(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[int(self._indices[index])]


class Joined(Sequence[Any]):
    """The rows of several sequences, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        self._parts = list(parts)
        self._stops = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    @cached_property
    def places(self) -> Places | None:
        return joined_places(self._parts)

    @property
    def skipped(self) -> Skipped:
        return sum((getattr(part, "skipped", None) or Skipped() for part in self._parts), Skipped())

    def __getitem__(self, index: Any) -> Any:
        which = int(np.searchsorted(self._stops, index, side="right"))
        return self._parts[which][int(index - (self._stops[which - 1] if which else 0))]


def known_length(rows: Any) -> int | None:
    """How many rows there are; None where all of them would have to be looked at to tell."""
    if isinstance(rows, Mapped):
        return known_length(rows._rows)  # pyright: ignore[reportPrivateUsage]
    return None if isinstance(rows, Found) and not rows.is_known else len(rows)


class Found(Sequence[Any]):
    """Rows that are found by looking at all of them, when a length or a row is first asked for.

    `look(name, row)` gives what stands in a row's place: nothing (it is left out), one row or several. With `keep`, what was given is
    kept in memory; without, only which rows gave something is, and they are read again. With `skip_errors`, a row whose reading or
    looking raises a DataError is left out and counted.
    """

    def __init__(self, rows: Sequence[Any], look: Callable[[RowName, Any], Sequence[Any]], *, keep: bool, skip_errors: bool = False) -> None:
        self._rows, self._look, self._keep, self._skip_errors = rows, look, keep, skip_errors
        self._result: tuple[NDArray[np.int64], list[Any] | None, Skipped] | None = None

    def _found(self) -> tuple[NDArray[np.int64], list[Any] | None, Skipped]:
        if self._result is None:
            indices: list[int] = []
            values: list[Any] = []
            skipped = Skipped()
            for index in range(len(self._rows)):
                try:
                    given = self._look(RowName(self._rows, index), self._rows[index])
                except DataError as error:
                    if not self._skip_errors:
                        raise
                    skipped += Skipped(count=1, reasons=(str(error),))
                    continue
                skipped += left_out(given)
                indices += [index] * len(given)
                if self._keep:
                    values += given
            warn_of_skipped(skipped)
            self._result = np.array(indices, np.int64), values if self._keep else None, skipped
        return self._result

    @property
    def is_known(self) -> bool:
        """Whether all rows have been looked at."""
        return self._result is not None

    def __len__(self) -> int:
        return len(self._found()[0])

    @property
    def skipped(self) -> Skipped:
        return self._found()[2]

    @cached_property
    def places(self) -> Places | None:
        places = places_of(self._rows)
        return None if places is None else places.take(self._found()[0])

    def __getitem__(self, index: Any) -> Any:
        indices, values, _ = self._found()
        return self._rows[int(indices[index])] if values is None else values[index]
