"""Results that stay in the worker that made them, in pieces, and the fetching of just the pieces that somebody needs.

A worker returns a small `Result`; the pieces are objects in Ray's store, owned by that worker.
"""

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, cast

from twinkle_mesh import DeviceMesh
from twinkle_remote._collect import combine, is_structure, joins
from twinkle_remote._dispatch import Part
from twinkle_remote._packing import pack, pack_apart, unpack
from twinkle_remote._protocol import Collect
from twinkle_remote._ray_api import ray
from twinkle_remote._sequences import BatchKind, cut, even_slice, is_array, is_tensor, join, result_kind
from twinkle_remote._traffic import Timing, traffic
from twinkle_remote._views import Known, Recipe

_MAX_PIECES = 256
_INLINE_BYTES = 1024
_INLINE_NODES = 32


class Inline(NamedTuple):
    """A piece so small that it travels with the description. data: packed."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """What a worker says about what a call returned.

    kind: of batch, None for a value that is not one. cuts: where the pieces begin, and the length at the end. pieces: Inline or references.
    weight: for `collect='mean'`; None: unknown. start_s, end_s: when the call ran, seconds since the epoch. timing: see `Timing`.
    """

    kind: BatchKind | None
    cuts: tuple[int, ...]
    pieces: tuple[Any, ...]
    start_s: float
    end_s: float
    weight: float | None = None
    timing: Timing | None = None

    @property
    def length(self) -> int:
        return self.cuts[-1]

    def answer(self, timing: Timing | None = None) -> Any:
        """What the worker returns to Ray, which carries bytes faster than objects."""
        data = [piece.data for piece in self.pieces if isinstance(piece, Inline)]
        if len(data) != len(self.pieces):
            return replace(self, timing=timing)
        return pickle.dumps((self.kind, self.cuts, data, self.start_s, self.end_s, self.weight, timing and tuple(timing)), 5)


@dataclass(frozen=True, slots=True)
class Stop:
    """`__next__` came to its end."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Given:
    """What a worker was given of a batch: items start..stop of total. as_tuple: whether in a tuple."""

    start: int
    stop: int
    total: int
    as_tuple: bool = False


def heard(answer: Any) -> Any:
    """The Result, Stop or Failure that a worker returned."""
    if not isinstance(answer, bytes):
        return answer
    kind, cuts, data, start_s, end_s, weight, timing = pickle.loads(answer)
    return Result(kind, cuts, tuple(map(Inline, data)), start_s, end_s, weight, timing and Timing(*timing))


def inline(value: Any) -> Inline:
    """A piece of a light value."""
    return Inline(pickle.dumps(value, 5) if type(value) in (type(None), bool, int, float, str) else pack(value))


_NO_CUTS = (0, 0)
_NONE = (inline(None),)


def keep(
    value: Any,
    given: Given | None,
    part: Part | None,
    splits: Sequence[int],
    start_s: float,
    end_s: float,
    weight: float | None = None,
    compress_above_bytes: int | None = None,
) -> Result:
    """Store a result, cut where the data ranks of the known meshes will want it cut.

    given: of the batch that the call got, if any. part: which part of how many this worker is. splits: the numbers of parts that consumers may cut
    the collected batch into. A wrong guess of the cuts costs traffic, not correctness. weight: that the method gave; else the items given.
    compress_above_bytes: pieces of more are compressed; None: none are.
    """
    if weight is None and given is not None:
        weight = float(given.stop - given.start)
    if value is None:
        return Result(None, _NO_CUTS, _NONE, start_s, end_s, weight)
    kind, length = result_kind(value)
    if kind == "tuple" and is_structure([value]) and not (given is not None and given.as_tuple and given.stop - given.start == length):
        kind, length = None, 0
    if is_light(value):
        return Result(kind, (0, length), (inline(value),), start_s, end_s, weight)
    if not length:  # also an empty batch is one piece, which tells its type
        return Result(kind, (0, 0), (_put(value, compress_above_bytes),), start_s, end_s, weight)
    cuts = _cuts(length, given, part, splits)
    if len(cuts) == 2:
        return Result(kind, cuts, (_put(value, compress_above_bytes),), start_s, end_s, weight)
    pieces = tuple(_put(cut(value, slice(start, stop)), compress_above_bytes) for start, stop in pairwise(cuts))
    return Result(kind, cuts, pieces, start_s, end_s, weight)


