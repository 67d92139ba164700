"""Checks of numbers and of saved states, which all say in the same words what is wrong."""

import math
import numbers
from collections.abc import Iterable
from typing import Any

from ._errors import DatasetError, LoaderStateError
from ._wording import a_kind


def is_whole(value: Any) -> bool:
    """Whether it is one whole number, of Python's or numpy's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Whether it is a whole number from 0 on."""
    return is_whole(value) and int(value) >= 0


def is_number(value: Any) -> bool:
    """Whether it is one finite number, of Python's or numpy's."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuses a number that is not whole, or too small.

    Raises:
        DatasetError: names it.
    """
    if not is_count(value) or value < least:
        raise DatasetError(f"{name} is {value!r}; it must be a whole number, at least {least}")


def check_epochs(num_epochs: Any) -> None:
    """Refuses a number of epochs that is no number.

    Raises:
        DatasetError: it is neither a whole number from 1 on nor None.
    """
    if num_epochs is not None and (not is_count(num_epochs) or num_epochs < 1):
        raise DatasetError(f"num_epochs is {num_epochs!r}; it must be a whole number, at least 1, or None for no end")


def check_state(state: Any, position: Iterable[str], settings: dict[str, Any]) -> None:
    """Refuses a saved state that lacks a field of the position, or belongs to other settings.

    Raises:
        LoaderStateError: names what is missing or what differs.
    """
    if not isinstance(state, dict):
        raise LoaderStateError(f"the saved state of the data loader is {a_kind(state)}, not what state_dict() gave")
    if missing := [name for name in (*position, *settings) if name not in state]:
        raise LoaderStateError(f"the saved state of the data loader lacks {missing}")
    if changed := {name: (state[name], value) for name, value in settings.items() if state[name] != value}:
        told = ", ".join(f"{name} was {old!r}, is {new!r}" for name, (old, new) in changed.items())
        raise LoaderStateError(f"the saved state of the data loader belongs to other settings: {told}; build it as it was, or start anew")


def check_counts(state: dict[str, Any], names: Iterable[str]) -> None:
    """Refuses a saved state in which one of these is no whole number from 0 on.

    Raises:
        LoaderStateError: names it.
    """
    for name in names:
        if not is_count(state[name]):
            raise LoaderStateError(f"the saved state of the data loader is damaged: {name} is {state[name]!r:.200}, not a whole number from 0 on")
