"""Where rows come from: which line of which file, for error messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Places:
    """For each row the file that it was read from and the number of its line (or of its row, in files without lines), from 1."""

    names: tuple[str, ...]
    numbers: NDArray[np.int64]
    files: NDArray[np.int32] | None = None
    unit: str = "line"

    def tell(self, index: int) -> str:
        """'data.jsonl, line 7'."""
        name = self.names[0 if self.files is None else int(self.files[index])]
        return f"{name}, {self.unit} {int(self.numbers[index])}"

    def take(self, indices: Any) -> "Places":
        """The places of chosen rows."""
        files = None if self.files is None else self.files[indices]
        return Places(names=self.names, numbers=self.numbers[indices], files=files, unit=self.unit)


def places_of(rows: Any) -> Places | None:
    """Where rows come from; None where nobody knows."""
    return getattr(rows, "places", None)


def joined_places(parts: Sequence[Any]) -> Places | None:
    """The places of several row sequences in a row; None when one of them has none, or when they count differently."""
    all_places = [places_of(part) for part in parts]
    known = [places for places in all_places if places is not None]
    if len(known) != len(all_places) or not known or len({places.unit for places in known}) > 1:
        return None
    offsets = np.cumsum([0, *(len(places.names) for places in known)])
    files = [
        (np.zeros(len(places.numbers), np.int32) if places.files is None else places.files) + np.int32(offset)
        for places, offset in zip(known, offsets, strict=False)
    ]
    return Places(
        names=tuple(name for places in known for name in places.names),
        numbers=np.concatenate([places.numbers for places in known]),
        files=np.concatenate(files).astype(np.int32),
        unit=known[0].unit,
    )
