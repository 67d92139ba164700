"""Batches that are not here, or not put together yet, and what slicing, concatenation and `map` make of them.

A Batch knows its length and writes a Recipe for a range of its items: which pieces of which results to fetch, what to cut from them and
which functions to call. So a worker that needs part of `(a[2:] + b).map(f)` fetches just the items of a and b that it takes. Recipes pickle.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from twinkle_remote._errors import CollectError
from twinkle_remote._sequences import cut, join, result_kind


class Recipe(Protocol):
    """How to get some items."""

    def run(self, timeout_s: float | None) -> Any:
        """Get them. timeout_s: seconds for what has to be fetched."""
        ...


class Batch(Protocol):
    """A value of which items can be had by range, if it is a batch."""

    @property
    def length(self) -> int | None:
        """How many items; None for what is not a batch."""
        ...

    def recipe(self, start: int, stop: int) -> Recipe:
        """For items start..stop, 0 <= start <= stop <= length. Only of a batch."""
        ...

    def whole(self) -> Recipe:
        """For the value."""
        ...


class Operation(Protocol):
    """What makes a batch of batches, without fetching any. Pickles."""

    def over(self, batches: Sequence[Batch]) -> Batch:
        """The batch. Raises CollectError where one of the given ones is no batch."""
        ...


@dataclass(frozen=True, slots=True)
class Known:
    """The recipe for a value that is here."""

    value: Any

    def run(self, timeout_s: float | None) -> Any:
        return self.value


class Held:
    """A value that is here."""

    def __init__(self, value: Any) -> None:
        self._value = value
        kind, length = result_kind(value)
        self.length: int | None = None if kind is None else length

    def recipe(self, start: int, stop: int) -> Recipe:
        return Known(cut(self._value, slice(start, stop)))

    def whole(self) -> Recipe:
        return Known(self._value)


@dataclass(frozen=True, slots=True)
class Cut:
    """The items within `bounds` of one batch."""

    bounds: slice

    def over(self, batches: Sequence[Batch]) -> Batch:
        return _CutBatch(batches[0], range(_length(batches[0], "cut"))[self.bounds])


class _CutBatch:
    def __init__(self, inner: Batch, indices: range) -> None:
        self._inner = inner
        self._indices = indices
        self.length: int | None = len(indices)

    def recipe(self, start: int, stop: int) -> Recipe:
        indices = self._indices[start:stop]
        if not indices:
            return self._inner.recipe(0, 0)
        low, high = min(indices[0], indices[-1]), max(indices[0], indices[-1])
        covering = self._inner.recipe(low, high + 1)
        return covering if indices.step == 1 else _Strided(covering, indices.step)

    def whole(self) -> Recipe:
        return self.recipe(0, len(self._indices))


@dataclass(frozen=True, slots=True)
class _Strided:
    covering: Recipe
    step: int

    def run(self, timeout_s: float | None) -> Any:
        return _strided(self.covering.run(timeout_s), self.step)


def _strided(value: Any, step: int) -> Any:
    if isinstance(value, dict):
        return {key: _strided(column, step) for key, column in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if step < 0 and hasattr(value, "flip"):  # torch has no negative steps
        return value.flip(0)[::-step]
    return value[::step]


@dataclass(frozen=True, slots=True)
class Concat:
    """Batches of one kind end to end."""

    def over(self, batches: Sequence[Batch]) -> Batch:
        return _ConcatBatch(batches, [_length(batch, "concatenated") for batch in batches])


class _ConcatBatch:
    def __init__(self, inner: Sequence[Batch], lengths: Sequence[int]) -> None:
        self._inner = inner
        self._ends = list(accumulate(lengths))
        self.length: int | None = self._ends[-1]

    def recipe(self, start: int, stop: int) -> Recipe:
        parts: list[Recipe] = []
        for index in range(bisect_right(self._ends, start), len(self._inner)):
            first = self._ends[index - 1] if index else 0
            if first >= stop:
                break
            if self._ends[index] > first:
                parts.append(self._inner[index].recipe(max(start, first) - first, min(stop, self._ends[index]) - first))
        return parts[0] if len(parts) == 1 else _Joined(tuple(parts)) if parts else self._inner[0].recipe(0, 0)

    def whole(self) -> Recipe:
        return self.recipe(0, self._ends[-1])


@dataclass(frozen=True, slots=True)
class _Joined:
    parts: tuple[Recipe, ...]

    def run(self, timeout_s: float | None) -> Any:
        return join([part.run(timeout_s) for part in self.parts])


@dataclass(frozen=True, slots=True)
class Map:
    """`function` of each item of one batch: a tuple of a tuple, else a list."""

    function: Callable[[Any], Any]

    def over(self, batches: Sequence[Batch]) -> Batch:
        return _MapBatch(batches[0], self.function, _length(batches[0], "mapped over"))


class _MapBatch:
    def __init__(self, inner: Batch, function: Callable[[Any], Any], length: int) -> None:
        self._inner = inner
        self._function = function
        self.length: int | None = length

    def recipe(self, start: int, stop: int) -> Recipe:
        return _Mapped(self._inner.recipe(start, stop), self._function)

    def whole(self) -> Recipe:
        return _Mapped(self._inner.whole(), self._function)


@dataclass(frozen=True, slots=True)
class _Mapped:
    items: Recipe
    function: Callable[[Any], Any]

    def run(self, timeout_s: float | None) -> Any:
        items = self.items.run(timeout_s)
        if isinstance(items, dict):
            raise CollectError("map takes the items of a list, tuple, array or tensor, not the columns of a dict: pass the dict on and map there")
        values = [self.function(item) for item in items]
        return tuple(values) if isinstance(items, tuple) else values


def _length(batch: Batch, done: str) -> int:
    if batch.length is None:
        raise CollectError(
            f"only lists, tuples, arrays, tensors and dicts of columns can be {done}, and this result is none: call .get() for its value"
        )
    return batch.length
