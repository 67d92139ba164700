"""Results that stay in the worker that made them, in pieces, and the fetching of just the pieces that somebody needs.

A worker returns a small `Result`; the pieces are objects in Ray's store, owned by that worker.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np

from twinkle_mesh import DeviceMesh
from twinkle_remote._collect import combine, is_structure
from twinkle_remote._dispatch import Part
from twinkle_remote._packing import pack, unpack
from twinkle_remote._protocol import Collect
from twinkle_remote._ray_api import ray
from twinkle_remote._sequences import BatchKind, batch_kind, even_slice, is_array, is_tensor, join
from twinkle_remote._traffic import Timing, traffic

_MAX_PIECES = 256
_INLINE_BYTES = 1024
_INLINE_NODES = 32


@dataclass(frozen=True, slots=True)
class Inline:
    """A piece so small that it travels with the description."""

    value: Any


@dataclass(frozen=True, slots=True)
class Result:
    """What a worker says about what a call returned.

    kind: of batch, None for a value that is not one. cuts: where the pieces begin, and the length at the end. pieces: Inline or references.
    start_s, end_s: when the call ran, seconds since the epoch. timing: see `Timing`.
    """

    kind: BatchKind | None
    cuts: tuple[int, ...]
    pieces: tuple[Any, ...]
    start_s: float
    end_s: float
    timing: Timing | None = None

    @property
    def length(self) -> int:
        return self.cuts[-1]


@dataclass(frozen=True, slots=True)
class Stop:
    """`__next__` came to its end."""

    start_s: float
    end_s: float


def put(packed: bytes) -> Any:
    """Store packed bytes; as an array, since Ray hands arrays over without copying."""
    traffic.stored_bytes += len(packed)
    return ray.put(np.frombuffer(packed, dtype=np.uint8))


def keep(value: Any, share: tuple[int, int, int] | None, part: Part | None, splits: Sequence[int], start_s: float, end_s: float) -> Result:
    """Store a result, cut where the data ranks of the known meshes will want it cut.

    share: (start, stop, total) of the batch that the call was given, if any. part: which part of how many this worker is.
    splits: the numbers of parts that consumers may cut the collected batch into. A wrong guess of the cuts costs traffic, not correctness.
    """
    kind = batch_kind(value)
    if kind == "tuple" and is_structure([value]):
        kind = None
    if _is_light(value):
        return Result(kind, (0, len(value) if kind else 0), (Inline(value),), start_s, end_s)
    if kind is None or not len(value):  # also an empty batch is one piece, which tells its type
        return Result(kind, (0, 0), (put(pack(value)),), start_s, end_s)
    cuts = _cuts(len(value), share, part, splits)
    pieces = tuple(put(pack(value[start:stop])) for start, stop in pairwise(cuts))
    return Result(kind, cuts, pieces, start_s, end_s)


def fetch(
    results: Sequence[Result], collect: Collect, mesh: DeviceMesh, part: Part | None, timeout_s: float | None
) -> tuple[Any, tuple[int, int, int] | None]:
    """The collected value of the contributors' results, or a part of it if it is a batch.

    Returns the value and, where it was cut, (start, stop, total). Fetches only the pieces that the part touches. Raises CollectError, and
    ray's errors for pieces that are lost.
    """
    if part is not None and collect == "none" and len(results) > 1:
        bounds = part.bounds(len(results))
        return _whole(results[bounds], timeout_s), (bounds.start, bounds.stop, len(results))
    kinds = {result.kind for result in results}
    joins = len(results) == 1 or collect in ("flatten", "last_pp")
    if joins and not callable(collect) and len(kinds) == 1 and None not in kinds:
        total = sum(result.length for result in results)
        bounds = slice(0, total) if part is None else part.bounds(total)
        value = _range(results, bounds.start, bounds.stop, timeout_s)
        return value, None if part is None else (bounds.start, bounds.stop, total)
    value = combine(collect, _whole(results, timeout_s), mesh)
    if part is None or batch_kind(value) is None:
        return value, None
    bounds = part.bounds(len(value))
    return value[bounds], (bounds.start, bounds.stop, len(value))


def _cuts(length: int, share: tuple[int, int, int] | None, part: Part | None, splits: Sequence[int]) -> tuple[int, ...]:
    total, offset = length, 0
    given = 0 if share is None else share[1] - share[0]
    if share is not None and given and length % given == 0:  # as many results for each item
        factor = length // given
        total, offset = share[2] * factor, share[0] * factor
    elif part is not None:
        total, offset = length * part.parts, length * part.index
    cuts = {0, length}
    for parts in splits:
        if parts <= total:
            cuts.update(_inner_bounds(total, parts, offset, offset + length))
        if len(cuts) > _MAX_PIECES:
            break
    return tuple(sorted(cuts))


def _inner_bounds(total: int, parts: int, start: int, stop: int) -> list[int]:
    """Where the parts of `total` begin within (start, stop), from `start`."""
    first = max(0, start * parts // total - 1)
    bounds: list[int] = []
    for index in range(first, parts):
        begin = even_slice(total, parts, index).start
        if begin >= stop:
            break
        if begin > start:
            bounds.append(begin - start)
    return bounds


def _range(results: Sequence[Result], start: int, stop: int, timeout_s: float | None) -> Any:
    """Items start..stop of the results put end to end."""
    wanted: list[tuple[Any, int, int]] = []
    offset = 0
    for result in results:
        for begin, end, piece in zip(result.cuts, result.cuts[1:], result.pieces, strict=False):
            low, high = max(start, offset + begin), min(stop, offset + end)
            if low < high:
                wanted.append((piece, low - offset - begin, high - offset - begin))
        offset += result.length
    if not wanted:  # an empty batch of the right type
        return _values([results[0].pieces[0]], timeout_s)[0][:0]
    values = _values([piece for piece, _, _ in wanted], timeout_s)
    parts = [value if (low, high) == (0, len(value)) else value[low:high] for value, (_, low, high) in zip(values, wanted, strict=True)]
    return join(parts)


def _whole(results: Sequence[Result], timeout_s: float | None) -> list[Any]:
    values = iter(_values([piece for result in results for piece in result.pieces], timeout_s))
    whole: list[Any] = []
    for result in results:
        parts = [next(values) for _ in result.pieces]
        whole.append(parts[0] if len(parts) == 1 else join(parts))
    return whole


def _values(pieces: Sequence[Any], timeout_s: float | None) -> list[Any]:
    references = [piece for piece in pieces if not isinstance(piece, Inline)]
    fetched: list[Any] = ray.get(references, timeout=timeout_s) if references else []
    traffic.fetched_bytes += sum(map(len, fetched))
    packed = iter(fetched)
    return [piece.value if isinstance(piece, Inline) else unpack(next(packed)) for piece in pieces]


def _is_light(value: Any) -> bool:
    """Whether a value is certainly small. Looks at a few objects only."""
    left = _INLINE_NODES
    stack: list[Any] = [value]
    size_bytes = 0
    while stack:
        item = stack.pop()
        left -= 1
        if left < 0 or size_bytes > _INLINE_BYTES:
            return False
        if item is None or isinstance(item, (bool, int, float)):
            size_bytes += 8
        elif isinstance(item, (str, bytes)):
            size_bytes += len(item)
        elif is_array(item):
            if item.dtype.hasobject:
                return False
            size_bytes += item.nbytes
        elif is_tensor(item):
            if item.device.type != "cpu" or item.requires_grad or item.layout != sys.modules["torch"].strided:
                return False
            size_bytes += item.untyped_storage().nbytes()  # Ray pickles an inline value itself: of a view, all that lies behind it
        elif type(item) in (list, tuple, dict):
            if len(item) > left:
                return False
            stack.extend(item)
            if isinstance(item, dict):
                stack.extend(cast("dict[Any, Any]", item).values())
        elif is_dataclass(item) and not isinstance(item, type):
            stack.extend(getattr(item, field.name, None) for field in fields(item))
        else:
            return False
    return size_bytes <= _INLINE_BYTES
