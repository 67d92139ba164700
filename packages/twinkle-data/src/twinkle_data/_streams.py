"""The stages of a stream. Each gives (name, row, state): what the row is called in errors, and from where to go on after it.

A state is plain JSON. `open(None)` begins at the first row; `open(state)` goes on behind the row that came with the state, without
running what was done to the rows before it, as far as possible.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ._errors import DataError, DatasetError, LoaderStateError
from ._skipped import Skipped
from ._sources import iterate_files

Item = tuple[object, Any, Any]


class Stage(Protocol):
    """A stage."""

    def open(self, state: Any) -> Iterator[Item]:
        """The items behind a state."""
        ...


class FileSource:
    """Rows of files, in order. State: how many were read."""

    def __init__(self, source: str | Path) -> None:
        self._source = source

    def open(self, state: Any) -> Iterator[Item]:
        first = whole_number(state, "a file's position")
        for index, (name, row) in enumerate(iterate_files(self._source, first), start=first + 1):
            yield name, row, index


class ObjectSource:
    """Rows of an iterable, a sequence, or what a function returns. State: how many were read; those before are passed over."""

    def __init__(self, source: Iterable[Any] | Callable[[], Any]) -> None:
        self._source = source
        self._opened = False

    def open(self, state: Any) -> Iterator[Item]:
        first = whole_number(state, "a stream's position")
        rows: Any = self._source() if callable(self._source) else self._source
        if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
            behind: Iterator[Any] = (rows[index] for index in range(first, len(rows)))
        else:
            if isinstance(rows, Iterator) and self._opened and not callable(self._source):
                raise DatasetError("this stream was made from an iterator, which can be read only once; give a function that returns a new one")
            behind = islice(iter(rows), first, None)
        self._opened = True
        for index, row in enumerate(behind, start=first):
            yield f"row {index}", row, index + 1


class Each:
    """fn(name, row) -> list of what stands in a row's place: none, one or several. State: [the source's before the row, how many were given].

    With `skip_errors`, a row for which fn raises a DataError is left out and counted.
    """

    def __init__(self, source: Stage, fn: Callable[[object, Any], Sequence[Any]], skip_errors: bool = False) -> None:
        self._source, self._fn, self._skip_errors = source, fn, skip_errors
        self.skipped = Skipped()

    def open(self, state: Any) -> Iterator[Item]:
        before, given = pair_of(state, [None, 0])
        for name, row, after in self._source.open(before):
            try:
                results = self._fn(name, row)
            except DataError as error:
                if not self._skip_errors:
                    raise
                self.skipped += Skipped(count=1, reasons=(str(error),))
                results = ()
            for count, result in enumerate(results[given:], start=given + 1):
                yield name, result, [after, 0] if count == len(results) else [before, count]
            before, given = after, 0


class Limited:
    """The rows from `first` to `stop` of a stage. State: [the source's, how many of them were read]."""

    def __init__(self, source: Stage, first: int, stop: int | None) -> None:
        self._source, self._first, self._stop = source, first, stop

    def open(self, state: Any) -> Iterator[Item]:
        before, read = pair_of(state, [None, 0])
        if self._stop is not None and read >= self._stop:
            return
        for index, (name, row, after) in enumerate(self._source.open(before), start=read):
            if index >= self._first:
                yield name, row, [after, index + 1]
            if self._stop is not None and index + 1 >= self._stop:
                return


class Shuffled:
    """Blocks of rows, each in a new order. State: [the source's before the block, the block's number, how many of it were given]."""

    def __init__(self, source: Stage, block: int, seed: int) -> None:
        self._source, self._block, self._seed = source, block, seed

    def open(self, state: Any) -> Iterator[Item]:
        before, number, given = (None, 0, 0) if state is None else state
        source = self._source.open(before)
        while block := list(islice(source, self._block)):
            after = block[-1][2]
            order = np.random.default_rng([self._seed, number]).permutation(len(block))
            for count, index in enumerate(order[given:], start=given + 1):
                name, row, _ = block[int(index)]
                yield name, row, [after, number + 1, 0] if count == len(block) else [before, number, count]
            before, number, given = after, number + 1, 0


class Mixed:
    """Rows of several stages, each time from one that is drawn by weight. State: [the sources' states, which have ended, draws].

    'first': ends with the first stage that ends. 'all': a stage that ends begins anew, until all have ended once.
    """

    def __init__(self, sources: Sequence[Stage], weights: Sequence[float], seed: int, stop: str) -> None:
        self._sources, self._weights, self._seed, self._stop = list(sources), weights, seed, stop

    def open(self, state: Any) -> Iterator[Item]:
        states, ended, draws = ([None] * len(self._sources), [False] * len(self._sources), 0) if state is None else map(_copied, state)
        opened = [source.open(at) for source, at in zip(self._sources, states, strict=True)]
        for which in drawn(self._weights, self._seed, draws):
            item = next(opened[which], None)
            if item is None:
                ended[which] = True
                if self._stop == "first" or all(ended):
                    return
                opened[which] = self._sources[which].open(None)
                if (item := next(opened[which], None)) is None:
                    raise DatasetError(f"stream {which} of a mixture has no rows")
            draws += 1
            name, row, states[which] = item
            yield name, row, [list(states), list(ended), draws]


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def drawn(weights: Sequence[float], seed: int, first: int = 0) -> Iterator[int]:
    """Without end: indices drawn by weight, from draw `first` on. Draw i depends on the seed and i alone."""
    size = 4096
    stops = np.cumsum(np.asarray(weights, np.float64) / np.sum(weights))
    block, offset = divmod(first, size)
    while True:
        draws = np.random.default_rng([seed, block]).random(size)
        yield from np.minimum(np.searchsorted(stops, draws, side="right"), len(stops) - 1)[offset:].tolist()
        block, offset = block + 1, 0


def whole_number(state: Any, what: str) -> int:
    """A source's state; None is 0."""
    if state is None:
        return 0
    if isinstance(state, bool) or not isinstance(state, int) or state < 0:
        raise LoaderStateError(f"{state!r} is not {what}: it belongs to a stream that was made otherwise")
    return state


def pair_of(state: Any, start: list[Any]) -> list[Any]:
    """A stage's state of two parts."""
    if state is None:
        return start
    if not isinstance(state, list) or len(state) != 2 or not isinstance(state[1], int):
        raise LoaderStateError(f"{state!r} belongs to a stream that was made otherwise")
    return state
