"""What a dataset can be made from: files of several formats, Hugging Face datasets, Python objects and functions."""

import csv
import glob
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._errors import DatasetError, MissingExtraError
from ._jsonl import READ_ERRORS, iterate_jsonl, load_jsonl, open_bytes, parse_json, parse_object, read_all
from ._places import Places
from ._rows import Failed, Joined, Listed, row_or_failed
from ._skipped import Skipped, warn_of_skipped
from ._tables import tool_rows
from ._wording import a_kind

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


def rows_of(source: Any, *, lazy: bool, skip_errors: bool) -> Sequence[Any]:
    """The rows of a source as a sequence; see `Dataset`."""
    if isinstance(source, (str, Path)):
        parts = [_file_rows(path, lazy=lazy, skip_errors=skip_errors) for path in matching_files(source)]
        return parts[0] if len(parts) == 1 else Joined(parts)
    source = tool_rows(source)
    check_no_names(source)
    if isinstance(source, Mapping):
        raise DatasetError("a mapping has no rows; give a list of rows")
    if isinstance(source, Sequence) or (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        return source
    if isinstance(source, Iterable):
        return list(source)
    if callable(source):
        return rows_of(source(), lazy=lazy, skip_errors=skip_errors)
    raise DatasetError(f"a dataset is made from a sequence, an iterable, a path or a function, not from {type(source).__name__}")


def check_no_names(source: Any) -> None:
    """Raises DatasetError for a list of file names, which would pass for rows of text."""
    first = source[0] if isinstance(source, (list, tuple)) and source else None
    if isinstance(first, (str, Path)) and str(first).removesuffix(".gz").endswith(SUFFIXES) and Path(first).is_file():
        raise DatasetError(
            f"this is a list of names of files ({str(first)!r}, ...), which would be taken for rows; give a pattern such as 'data/*.jsonl', or "
            "concatenate(*map(Dataset, names))"
        )


def matching_files(source: str | Path) -> list[Path]:
    """The path itself (`~` is the home folder), or the files that a pattern such as 'data/*.jsonl' matches, sorted."""
    source = os.path.expanduser(source)
    if not any(mark in str(source) for mark in "*?[") or Path(source).exists():
        return [Path(source)]
    if not (found := sorted(glob.glob(str(source), recursive=True))):
        raise DatasetError(f"no file matches {str(source)!r}")
    return [Path(path) for path in found]


def suffix_of(path: Path) -> str:
    """The suffix that tells a file's format: '.jsonl' of 'rows.jsonl' and of 'rows.jsonl.gz'."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix not in SUFFIXES:
        raise DatasetError(
            f"{str(path)!r} is not a .jsonl file, nor one of {', '.join(SUFFIXES[1:])} (or one of these with .gz behind it), nor a folder that "
            "datasets.save_to_disk wrote; read other formats yourself and give the rows, or use Dataset.from_hub for a name on the hub"
        )
    return suffix


def _file_rows(path: Path, *, lazy: bool, skip_errors: bool) -> Sequence[Any]:
    if path.is_dir():
        return tool_rows(saved_rows(path))
    suffix = suffix_of(path)
    if not path.is_file():
        raise DatasetError(f"there is no file {str(path)!r}")
    if suffix in (".jsonl", ".ndjson"):
        return load_jsonl(path, lazy=lazy, skip_errors=skip_errors)
    if suffix == ".parquet":
        return tool_rows(_hugging_face(path, lambda datasets: datasets.Dataset.from_parquet(str(path))))
    return _kept(path, _json_rows(path) if suffix == ".json" else _csv_rows(path, "\t" if suffix == ".tsv" else ","), skip_errors)


def _kept(path: Path, rows: Iterator[tuple[int, Any]], skip_errors: bool) -> Listed:
    values, numbers, skipped = list[Any](), list[int](), Skipped()
    for number, row in rows:
        if isinstance(row, DatasetError):
            if not skip_errors:
                raise row
            skipped += Skipped(count=1, reasons=(str(row),))
        else:
            values.append(row)
            numbers.append(number)
    warn_of_skipped(skipped)
    unit = "row" if suffix_of(path) == ".json" else "line"
    return Listed(values, Places(names=(str(path),), numbers=np.array(numbers, np.int64), unit=unit), skipped)


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | DatasetError]]:
    """The objects of a JSON list, or of the one list in a JSON object such as {"data": [...]}."""
    with open_bytes(path) as file:
        text = read_all(file, path)
    try:
        value = parse_json(text, path)
    except DatasetError as error:
        if not _begins_with_objects(text):
            raise
        raise DatasetError(f"{error}; it seems to hold one object a line: such a file is called .jsonl") from error
    if isinstance(value, dict):
        lists = {key: rows for key, rows in value.items() if isinstance(rows, list)}
        if len(lists) != 1:
            raise DatasetError(
                f"{path} holds one JSON object with {len(lists)} lists in it; a .json file holds a list of objects (one a line: .jsonl)"
            )
        value = next(iter(lists.values()))
    if not isinstance(value, list):
        raise DatasetError(f"{path} holds {a_kind(value)}, not a list of objects")
    for number, row in enumerate(value, start=1):
        yield number, row if isinstance(row, dict) else DatasetError(f"{path}, row {number}: {a_kind(row)}, not a JSON object")


def _begins_with_objects(text: bytes) -> bool:
    """Whether the first two lines are JSON objects each."""
    lines = [line for line in text.split(b"\n", 3)[:2] if line.strip()]
    try:
        return len(lines) == 2 and all(isinstance(parse_json(line, ""), dict) for line in lines)
    except DatasetError:
        return False


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, Any] | DatasetError]]:
    """Rows with the first line's names; the number is the line that a row begins on, since quoted texts may hold line breaks."""
    with open_bytes(path) as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
        # A cell may be larger than the module's default of 128 KiB; the limit is the process's own, and is put back.
        limit = csv.field_size_limit(1 << 31)
        begins = 1
        try:
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            header = next(reader, None)
            if header is None:
                raise DatasetError(f"{path} is empty; a CSV file begins with a line of column names")
            if len(set(header)) != len(header):
                raise DatasetError(f"{path}, line 1: a column name stands there twice: {', '.join(header)}")
            begins = reader.line_num + 1
            for cells in reader:
                if len(cells) == len(header):
                    yield begins, dict(zip(header, cells, strict=True))
                elif cells:
                    yield begins, DatasetError(f"{path}, line {begins}: {len(cells)} cells, the first line names {len(header)} columns")
                begins = reader.line_num + 1
        except UnicodeDecodeError as error:
            raise DatasetError(f"{path}: not UTF-8 ({error})") from error
        except READ_ERRORS as error:
            raise DatasetError(f"cannot read {str(path)!r}: {error}") from error
        except csv.Error as error:
            raise DatasetError(f"{path}, line {begins}: not valid CSV ({error})") from error
        finally:
            csv.field_size_limit(limit)


def _hugging_face(what: object, load: Callable[[Any], Any]) -> Any:
    try:
        import datasets
        from datasets.exceptions import DatasetGenerationError
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise MissingExtraError(f"reading {what} needs the datasets library: pip install 'twinkle-data[hf]'") from error
    try:
        return load(datasets)
    except (OSError, ValueError, DatasetGenerationError) as error:
        cause = "" if error.__cause__ is None else f" ({error.__cause__})"  # a DatasetGenerationError does not say why
        raise DatasetError(f"cannot read {what}: {error}{cause}") from error


def saved_rows(path: Path) -> Any:
    """A dataset in a folder that `datasets.save_to_disk` wrote."""
    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise DatasetError(
            f"the folder {str(path)!r} is none that datasets.save_to_disk wrote; for its files give a pattern, e.g. {str(path / '*.jsonl')!r}"
        )
    return _one_split(path, _hugging_face(path, lambda datasets: datasets.load_from_disk(str(path))))


def hub_rows(name: str, split: str | None, config: str | None, revision: str | None, *, streaming: bool) -> Any:
    """A dataset of the Hugging Face hub, or of a local folder of data files."""
    loaded = _hugging_face(name, lambda datasets: datasets.load_dataset(name, config, split=split, revision=revision, streaming=streaming))
    return _one_split(name, loaded)


def _one_split(what: object, loaded: Any) -> Any:
    if not isinstance(loaded, Mapping):
        return loaded
    if len(loaded) == 1:
        return next(iter(loaded.values()))
    raise DatasetError(f"{what} has the splits {', '.join(map(repr, loaded))}: choose one (its folder, or split=...)")


def iterate_files(source: str | Path, first: int) -> Iterator[tuple[str, Any]]:
    """Name and row of the rows of files, from row `first` on; of JSON lines no more than one row is held, and rows before are not parsed.

    In the place of a row that cannot be parsed stands `Failed`.
    """
    index = 0
    for path in matching_files(source):
        if path.is_dir() or suffix_of(path) not in (".jsonl", ".ndjson"):
            rows = _file_rows(path, lazy=True, skip_errors=False)
            for at in range(max(0, first - index), len(rows)):
                yield f"row {index + at}", row_or_failed(rows, at)
            index += len(rows)
            continue
        for number, line in iterate_jsonl(path):
            if index >= first:
                where = f"{path}, line {number}"
                yield f"row {index} ({where})", _parsed(line, where)
            index += 1


def _parsed(line: bytes, where: str) -> Any:
    try:
        return parse_object(line, where)
    except DatasetError as error:
        return Failed(error)
