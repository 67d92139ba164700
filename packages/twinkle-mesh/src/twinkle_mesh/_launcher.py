"""What the launcher (torchrun, a Ray worker) put into the environment. Nothing else in Twinkle reads these variables."""

import os

from twinkle_mesh._errors import LauncherError


def _read(variable: str, default: int, minimum: int) -> int:
    text = os.environ.get(variable)
    if text is None or not text.strip():
        return default
    try:
        value = int(text)
    except ValueError:
        raise LauncherError(f"the environment variable {variable} is {text!r}; it must be a whole number") from None
    if value < minimum:
        raise LauncherError(f"the environment variable {variable} is {value}; it must be at least {minimum}")
    return value


def launcher_world_size() -> int:
    """The number of processes that were launched together: WORLD_SIZE, or 1. Raises LauncherError if it is no number."""
    return _read("WORLD_SIZE", default=1, minimum=1)


def launcher_rank() -> int:
    """This process's rank among those launched together: RANK, or 0.

    Raises LauncherError if it is no number or not below WORLD_SIZE.
    """
    rank = _read("RANK", default=0, minimum=0)
    world_size = launcher_world_size()
    # RANK alone (no WORLD_SIZE) is not checked: some launchers set only the rank.
    if "WORLD_SIZE" in os.environ and rank >= world_size:
        raise LauncherError(f"the environment has RANK={rank} but WORLD_SIZE={world_size}; ranks run from 0 to {world_size - 1}")
    return rank


def launcher_local_rank() -> int:
    """This process's rank among those launched on its node: LOCAL_RANK, or 0. Raises LauncherError if it is no number."""
    return _read("LOCAL_RANK", default=0, minimum=0)
