"""Datasets: rows by index, transformed when they are read (or at once), with errors that say which row and which field."""

import hashlib
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._checks import check_whole
from ._errors import DatasetError
from ._pool import Progress
from ._rows import Found, Joined, Mapped, RowName, Selected, known_length, row_at
from ._schema_report import SchemaReport, report_schema
from ._skipped import Skipped
from ._sources import hub_rows, rows_of
from ._streams import drawn
from ._template import Template
from ._transforms import ConvertRows, EncodeRows, FilterRows, MapRows, OnError, Transform, call, transformed
from ._wording import a_kind, in_rows


class Dataset(Sequence[Any]):
    """Rows by index, over anything that has rows.

    A dataset is immutable: `map`, `filter`, `encode`, `select` and their kin return new ones. By default they work lazily: a row is
    transformed each time it is read; what leaves rows out looks at all of them once, when a length or a row is first asked for. With
    `lazy=False` all rows are transformed at once and kept. The keywords of `map`, `filter`, `conversations` and `encode`:

    - `lazy`: see above. The other keywords but `on_error` ask for work on all rows, and mean `lazy=False`.
    - `on_error`: 'raise', or 'skip': rows that fail are left out, counted (`skipped`) and told in a warning.
    - `num_proc`: worker processes. They are started anew, so functions must be importable (no lambdas), and a script starts its work
      under `if __name__ == "__main__":`. Rows and their order are the same for any number.
    - `progress`: True for a line on stderr, or a function of rows done and rows in all.
    - `cache_dir`: a folder in which the result is kept, under a digest of the rows' content and of the function's code; the same work is
      then not done again, in this process or a later one. Rows are read from there when they are asked for, so they take no memory.
      None (the default): nothing is kept. Nothing is deleted from the folder, which must be trusted: it holds pickles.
    - `timeout_s`: the longest wait for a chunk of rows from a worker process.

    Args:
        source: a sequence (a list, a Hugging Face dataset), another iterable (read once, wholly, here), a function without arguments
            that returns one of these, or a path: a `.jsonl`, `.ndjson`, `.json`, `.csv`, `.tsv` or `.parquet` file (also gzipped), a
            pattern of such files ('data/*.jsonl'), or a folder that `datasets.save_to_disk` wrote.
        lazy: keep the rows of JSON lines files on disk, and parse each when it is read (its errors then come at that time).
        on_error: 'skip': leave out rows of a file that cannot be parsed, and count them.

    Raises:
        DatasetError: a file that is absent, of another format, or not UTF-8; a row that cannot be parsed, with its line; a source that
            has no rows to give.
        MissingExtraError: Parquet files and saved datasets need the extra `hf`.
    """

    def __init__(
        self,
        source: "Sequence[Any] | Iterable[Any] | str | Path | Callable[[], Any]",
        *,
        lazy: bool = False,
        on_error: OnError = "raise",
    ) -> None:
        rows = rows_of(source, lazy=lazy, skip_errors=_skips(on_error))
        self._rows: Any = rows._rows if isinstance(rows, Dataset) else rows

    @classmethod
    def from_hub(cls, name: str, *, split: str | None = None, config: str | None = None, revision: str | None = None) -> "Dataset":
        """A dataset of the Hugging Face hub by its name, or of a local folder of data files, by `datasets.load_dataset`.

        Raises:
            DatasetError: it cannot be loaded, or has several splits and none is named.
            MissingExtraError: the datasets library is not installed.
        """
        return cls(hub_rows(name, split, config, revision, streaming=False))

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Any:
        """One row, or a dataset of the rows of a slice. Raises IndexError beyond the end."""
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        size = len(self)
        if isinstance(index, (bool, np.bool_)) or not isinstance(index, numbers.Integral):
            raise DatasetError(f"a row's index is a whole number, not {index!r:.100}; rows for which something is true: filter")
        if not -size <= index < size:
            raise IndexError(f"row {index} of a dataset with {in_rows(size)}")
        return row_at(self._rows, int(index) % size)

    def __iter__(self) -> Iterator[Any]:
        """The rows in order."""
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        lazy = "" if (size := known_length(self._rows)) is None else f" of {in_rows(size)}"
        return f"<{type(self).__name__}{lazy}>"

    @property
    def skipped(self) -> Skipped:
        """What the last step left out because of `on_error='skip'`, or because it was too long to keep."""
        return getattr(self._rows, "skipped", None) or Skipped()

    def where(self, index: int) -> str:
        """What a row is called in errors: 'row 3', with the file and line where they are known."""
        return str(RowName(self._rows, int(index) % max(len(self), 1)))

    def inspect(self, *, limit: int | None = 1000) -> SchemaReport:
        """Which forms of chat data the rows have, which fields, and what does not fit. Looks at the first `limit` rows; None: at all."""
        if limit is not None:
            check_whole("inspect: limit", limit, 0)
        return report_schema(self._rows, limit)

    def map(
        self,
        fn: Callable[[Any], Any],
        *,
        lazy: bool = True,
        on_error: OnError = "raise",
        num_proc: int = 1,
        progress: Progress = False,
        cache_dir: str | Path | None = None,
        timeout_s: float = 600,
    ) -> "Dataset":
        """The dataset of `fn(row)`. A failure in `fn` is a DatasetError that names the row, its line, the function and the row's fields."""
        return self._work(MapRows(fn), "map", lazy, on_error, num_proc, progress, cache_dir, timeout_s)

    def filter(
        self,
        fn: Callable[[Any], bool],
        *,
        lazy: bool = True,
        on_error: OnError = "raise",
        num_proc: int = 1,
        progress: Progress = False,
        cache_dir: str | Path | None = None,
        timeout_s: float = 600,
    ) -> "Dataset":
        """The rows for which `fn(row)` is true, in order. Failures are reported as in `map`."""
        return self._work(FilterRows(fn), "filter", lazy, on_error, num_proc, progress, cache_dir, timeout_s)

    def conversations(
        self,
        schema: str | None = None,
        *,
        roles: Mapping[str, str] | None = None,
        lazy: bool = True,
        on_error: OnError = "raise",
        num_proc: int = 1,
        progress: Progress = False,
        cache_dir: str | Path | None = None,
        timeout_s: float = 600,
    ) -> "Dataset":
        """The rows as `Trajectory`s, preference pairs as `PreferencePair`s. Fields that are no part of the conversation become `user_data`.

        Args:
            schema: 'messages' (OpenAI), 'sharegpt', 'alpaca', 'prompt_completion', 'question_answer' or 'preference': all rows must have
                this form. None: each row has the form that its fields tell; see `inspect`.
            roles: names of roles beside the usual ones, and what they mean: `roles={"customer": "user"}`.
            lazy, on_error, num_proc, progress, cache_dir, timeout_s: see the class.
        """
        return self._work(ConvertRows(schema, roles), "conversations", lazy, on_error, num_proc, progress, cache_dir, timeout_s)

    def encode(
        self,
        template: Template,
        add_generation_prompt: bool = False,
        *,
        schema: str | None = None,
        roles: Mapping[str, str] | None = None,
        lazy: bool = True,
        on_error: OnError = "raise",
        num_proc: int = 1,
        progress: Progress = False,
        cache_dir: str | Path | None = None,
        timeout_s: float = 600,
    ) -> "Dataset":
        """The rows as `InputFeature`s. A row is a `Trajectory`, a mapping of any form that `conversations` knows, or a plain text.

        A preference pair becomes a tuple of two features (chosen, rejected). With a template whose truncation is 'drop' or 'split', rows
        that are too long are left out (counted in `skipped`, and told in a warning) or become several; all rows are then encoded once to
        find them. Failures are DatasetErrors that
        name the row, its line and, where one is missing or wrong, the field.
        """
        transform = EncodeRows(template, add_generation_prompt, schema, roles)
        return self._work(transform, "encode", lazy, on_error, num_proc, progress, cache_dir, timeout_s, template.truncation in ("drop", "split"))

    def _work(
        self,
        transform: Transform,
        what: str,
        lazy: bool,
        on_error: OnError,
        num_proc: int,
        progress: Progress,
        cache_dir: str | Path | None,
        timeout_s: float,
        changes_length: bool = False,
    ) -> "Dataset":
        skip = _skips(on_error)
        check_whole(f"{what}: num_proc", num_proc, 1)
        if not lazy or num_proc > 1 or progress or cache_dir is not None:
            options: Any = {"num_proc": num_proc, "progress": progress, "cache_dir": cache_dir, "timeout_s": timeout_s}
            return Dataset(transformed(self._rows, transform, what=what, skip_errors=skip, **options))
        if isinstance(transform, FilterRows):
            return Dataset(Found(self._rows, transform.look, keep=False, skip_errors=skip))
        if skip or changes_length:
            return Dataset(Found(self._rows, transform.look, keep=True, skip_errors=skip))
        return Dataset(Mapped(self._rows, _Only(transform)))

    def select(self, indices: Iterable[int]) -> "Dataset":
        """The rows at these indices, in this order. Raises IndexError for one beyond the end."""
        given = indices if isinstance(indices, np.ndarray) else np.array(list(indices) or [0][:0])
        if given.size and (given.dtype.kind not in "iu" or given.ndim != 1):
            raise DatasetError("select: indices must be whole numbers (of a mask of booleans: np.flatnonzero(mask))")
        chosen = given.astype(np.int64)
        size = len(self)
        if chosen.size and (chosen.min() < -size or chosen.max() >= size):
            raise IndexError(f"select: indices {chosen.min()} to {chosen.max()} on a dataset with {in_rows(size)}")
        return Dataset(Selected(self._rows, chosen % size if chosen.size else chosen))

    def shuffle(self, seed: int = 0) -> "Dataset":
        """The rows in an order that depends on the seed and their number alone."""
        check_whole("seed", seed, 0)
        return self.select(np.random.default_rng(seed).permutation(len(self)))

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
        check_whole("seed", seed, 0)
        if not 0 < held_out < 1:
            raise DatasetError(f"split: held_out is {held_out}; it must lie between 0 and 1")
        if key is None:
            order = np.random.default_rng(seed).permutation(len(self))
            out = np.zeros(len(self), np.bool_)
            out[order[: round(held_out * len(self))]] = True
        else:
            names = (RowName(self._rows, index) for index in range(len(self)))
            out = np.array([_hash_share(call(key, name, row)) < held_out for name, row in zip(names, self, strict=True)], np.bool_)
        return self.select(np.flatnonzero(~out)), self.select(np.flatnonzero(out))


