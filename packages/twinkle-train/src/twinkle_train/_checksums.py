"""Checksums of a checkpoint's files: torch's reader takes changed bytes for weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash


def checksums_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The XXH3-128 of files of a folder, by name, as hexadecimal digits.

    Raises OSError where one cannot be read.
    """
    sums: dict[str, str] = {}
    for name in names:
        with (folder / name).open("rb") as file:
            sums[name] = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    return sums


def changed_file(folder: Path, sums: Mapping[str, str]) -> str | None:
    """What is wrong with the first file that is missing, cannot be read or is not as it was written; None where all are right."""
    for name, wanted in sums.items():
        try:
            found = checksums_of(folder, [name])[name]
        except OSError as error:
            return f"{folder / name}: {error.strerror}: the checkpoint has lost a part. Resume from another one"
        if found != wanted:
            return f"{folder / name} is not what was written (its XXH3 is {found}, not {wanted}): its bytes have changed. Resume from another one"
    return None
