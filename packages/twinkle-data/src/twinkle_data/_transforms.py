"""What a dataset does to its rows, one by one or in chunks: functions of the user, and encoding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ._cache import cached_rows, keep_rows
from ._errors import DataError, DatasetError, SequenceTooLongError
from ._fingerprint import fingerprint, rows_fingerprint
from ._messages import PreferencePair, Trajectory
from ._module_sources import module_digest
from ._places import Places, places_of
from ._pool import Progress, run_chunks
from ._rows import Listed, RowName
from ._schemas import check_roles, check_schema, detect_schema, to_conversation
from ._skipped import LeftOut, Skipped, left_out, warn_of_skipped
from ._template import Template, check_template

OnError = Literal["raise", "skip"]
# Changes whenever what a cached row looks like does.
_CACHE_FORMAT = "twinkle_data-1"


class Transform(Protocol):
    """What happens to rows. It is sent to worker processes as it is."""

    def look(self, name: object, row: Any) -> Sequence[Any]:
        """What stands in a row's place: nothing, one row or several. DataErrors name the row."""
        ...

    def look_at_all(self, names: Sequence[object], rows: Sequence[Any]) -> "Sequence[Sequence[Any] | DataError]":
        """The same for several rows, with errors as values."""
        ...

    def key(self) -> list[Any]:
        """What it depends on, as digests and plain values."""
        ...


class _OneByOne:
    def look(self, name: object, row: Any) -> Sequence[Any]:
        raise NotImplementedError

    def look_at_all(self, names: Sequence[object], rows: Sequence[Any]) -> "Sequence[Sequence[Any] | DataError]":
        results: list[Sequence[Any] | DataError] = []
        for name, row in zip(names, rows, strict=True):
            try:
                results.append(self.look(name, row))
            except DataError as error:
                results.append(error)
        return results


@dataclass(frozen=True)
class MapRows(_OneByOne):
    """fn(row) in a row's place."""

    fn: Callable[[Any], Any]

    def look(self, name: object, row: Any) -> Sequence[Any]:
        return (call(self.fn, name, row),)

    def key(self) -> list[Any]:
        return ["map", fingerprint(self.fn)]


@dataclass(frozen=True)
class FilterRows(_OneByOne):
    """The row where fn(row) is true."""

    fn: Callable[[Any], Any]

    def look(self, name: object, row: Any) -> Sequence[Any]:
        return (row,) if call(self.fn, name, row) else ()

    def key(self) -> list[Any]:
        return ["filter", fingerprint(self.fn)]


@dataclass(frozen=True)
class ConvertRows(_OneByOne):
    """The row as a `Trajectory` or a `PreferencePair`."""

    schema: str | None
    roles: Mapping[str, str] | None

    def __post_init__(self) -> None:
        check_schema(self.schema)
        check_roles(self.roles)

    def look(self, name: object, row: Any) -> Sequence[Any]:
        try:
            return (to_conversation(row, self.schema, self.roles),)
        except DataError as error:
            raise DatasetError(f"{name}: {error}") from error

    def key(self) -> list[Any]:
        return ["conversations", module_digest(__name__), self.schema, dict(self.roles or {})]


@dataclass(frozen=True)
class EncodeRows:
    """The features of a row: a conversation, a preference pair (a tuple of two), or a plain text."""

    template: Template
    add_generation_prompt: bool
    schema: str | None
    roles: Mapping[str, str] | None

    def __post_init__(self) -> None:
        check_schema(self.schema)
        check_roles(self.roles)
        check_template(self.template)

    def look(self, name: object, row: Any) -> Sequence[Any]:
        result = self.look_at_all([name], [row])[0]
        if isinstance(result, DataError):
            raise result
        return result

    def look_at_all(self, names: Sequence[object], rows: Sequence[Any]) -> "Sequence[Sequence[Any] | DataError]":
        results: dict[int, Sequence[Any] | DataError] = {}
        conversations: dict[int, Trajectory] = {}
        for index, row in enumerate(rows):
            try:
                if (self.schema or detect_schema(row)) == "text":
                    results[index] = self._text(row)
                    continue
                found = to_conversation(row, self.schema, self.roles)
                if isinstance(found, PreferencePair):
                    results[index] = self._pair(found)
                else:
                    conversations[index] = found
            except DataError as error:
                results[index] = error
        results.update(zip(conversations, self.template.encode_each(list(conversations.values()), self.add_generation_prompt), strict=True))
        return [self._named(names[index], results[index]) for index in range(len(rows))]

    def _named(self, name: object, result: "Sequence[Any] | DataError") -> "Sequence[Any] | DataError":
        if not isinstance(result, DataError):
            return result or LeftOut(f"{name}: more than {self.template.max_length} tokens")
        named = DatasetError(f"{name}: {result}")
        named.__cause__ = result
        return named

    def _pair(self, pair: PreferencePair) -> Sequence[Any]:
        try:
            return (self.template.encode_pair(pair),)
        except SequenceTooLongError:
            if self.template.truncation != "drop":
                raise
            return ()

    def _text(self, row: Any) -> Sequence[Any]:
        if isinstance(row, str):
            return self.template.encode_text(row)
        return self.template.encode_text(row["text"], user_data={str(key): value for key, value in row.items() if key != "text"})

    def key(self) -> list[Any]:
        # This package's own work on the rows, and the libraries that a template calls.
        versions = [module_digest(name) for name in (__name__, "transformers", "tokenizers", "jinja2")]
        return ["encode", versions, fingerprint(self.template), self.add_generation_prompt, self.schema, dict(self.roles or {})]


