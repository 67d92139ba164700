"""Ranks as mixed-radix numbers over named axes, the last axis fastest."""

import operator
from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple

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
        return _groups(self.sizes, self.indices(axes))

    def group_of(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The group of `groups(axes)` that holds `rank`, without computing the others."""
        index = check_rank(rank, self.world_size)
        steps, offsets = _pattern(self, axes)
        first = index - sum([index // stride % size * stride for size, stride in steps])
        return tuple([first + offset for offset in offsets])

    def indices(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Where the axes are in `names`, in that order; InvalidMeshError for an axis that is absent or named twice."""
        for axis in axes:
            if axis not in self.names:
                of_experts = axis in ("ep", "etp", "expert_dp", "ep_fsdp")
                other = f"; {axis!r} is an axis of the experts: expert_rank_groups({axis!r})" if of_experts else ""
                raise InvalidMeshError(f"there is no axis {axis!r} here; the axes are {', '.join(self.names)}{other}")
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
@lru_cache(maxsize=64)
def _groups(sizes: tuple[int, ...], varying: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    strides = _strides(sizes)
    firsts = _offsets(sizes, strides, [i for i in range(len(sizes)) if i not in varying])
    offsets = _offsets(sizes, strides, varying)
    if len(offsets) > len(firsts):
        return tuple([tuple([first + offset for offset in offsets]) for first in firsts])
    # Many small groups: zip makes their tuples several times as fast as a loop would.
    return tuple(zip(*[[first + offset for first in firsts] for offset in offsets], strict=True))


@lru_cache(maxsize=64)
def _pattern(layout: AxisLayout, axes: tuple[str, ...]) -> tuple[list[tuple[int, int]], list[int]]:
    """(size, stride) of each of the axes, and how far the members of a group are from its first."""
    varying = layout.indices(axes)
    strides = _strides(layout.sizes)
    return [(layout.sizes[i], strides[i]) for i in varying], _offsets(layout.sizes, strides, varying)


def _strides(sizes: tuple[int, ...]) -> list[int]:
    """How far apart two ranks are that are neighbours on each axis."""
    return [prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _offsets(sizes: tuple[int, ...], strides: list[int], axes: Iterable[int]) -> list[int]:
    """The ranks whose coordinates are 0 but on `axes`, in ascending order."""
    offsets = [0]
    for i in axes:
        if sizes[i] > 1:
            steps = range(0, sizes[i] * strides[i], strides[i])
            offsets = [offset + step for offset in offsets for step in steps]
    return offsets


def clear_caches() -> None:
    """Forget all groups that were computed, as in a new process (for measurements)."""
    _groups.cache_clear()
    _pattern.cache_clear()
