"""Ranks as mixed-radix numbers over named axes, the last axis fastest."""

import operator
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from twinkle_mesh._errors import InvalidMeshError, RankOutsideMeshError


class AxisLayout(NamedTuple):
    """Named axes and their sizes, outermost first. Pure arithmetic: the same on every rank."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` lies on each axis."""
        rest = check_rank(rank, self.world_size)
        found: list[int] = []
        for size in reversed(self.sizes):
            rest, coordinate = divmod(rest, size)
            found.append(coordinate)
        return dict(zip(self.names, reversed(found), strict=True))

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ along `axes` only, in order of their first rank."""
        return _groups(self.sizes, self._indices(axes))

    def group_of(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The group of `groups(axes)` that holds `rank`, without computing the others."""
        varying = self._indices(axes)
        coordinates = tuple(self.coordinates(rank).values())
        strides = [prod(self.sizes[i + 1 :]) for i in range(len(self.sizes))]
        base = sum(c * stride for i, (c, stride) in enumerate(zip(coordinates, strides, strict=True)) if i not in varying)
        steps = [range(0, self.sizes[i] * strides[i], strides[i]) for i in varying]
        return tuple(base + sum(offsets) for offsets in product(*steps))

    def _indices(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        for axis in axes:
            if axis not in self.names:
                raise InvalidMeshError(f"there is no axis {axis!r} here; the axes are {', '.join(self.names)}")
        if len(set(axes)) != len(axes):
            raise InvalidMeshError(f"an axis is named twice in {axes}")
        return tuple(i for i, name in enumerate(self.names) if name in axes)


def check_rank(rank: int, world_size: int) -> int:
    """`rank` as an int, or RankOutsideMeshError."""
    index = operator.index(rank)
    if not 0 <= index < world_size:
        raise RankOutsideMeshError(f"rank {index} is outside this mesh of {world_size} ranks (0 to {world_size - 1})")
    return index


# Few layouts and few sets of axes are in use in one process; a bound keeps a program that builds many meshes small.
@lru_cache(maxsize=256)
def _groups(sizes: tuple[int, ...], varying: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    fixed = [i for i in range(len(sizes)) if i not in varying]
    ranks = np.arange(prod(sizes)).reshape(sizes).transpose(*fixed, *varying)
    rows: list[list[int]] = ranks.reshape(-1, prod(sizes[i] for i in varying)).tolist()
    return tuple(tuple(row) for row in rows)
