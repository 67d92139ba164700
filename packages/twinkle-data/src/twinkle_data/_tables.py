"""Rows of Arrow tables (Parquet files, Hugging Face datasets), whose columns of structs have one set of keys for all rows.

There an argument that one call has is null in all others, and a keyword of one tool's schema in all other tools'. These nulls are left out, or a
model would be taught to write them. A null that was meant cannot be told from them; keep arguments as JSON texts where that matters.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ._errors import DatasetError
from ._wording import a_kind

_TOOLS = ("tools", "functions")
_CALLS = ("tool_calls", "function_call")


def tool_rows(source: Any) -> Any:
    """The source itself, or, of the datasets library's, its rows without null keys in tools and tool calls.

    Raises:
        DatasetError: a table of another library, whose brackets take columns; several splits.
    """
    check_no_splits(source)
    home = type(source).__module__.partition(".")[0]
    for library, call in (("pandas", "to_dict('records')"), ("pyarrow", "to_pylist()"), ("polars", "to_dicts()")):
        if home == library and hasattr(source, call.partition("(")[0]):
            raise DatasetError(f"{a_kind(source)} is no sequence of rows; give its .{call}")
    if home != "datasets":
        return source
    return _Indexed(source) if hasattr(source, "__getitem__") and hasattr(source, "__len__") else _Streamed(source)


def check_no_splits(source: Any) -> None:
    """Raises DatasetError for the datasets library's mapping of splits."""
    if isinstance(source, Mapping) and type(source).__module__.partition(".")[0] == "datasets":
        raise DatasetError(
            f"this is {a_kind(source)} of the splits {', '.join(map(repr, source))}: give one of them, e.g. splits[{next(iter(source), '')!r}]"
        )


class _Indexed(Sequence[Any]):
    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return _cleaned(self._rows[index])


class _Streamed(Iterable[Any]):
    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return map(_cleaned, self._rows)


def _cleaned(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    return {key: _without_nulls(value) if key in _TOOLS else _turns(value) for key, value in row.items()}


def _turns(value: Any) -> Any:
    """A list of turns with their calls cleaned; anything else as it is."""
    if not isinstance(value, list) or not any(isinstance(turn, dict) and any(turn.get(name) for name in _CALLS) for turn in value):
        return value
    return [
        {key: _without_nulls(item) if key in _CALLS else item for key, item in turn.items()} if isinstance(turn, dict) else turn for turn in value
    ]


def _without_nulls(value: Any) -> Any:
    """Without the keys whose value is null, at any depth. Nulls that are entries of lists stay."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
