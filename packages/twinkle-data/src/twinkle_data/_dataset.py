"""Datasets: rows by index, transformed when they are read (or at once), with errors that say which row and which field."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ._errors import DataError, DatasetError, FormatError, SequenceTooLongError
from ._formats import InputFeature, Trajectory
from ._template import Template


class Dataset(Sequence[Any]):
    """Rows by index, over anything that has rows.

    A dataset is immutable: `map`, `filter`, `encode`, `select` and `split` return new ones. By default they work lazily: a row is
    transformed each time it is read; a filter looks at all rows once, when a length or a row is first asked for. With `lazy=False` all
    rows are transformed at once and kept.

    Args:
        source: a sequence (a list, a Hugging Face dataset), another iterable (read once, wholly, here), the path of a `.jsonl` file
            (one JSON object a line), or a function without arguments that returns one of these.

    Raises:
        DatasetError: a file that is absent or not `.jsonl`, a line that is not a JSON object, a source that has no rows to give.
    """

    def __init__(self, source: "Sequence[Any] | Iterable[Any] | str | Path | Callable[[], Any]") -> None:
        self._rows: Any = _rows(source)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Any:
        """One row, or a dataset of the rows of a slice. Raises IndexError beyond the end."""
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"row {index} of a dataset with {size} rows")
        return self._rows[int(index) % size]

    def __iter__(self) -> Iterator[Any]:
        """The rows in order."""
        return (self[index] for index in range(len(self)))

    def map(self, fn: Callable[[Any], Any], *, lazy: bool = True) -> "Dataset":
        """The dataset of `fn(row)`. A failure in `fn` is a DatasetError that names the row, the function and the row's fields."""
        return self._derived(_Mapped(self._rows, partial(_call, fn)), lazy)

    def filter(self, fn: Callable[[Any], bool], *, lazy: bool = True) -> "Dataset":
        """The rows for which `fn(row)` is true, in order. Failures are reported as in `map`."""
        return self._derived(_Filtered(self._rows, partial(_call, fn)), lazy)

    def encode(self, template: Template, add_generation_prompt: bool = False, *, lazy: bool = True) -> "Dataset":
        """The rows as `InputFeature`s. A row is a `Trajectory`, or a mapping with 'messages', whose other fields become `user_data`.

        With a template whose truncation is 'drop', rows that are too long are left out; all rows are then encoded once to find them.
        Failures are DatasetErrors that name the row and, where one is missing or wrong, the field.
        """
        encoded: Sequence[Any] = _Mapped(self._rows, partial(_encode, template, add_generation_prompt))
        if template.truncation == "drop":
            encoded = _Present(encoded)
        return self._derived(encoded, lazy)

    def select(self, indices: Iterable[int]) -> "Dataset":
        """The rows at these indices, in this order. Raises IndexError for one beyond the end."""
        chosen = np.fromiter(indices, np.int64)
        size = len(self)
        if chosen.size and (chosen.min() < -size or chosen.max() >= size):
            raise IndexError(f"select: indices {chosen.min()} to {chosen.max()} on a dataset with {size} rows")
        return Dataset(_Selected(self._rows, chosen % size if chosen.size else chosen))

    def split(self, *, held_out: float, key: Callable[[Any], str] | None = None, seed: int = 0) -> tuple["Dataset", "Dataset"]:
        """Two datasets without a common row: the larger rest, and the held-out share.

        Args:
            held_out: the share to hold out, in (0, 1).
            key: when given, a row is held out by a hash (SHA-1) of its key alone, so that equal keys never stand on both sides, in this
                dataset or another; the share is met in the mean. When not, `round(held_out * len)` random rows are.
            seed: of the random choice.

        Raises:
            DatasetError: a share outside (0, 1); a key function that fails.
        """
        if not 0 < held_out < 1:
            raise DatasetError(f"split: held_out is {held_out}; it must lie between 0 and 1")
        if key is None:
            order = np.random.default_rng(seed).permutation(len(self))
            out = np.zeros(len(self), np.bool_)
            out[order[: round(held_out * len(self))]] = True
        else:
            out = np.array([_hash_share(_call(key, index, row)) < held_out for index, row in enumerate(self)], np.bool_)
        return self.select(np.flatnonzero(~out)), self.select(np.flatnonzero(out))

    @staticmethod
    def _derived(rows: Sequence[Any], lazy: bool) -> "Dataset":
        return Dataset(rows if lazy else list(rows))


