"""The stages of a stream. Each gives (name, row, state): what the row is called in errors, and from where to go on after it.

A state is plain JSON. `open(None)` begins at the first row; `open(state)` goes on behind the row that came with the state, without
running what was done to the rows before it, as far as possible.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ._checks import is_count
from ._errors import DataError, DatasetError, LoaderStateError
from ._rows import Failed, row_or_failed
from ._skipped import Skipped, left_out
from ._sources import iterate_files, tool_rows

Item = tuple[object, Any, Any]


class Stage(Protocol):
    """A stage. In the place of a row that cannot be had stands `Failed`: a later stage may leave it out, else whoever reads the stream raises it."""

    @property
    def settings(self) -> str:
        """What the stage and those before it do, in words: a state belongs to one of these."""
        ...

    @property
    def skipped(self) -> Skipped:
        """What this stage and those before it have left out since they were opened last."""
        ...

    def open(self, state: Any) -> Iterator[Item]:
        """The items behind a state."""
        ...


class FileSource:
    """Rows of files, in order. State: how many were read."""

    settings = "files"
    skipped = Skipped()

    def __init__(self, source: str | Path) -> None:
        self._source = source

    def open(self, state: Any) -> Iterator[Item]:
        first = whole_number(state)
        for index, (name, row) in enumerate(iterate_files(self._source, first), start=first + 1):
            yield name, row, index


class ObjectSource:
    """Rows of an iterable, a sequence, or what a function returns. State: how many were read; those before are passed over."""

    settings = "rows"
    skipped = Skipped()

    def __init__(self, source: Iterable[Any] | Callable[[], Any]) -> None:
        self._source = source
        self._opened = False

    def open(self, state: Any) -> Iterator[Item]:
        first = whole_number(state)
        rows: Any = tool_rows(self._source() if callable(self._source) else self._source)
        if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
            behind: Iterator[Any] = (row_or_failed(rows, index) for index in range(first, len(rows)))
        else:
            if isinstance(rows, Iterator) and self._opened and not callable(self._source):
                raise DatasetError("this stream was made from an iterator, which can be read only once; give a function that returns a new one")
            behind = islice(iter(rows), first, None)
        self._opened = True
        for index, row in enumerate(behind, start=first):
            yield f"row {index}", row, index + 1


class Each:
    """fn(name, row) -> list of what stands in a row's place: none, one or several. State: [the source's before the row, how many were given].

    A row for which fn raises a DataError has failed. With `skip_errors`, rows that have failed here or before are left out and counted.
    """

    def __init__(self, source: Stage, fn: Callable[[object, Any], Sequence[Any]], what: str, skip_errors: bool = False) -> None:
        self._source, self._fn, self._what, self._skip_errors = source, fn, what, skip_errors
        self._skipped = Skipped()

    @property
    def settings(self) -> str:
        return f"{self._source.settings} > {self._what}"

    @property
    def skipped(self) -> Skipped:
        return self._source.skipped + self._skipped

    def open(self, state: Any) -> Iterator[Item]:
        before, given = _pair(state)
        self._skipped = Skipped()
        for name, row, after in self._source.open(before):
            results = self._results(name, row)
            for count, result in enumerate(results[given:], start=given + 1):
                yield name, result, [after, 0] if count == len(results) else [before, count]
            before, given = after, 0

    def _results(self, name: object, row: Any) -> Sequence[Any]:
        failed = row
        if not isinstance(row, Failed):
            try:
                given = self._fn(name, row)
            except DataError as error:
                failed = Failed(error)
            else:
                self._skipped += left_out(given)
                return given
        if not self._skip_errors:
            return (failed,)
        self._skipped += Skipped(count=1, reasons=(str(failed.error),))
        return ()


class Limited:
    """The rows from `first` to `stop` of a stage. State: [the source's, how many of them were read]."""

    def __init__(self, source: Stage, first: int, stop: int | None) -> None:
        self._source, self._first, self._stop = source, first, stop

    @property
    def settings(self) -> str:
        return f"{self._source.settings} > rows {self._first} to {'the end' if self._stop is None else self._stop}"

    @property
    def skipped(self) -> Skipped:
        return self._source.skipped

    def open(self, state: Any) -> Iterator[Item]:
        before, read = _pair(state)
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

    @property
    def settings(self) -> str:
        return f"{self._source.settings} > shuffle(block={self._block}, seed={self._seed})"

    @property
    def skipped(self) -> Skipped:
        return self._source.skipped

    def open(self, state: Any) -> Iterator[Item]:
        before, number, given = (None, 0, 0) if state is None else _parts(state, 3)
        number, given = whole_number(number), whole_number(given)
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

    @property
    def settings(self) -> str:
        sources = ", ".join(source.settings for source in self._sources)
        return f"mix({sources}; weights={list(self._weights)}, seed={self._seed}, stop={self._stop!r})"

    @property
    def skipped(self) -> Skipped:
        return sum((source.skipped for source in self._sources), Skipped())

    def open(self, state: Any) -> Iterator[Item]:
        size = len(self._sources)
        states, ended, draws = ([None] * size, [False] * size, 0) if state is None else _parts(state, 3)
        states, ended, draws = _parts(states, size), _parts(ended, size), whole_number(draws)
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


def drawn(weights: Sequence[float], seed: int, first: int = 0) -> Iterator[int]:
    """Without end: indices drawn by weight, from draw `first` on. Draw i depends on the seed and i alone."""
    size = 4096
    stops = np.cumsum(np.asarray(weights, np.float64) / np.sum(weights))
    block, offset = divmod(first, size)
    while True:
        draws = np.random.default_rng([seed, block]).random(size)
        yield from np.minimum(np.searchsorted(stops, draws, side="right"), len(stops) - 1)[offset:].tolist()
        block, offset = block + 1, 0


def inner_state(state: Any, settings: str) -> Any:
    """The state of a stage, of what was saved of a stream with these settings.

    Raises:
        LoaderStateError: it was saved of another stream.
    """
    if state is None:
        return None
    if not isinstance(state, dict) or state.keys() != {"stream", "at"}:
        raise LoaderStateError(f"{state!r:.200} does not tell the stream that it belongs to, so nobody can go on from it; begin anew")
    if state["stream"] != settings:
        raise LoaderStateError(
            f"the state belongs to the stream {state['stream']!r}, this one is {settings!r}; make the stream as it was, or begin anew"
        )
    return state["at"]


def whole_number(state: Any) -> int:
    """A count in a state; None is 0."""
    if state is None:
        return 0
    if not is_count(state):
        raise LoaderStateError(f"the stream's saved state is damaged: {state!r:.200} stands where a count should")
    return state


def _parts(state: Any, size: int) -> list[Any]:
    """A copy of a list of so many entries."""
    if not isinstance(state, list) or len(state) != size:
        raise LoaderStateError(f"the stream's saved state is damaged: {state!r:.200} stands where a list of {size} should")
    return list(state)


def _pair(state: Any) -> tuple[Any, int]:
    before, count = (None, 0) if state is None else _parts(state, 2)
    return before, whole_number(count)
