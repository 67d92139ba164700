"""Rows that come one after another: where they come from, and how to begin anywhere."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from ._errors import DatasetError


@runtime_checkable
class RowStream(Protocol):
    """Rows without a length, that can be read from any row on.

    Implement it for sources that can go to a row faster than by reading all before it; with `__iter__` alone those are read and left.
    """

    def iter_from(self, row: int) -> Iterator[Any]:
        """A new iterator that begins with the row of this number (0 is the first). Equal numbers give equal rows."""
        ...


@runtime_checkable
class ResumableStream(Protocol):
    """Rows without a length, and a position among them: `iter` begins at the first, or at the loaded position."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]:
        """The position after the last row that was given out, as plain JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up at a saved position: the next `iter` begins there."""
        ...


def is_stream(source: Any) -> bool:
    """Whether rows of this source come one after another, without a length."""
    return isinstance(source, (RowStream, ResumableStream)) and not hasattr(source, "__len__")


def check_source(source: Any) -> None:
    """Refuses what `rows_from` cannot read again and again.

    Raises:
        DatasetError: an iterator, or something without rows.
    """
    if isinstance(source, Iterator):
        raise DatasetError("an iterator can be read only once; give the function that makes it, or an iterable")
    if not (isinstance(source, (RowStream, Iterable)) or hasattr(source, "__getitem__") or callable(source)):
        raise DatasetError(f"a stream is a sequence, an iterable, or a function that makes one, not {type(source).__name__}")


def rows_from(source: "RowStream | Sequence[Any] | Iterable[Any] | Callable[[], Iterable[Any]]", row: int) -> Iterator[Any]:
    """The rows of a source from this number on, by its `iter_from`, by index, or by leaving out those before."""
    rows: Any = source
    if isinstance(rows, RowStream):
        return rows.iter_from(row)
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
        return (rows[index] for index in range(row, len(rows)))
    if not isinstance(rows, Iterable):
        made = rows()
        return islice(made, row, None) if isinstance(made, Iterator) else rows_from(made, row)
    return islice(rows, row, None)