class Stored:
    """The collected value of a call's contributors, of which nothing is fetched before it is asked for. Raises CollectError where the results do
    not go together, and ray's errors for pieces that are lost."""

    def __init__(self, results: Sequence[Result], collect: Collect, mesh: DeviceMesh, timeout_s: float | None) -> None:
        self._results = results
        self._collect: Collect = collect
        self._mesh = mesh
        self._timeout_s = timeout_s
        kinds = {result.kind for result in results}
        self._joined = joins(collect, len(results)) and len(kinds) == 1 and None not in kinds
        self._listed = collect == "none" and len(results) > 1

    @property
    def length(self) -> int | None:
        if self._joined:
            return sum(result.length for result in self._results)
        if self._listed:
            return len(self._results)
        kind, length = result_kind(self._combined)
        return None if kind is None else length

    def recipe(self, start: int, stop: int) -> Recipe:
        if self._joined:
            return Fetch(pieces_of(self._results, start, stop))
        if self._listed:
            return FetchAll(tuple(self._results[start:stop]))
        return Known(cut(self._combined, slice(start, stop)))

    def whole(self) -> Recipe:
        columns = self._results[0].kind == "columns" and len(self._results) > 1  # which may differ: their union
        return self.recipe(0, cast("int", self.length)) if self._joined and not columns else Known(self._combined)

    @cached_property
    def _combined(self) -> Any:
        values = fetch_all(self._results, self._timeout_s)
        return combine(self._collect, values, self._mesh, [result.weight for result in self._results])


@dataclass(frozen=True, slots=True)
class PieceRange:
    """Items low..high of a piece; high None: all of it."""

    piece: Any
    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Fetch:
    """The recipe for ranges of pieces, put end to end."""

    ranges: tuple[PieceRange, ...]

    def run(self, timeout_s: float | None) -> Any:
        values = _values([one.piece for one in self.ranges], timeout_s)
        return join([value if one.high is None else cut(value, slice(one.low, one.high)) for value, one in zip(values, self.ranges, strict=True)])


@dataclass(frozen=True, slots=True)
class FetchAll:
    """The recipe for a list of results."""

    results: tuple[Result, ...]

    def run(self, timeout_s: float | None) -> Any:
        return fetch_all(self.results, timeout_s)


def pieces_of(results: Sequence[Result], start: int, stop: int) -> tuple[PieceRange, ...]:
    """The pieces that hold items start..stop of the results put end to end; if these are none, an empty range of a piece that tells the type."""
    wanted: list[PieceRange] = []
    offset = 0
    for result in results:
        if offset >= stop:
            break
        if offset + result.length > start:
            for begin, end, piece in zip(result.cuts, result.cuts[1:], result.pieces, strict=False):
                low, high = max(start, offset + begin), min(stop, offset + end)
                if low < high:
                    all_of_it = high - low == end - begin
                    wanted.append(PieceRange(piece) if all_of_it else PieceRange(piece, low - offset - begin, high - offset - begin))
        offset += result.length
    return tuple(wanted) or (PieceRange(results[0].pieces[0], 0, 0),)


def fetch_all(results: Sequence[Result], timeout_s: float | None) -> list[Any]:
    """The value of each result."""
    values = iter(_values([piece for result in results for piece in result.pieces], timeout_s))
    whole: list[Any] = []
    for result in results:
        parts = [next(values) for _ in result.pieces]
        whole.append(parts[0] if len(parts) == 1 else join(parts))
    return whole


def _cuts(length: int, given: Given | None, part: Part | None, splits: Sequence[int]) -> tuple[int, ...]:
    total, offset = length, 0
    items = 0 if given is None else given.stop - given.start
    if given is not None and items and length % items == 0:  # as many results for each item
        factor = length // items
        total, offset = given.total * factor, given.start * factor
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


def _values(pieces: Sequence[Any], timeout_s: float | None) -> list[Any]:
    references = [piece for piece in pieces if not isinstance(piece, Inline)]
    fetched: list[Any] = ray.get(references, timeout=timeout_s) if references else []
    traffic.fetched_bytes += sum(one.size_bytes for one in fetched)
    packed = iter(fetched)
    return [unpack(piece.data if isinstance(piece, Inline) else next(packed)) for piece in pieces]


def _put(value: Any, compress_above_bytes: int | None) -> Any:
    packed = pack_apart(value)
    if compress_above_bytes is not None and packed.size_bytes > compress_above_bytes:
        packed = packed.compressed()
    traffic.stored_bytes += packed.size_bytes
    return ray.put(packed)


def is_light(value: Any) -> bool:
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
            size_bytes += item.numel() * item.element_size()
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
