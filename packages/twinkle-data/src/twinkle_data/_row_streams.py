"""Rows that come one after another, and positions among them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from ._checks import is_count
from ._errors import DatasetError, LoaderStateError
from ._rows import row_at


@runtime_checkable
class RowStream(Protocol):
    """Rows without a length, that can be read from any position on. `DataLoader` and `IterablePackingDataset` take any."""

    def iterate(self, state: Any = None) -> Iterator[tuple[Any, Any]]:
        """Each row with a state, plain JSON: `iterate(state)` gives what comes behind that row, and `iterate()` all rows. Equal states give
        equal rows."""
        ...


def is_stream(source: Any) -> bool:
    """Whether rows of this source come one after another, without a length."""
    return isinstance(source, RowStream) and not hasattr(source, "__len__")


def as_stream(source: "RowStream | Sequence[Any] | Iterable[Any] | Callable[[], Iterable[Any]]") -> RowStream:
    """The source as a stream: itself if it is one, else its rows by number.

    Raises:
        DatasetError: an iterator, which can be read only once, or something without rows.
    """
    if isinstance(source, RowStream):
        return source
    if isinstance(source, Iterator):
        raise DatasetError("an iterator can be read only once; give the function that makes it, or an iterable")
    if not (isinstance(source, Iterable) or callable(source)):
        raise DatasetError(f"a stream is a sequence, an iterable, or a function that makes one, not {type(source).__name__}")
    return _Numbered(source)


class _Numbered:
    """Rows of a sequence, an iterable, or what a function makes; the state is how many were read. Those before are passed over."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def iterate(self, state: Any = None) -> Iterator[tuple[Any, Any]]:
        first = 0 if state is None else state
        if not is_count(first):
            raise LoaderStateError(f"{state!r:.200} is no number of rows: it belongs to a stream that was made otherwise")
        source = self._source
        rows: Any = source if hasattr(source, "__iter__") else source()
        if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
            behind: Iterator[Any] = (row_at(rows, index) for index in range(first, len(rows)))
        else:
            behind = islice(iter(rows), first, None)
        return ((row, number) for number, row in enumerate(behind, start=first + 1))
