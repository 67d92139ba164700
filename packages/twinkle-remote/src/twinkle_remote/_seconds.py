"""Arguments that are seconds."""

import math
from typing import Any

from twinkle_remote._errors import RemoteTypeError


def check_seconds(name: str, value: Any, *, zero: bool = False) -> None:
    """Raises RemoteTypeError for what is not a finite number above 0. zero: whether 0 is one, too."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        raise RemoteTypeError(f"{name}={value!r}: seconds, a finite number {'of at least' if zero else 'above'} 0")
