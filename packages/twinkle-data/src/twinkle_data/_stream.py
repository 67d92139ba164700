"""Rows one after the other, from sources that are too large to hold or have no end."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, overload

from ._checks import check_whole
from ._dataset import Dataset, mix_rows
from ._errors import DatasetError
from ._rows import Failed
from ._skipped import Skipped, warn_of_skipped
from ._sources import check_no_names, hub_rows
from ._streams import Each, FileSource, Limited, Mixed, ObjectSource, Shuffled, Stage, inner_state
from ._tables import check_no_splits
from ._template import Template
from ._transforms import ConvertRows, EncodeRows, FilterRows, MapRows, OnError, Transform


class IterableDataset(Iterable[Any]):
    """Rows in order, without a length; each iteration begins anew. Of a JSON lines file one row is held at a time.

    `iterate(state)` goes on where an earlier iteration stood: rows before are passed over without being parsed or transformed.

    Args:
        source: a path or a pattern (as for `Dataset`), an iterable, a sequence, a `Dataset`, or a function that returns one of the
            latter. An iterator (a generator that runs already) can be read only once: give the function that makes it.
    """

    def __init__(self, source: "Iterable[Any] | str | Path | Callable[[], Iterable[Any]]") -> None:
        check_no_splits(source)
        if isinstance(source, Mapping) or not (isinstance(source, (str, Path, Iterable)) or callable(source)):
            raise DatasetError(f"a stream is made from a path, an iterable or a function, not from {type(source).__name__}")
        check_no_names(source)
        self._stage: Stage = FileSource(source) if isinstance(source, (str, Path)) else ObjectSource(source)

    @classmethod
    def from_hub(cls, name: str, *, split: str, config: str | None = None, revision: str | None = None) -> "IterableDataset":
        """A dataset of the Hugging Face hub, streamed (`datasets.load_dataset(..., streaming=True)`). Errors as `Dataset.from_hub`."""
        return cls(hub_rows(name, split, config, revision, streaming=True))

    def __repr__(self) -> str:
        return f"<IterableDataset: {self._stage.settings}>"

    def __iter__(self) -> Iterator[Any]:
        """The rows from the first on."""
        return (row for row, _ in self.iterate())

    def iterate(self, state: Any = None) -> Iterator[tuple[Any, Any]]:
        """Each row with a state, plain JSON: `iterate(state)` of the same stream gives what comes behind the row.

        Raises:
            LoaderStateError: a state of a stream that was made otherwise (other steps, seeds, sizes or weights), or a damaged one.
        """
        settings = self._stage.settings
        return self._rows(inner_state(state, settings), settings)

    def _rows(self, state: Any, settings: str) -> Iterator[tuple[Any, Any]]:
        for _, row, after in self._stage.open(state):
            if isinstance(row, Failed):
                raise row.error
            yield row, {"stream": settings, "at": after}
        warn_of_skipped(self.skipped)

    def map(self, fn: Callable[[Any], Any], *, on_error: OnError = "raise") -> "IterableDataset":
        """`fn(row)` of each; failures as in `Dataset.map`."""
        return self._each(MapRows(fn), "map", on_error)

    def filter(self, fn: Callable[[Any], bool], *, on_error: OnError = "raise") -> "IterableDataset":
        """The rows for which `fn(row)` is true."""
        return self._each(FilterRows(fn), "filter", on_error)

    def conversations(self, schema: str | None = None, *, roles: Mapping[str, str] | None = None, on_error: OnError = "raise") -> "IterableDataset":
        """As `Dataset.conversations`."""
        return self._each(ConvertRows(schema, roles), "conversations", on_error)

    def encode(
        self,
        template: Template,
        add_generation_prompt: bool = False,
        *,
        schema: str | None = None,
        roles: Mapping[str, str] | None = None,
        on_error: OnError = "raise",
    ) -> "IterableDataset":
        """As `Dataset.encode`."""
        return self._each(EncodeRows(template, add_generation_prompt, schema, roles), "encode", on_error)

    def take(self, count: int) -> "IterableDataset":
        """The first rows."""
        check_whole("take: count", count, 0)
        return _stream(Limited(self._stage, 0, count))

    def skip(self, count: int) -> "IterableDataset":
        """The rows behind the first `count`."""
        check_whole("skip: count", count, 0)
        return _stream(Limited(self._stage, count, None))

    def shuffle(self, block: int = 10_000, seed: int = 0) -> "IterableDataset":
        """Blocks of so many rows, each in an order of its own; a block is held in memory."""
        check_whole("shuffle: block", block, 1)
        check_whole("seed", seed, 0)
        return _stream(Shuffled(self._stage, block, seed))

    @property
    def skipped(self) -> Skipped:
        """What all steps have left out so far, in the latest pass; a pass that reaches the end tells it in a warning."""
        return self._stage.skipped

    def _each(self, transform: Transform, what: str, on_error: str) -> "IterableDataset":
        if on_error not in ("raise", "skip"):
            raise DatasetError(f"on_error is {on_error!r}; it must be 'raise' or 'skip'")
        return _stream(Each(self._stage, transform.look, what, on_error == "skip"))


def _stream(stage: Stage) -> IterableDataset:
    made = IterableDataset(())
    made._stage = stage  # pyright: ignore[reportPrivateUsage]
    return made


@overload  # a call without any dataset, in which the two overlap, is refused
def mix(  # pyright: ignore[reportOverlappingOverload]
    *datasets: Dataset, weights: Iterable[float] | None = ..., seed: int = ..., stop: str = ...
) -> Dataset: ...
@overload
def mix(*datasets: Dataset | IterableDataset, weights: Iterable[float] | None = ..., seed: int = ..., stop: str = ...) -> IterableDataset: ...
def mix(
    *datasets: "Dataset | IterableDataset", weights: Iterable[float] | None = None, seed: int = 0, stop: str = "first"
) -> "Dataset | IterableDataset":
    """Rows of several datasets, each next one of a dataset that is drawn by weight. The order depends on weights and seed alone.

    Args:
        datasets: all `Dataset`s (then the mixture is one), or streams among them (then it is a stream).
        weights: above zero, in any scale; None: equal ones.
        seed: of the draws.
        stop: 'first': end when a dataset that is drawn has no more rows. 'all': begin it anew, until each has been found at its end.

    Raises:
        DatasetError: no datasets, as many weights as datasets are needed, a weight that is not above zero, an empty dataset.
    """
    try:
        shares = [1.0] * len(datasets) if weights is None else [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise DatasetError(f"mix: weights is {weights!r:.200}; it must be a list of numbers") from None
    if not datasets or len(shares) != len(datasets) or not all(0 < share < float("inf") for share in shares):
        one_by_one = "; datasets are given one by one: mix(a, b)" if any(isinstance(one, (list, tuple)) for one in datasets) else ""
        raise DatasetError(f"mix: {len(datasets)} datasets with the weights {shares}; there must be one weight above zero for each{one_by_one}")
    if stop not in ("first", "all"):
        raise DatasetError(f"mix: stop is {stop!r}; it must be 'first' or 'all'")
    check_whole("seed", seed, 0)
    rows = [dataset for dataset in datasets if isinstance(dataset, Dataset)]
    if len(rows) == len(datasets):
        return mix_rows(rows, shares, seed, stop)
    stages = [dataset._stage if isinstance(dataset, IterableDataset) else ObjectSource(dataset) for dataset in datasets]  # pyright: ignore[reportPrivateUsage]
    return _stream(Mixed(stages, shares, seed, stop))