def row_name(dataset: Dataset, index: int) -> RowName:
    """`Dataset.where`, made a text only when it is asked for."""
    return RowName(dataset._rows, index)  # pyright: ignore[reportPrivateUsage]


def concatenate(*datasets: Dataset) -> Dataset:
    """The rows of several datasets, one after the other.

    Raises:
        DatasetError: something that is no `Dataset`.
    """
    for index, dataset in enumerate(datasets):
        if not isinstance(dataset, Dataset):
            raise DatasetError(f"concatenate: argument {index} is {a_kind(dataset)}, not a Dataset")
    return Dataset(Joined([dataset._rows for dataset in datasets]))  # pyright: ignore[reportPrivateUsage]


def mix_rows(datasets: Sequence[Dataset], weights: Sequence[float], seed: int, stop: str) -> Dataset:
    """See `mix`."""
    sizes = [len(dataset) for dataset in datasets]
    if not all(sizes):
        raise DatasetError(f"mix: dataset {sizes.index(0)} has no rows")
    offsets = np.cumsum([0, *sizes])
    taken, chosen = [0] * len(sizes), list[int]()
    ended = set[int]()
    for which in drawn(weights, seed):
        if taken[which] >= sizes[which]:
            ended.add(which)
            if stop == "first" or len(ended) == len(sizes):
                break
        chosen.append(int(offsets[which]) + taken[which] % sizes[which])
        taken[which] += 1
    return concatenate(*datasets).select(chosen)


def _skips(on_error: str) -> bool:
    if on_error not in ("raise", "skip"):
        raise DatasetError(f"on_error is {on_error!r}; it must be 'raise' or 'skip'")
    return on_error == "skip"


def _hash_share(key: Any) -> float:
    digest = hashlib.sha1(str(key).encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class _Only:
    """The one row that a transform gives in a row's place."""

    def __init__(self, transform: Transform) -> None:
        self._transform = transform

    def __call__(self, name: object, row: Any) -> Any:
        return self._transform.look(name, row)[0]