def call(fn: Callable[[Any], Any], name: object, row: Any) -> Any:
    """fn(row); whatever it raises is a DatasetError that names the row, the function and the row's fields."""
    try:
        return fn(row)
    except Exception as error:  # the user's function: whatever it raises is told with the row it failed on
        what = getattr(fn, "__qualname__", type(fn).__name__)
        reason = f"no field {error}" if isinstance(error, KeyError) and isinstance(row, Mapping) else f"{type(error).__name__}: {error}"
        has = f" (the row has {', '.join(map(repr, row)) or 'no fields'})" if isinstance(row, Mapping) else ""
        failed = str(error) if isinstance(error, DataError) else f"{what} failed: {reason}"
        raise DatasetError(f"{name}: {failed}{has}") from error


@dataclass(frozen=True)
class Chunk:
    """What came of a chunk of rows: values, for each the index of its row in the whole, and what was left out."""

    values: list[Any] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)


@dataclass(frozen=True)
class _Job:
    transform: Transform
    skip_errors: bool

    def __call__(self, rows: Sequence[Any], first: int) -> Chunk:
        values, indices, skipped = list[Any](), list[int](), Skipped()
        names, given = list[object](), list[Any]()
        places = list[int]()
        for index in range(len(rows)):
            try:
                given.append(rows[index])
            except DataError as error:
                if not self.skip_errors:
                    raise
                skipped += Skipped(count=1, reasons=(str(error),))
                continue
            names.append(RowName(rows, index, first))
            places.append(first + index)
        for index, result in zip(places, self.transform.look_at_all(names, given), strict=True):
            if isinstance(result, DataError):
                if not self.skip_errors:
                    raise result
                skipped += Skipped(count=1, reasons=(str(result),))
                continue
            skipped += left_out(result)
            values += result
            indices += [index] * len(result)
        return Chunk(values, indices, skipped)


def transformed(
    rows: Sequence[Any],
    transform: Transform,
    *,
    what: str,
    num_proc: int,
    skip_errors: bool,
    progress: Progress,
    cache_dir: str | Path | None,
    timeout_s: float,
) -> Sequence[Any]:
    """All rows transformed now: in memory, or, with a cache folder, read from it when they are asked for."""
    job = _Job(transform, skip_errors)
    chunks = run_chunks(rows, job, what=what, num_proc=num_proc, progress=progress, timeout_s=timeout_s)
    if cache_dir is None:
        made = Chunk()
        total = Skipped()
        for chunk in chunks:
            made.values.extend(chunk.values)
            made.indices.extend(chunk.indices)
            total += chunk.skipped
        kept: Any = Listed(made.values, _places(rows, made.indices), total)
    else:
        digest = fingerprint([_CACHE_FORMAT, transform.key(), skip_errors, rows_fingerprint(rows)])
        kept = cached_rows(Path(cache_dir), digest) or keep_rows(Path(cache_dir), digest, chunks)
        kept.places = _places(rows, kept.indices)
    warn_of_skipped(kept.skipped)
    return kept


def _places(rows: Any, indices: Any) -> Places | None:
    places = places_of(rows)
    return None if places is None else places.take(np.asarray(indices, np.int64))