def _rows(source: Any) -> Any:
    if isinstance(source, Dataset):
        return source._rows  # pyright: ignore[reportPrivateUsage]
    if isinstance(source, (str, Path)):
        return _read_jsonl(Path(source))
    if isinstance(source, Mapping):
        raise DatasetError("a mapping has no rows; give a list of rows")
    if isinstance(source, Sequence) or (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        return source
    if isinstance(source, Iterable):
        return list(source)
    if callable(source):
        return _rows(source())
    raise DatasetError(f"a dataset is made from a sequence, an iterable, a .jsonl path or a function, not from {type(source).__name__}")


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    if path.suffix != ".jsonl":
        raise DatasetError(f"{str(path)!r} is not a .jsonl file; read other formats yourself and give the rows")
    if not path.is_file():
        raise DatasetError(f"there is no file {str(path)!r}")
    rows: list[dict[str, Any]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DatasetError(f"{path}, line {number}: not UTF-8 ({error})") from error
            except json.JSONDecodeError as error:
                raise DatasetError(f"{path}, line {number}: not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise DatasetError(f"{path}, line {number}: a {type(row).__name__}, not a JSON object")
            rows.append(row)
    return rows


def _hash_share(key: Any) -> float:
    digest = hashlib.sha1(str(key).encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _call(fn: Callable[[Any], Any], index: int, row: Any) -> Any:
    try:
        return fn(row)
    except Exception as error:  # the user's function: whatever it raises is told with the row it failed on
        name = getattr(fn, "__qualname__", type(fn).__name__)
        reason = f"no field {error}" if isinstance(error, KeyError) and isinstance(row, Mapping) else f"{type(error).__name__}: {error}"
        raise DatasetError(f"row {index}: {name} failed: {reason}{_has(row)}") from error


def _encode(template: Template, add_generation_prompt: bool, index: int, row: Any) -> InputFeature | None:
    try:
        return template.encode(_trajectory(row), add_generation_prompt)
    except SequenceTooLongError as error:
        if template.truncation == "drop":
            return None
        raise DatasetError(f"row {index}: {error}") from error
    except DataError as error:
        raise DatasetError(f"row {index}: {error}") from error


def _trajectory(row: Any) -> Trajectory:
    if isinstance(row, Trajectory):
        return row
    if not isinstance(row, Mapping):
        raise FormatError(f"a {type(row).__name__} cannot be encoded; map it to a Trajectory or to a mapping with 'messages'")
    if "messages" not in row:
        raise FormatError(f"no field 'messages'{_has(row)}; map the row to a Trajectory first")
    user_data = row.get("user_data", {key: value for key, value in row.items() if key != "messages"})
    return Trajectory(messages=row["messages"], user_data=user_data)


def _has(row: Any) -> str:
    return f" (the row has {', '.join(map(repr, row)) or 'no fields'})" if isinstance(row, Mapping) else ""


class _Mapped(Sequence[Any]):
    """fn(index, row) of every row, computed when it is read."""

    def __init__(self, rows: Sequence[Any], fn: Callable[[int, Any], Any]) -> None:
        self._rows, self._fn = rows, fn

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._fn(index, self._rows[index])


class _Selected(Sequence[Any]):
    """Rows at given indices."""

    def __init__(self, rows: Sequence[Any], indices: Any) -> None:
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[int(self._indices[index])]


class _Filtered(Sequence[Any]):
    """Rows that pass, found when a length or a row is first asked for."""

    def __init__(self, rows: Sequence[Any], fn: Callable[[int, Any], Any]) -> None:
        self._rows, self._fn = rows, fn
        self._found: list[int] | None = None

    def _indices(self) -> list[int]:
        if self._found is None:
            self._found = [index for index in range(len(self._rows)) if self._fn(index, self._rows[index])]
        return self._found

    def __len__(self) -> int:
        return len(self._indices())

    def __getitem__(self, index: Any) -> Any:
        return self._rows[self._indices()[index]]


class _Present(Sequence[Any]):
    """Rows that are not None, found and kept when a length or a row is first asked for."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows
        self._kept: list[Any] | None = None

    def _present(self) -> list[Any]:
        if self._kept is None:
            self._kept = [row for row in (self._rows[index] for index in range(len(self._rows))) if row is not None]
        return self._kept

    def __len__(self) -> int:
        return len(self._present())

    def __getitem__(self, index: Any) -> Any:
        return self._present()[index]
