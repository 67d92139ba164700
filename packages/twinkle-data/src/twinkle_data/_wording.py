"""Words of messages."""

from typing import Any


def a_kind(value: Any) -> str:
    """'a list', 'an int': what a value is."""
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiouAEIO' else 'a'} {name}"


def in_rows(count: int) -> str:
    """'1 row', '2 rows'."""
    return f"{count} row" if count == 1 else f"{count} rows"
