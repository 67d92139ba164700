"""Sending a call to the workers of a component: one message for each that gets its own arguments."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, cast

from twinkle_remote._dispatch import Part, Share, Template, whole_share
from twinkle_remote._lazy import LazyResult, Source, ViewSource
from twinkle_remote._packing import Packed
from twinkle_remote._protocol import MethodSpec
from twinkle_remote._ray_api import ray
from twinkle_remote._ray_calls import CallSource, PendingCall
from twinkle_remote._ray_messages import Header, Here, Leaf, Node, Slot, Tree
from twinkle_remote._ray_routing import route
from twinkle_remote._ray_wire import STORE_BYTES, Writer, packed_header, write

# Up to so many answers of producers are sent to so many consumers each; more go through a task of their own, which takes a few milliseconds.
_DIRECT_ANSWERS = 256


@dataclass(frozen=True, slots=True)
class _Written:
    """One share's message, what belongs to it (arguments that are sent apart, and what the LazyResults among them need), and their calls."""

    message: Any
    apart: tuple[Any, ...]
    results: Sequence[Any]
    calls: Collection[int]


class Sender:
    """The objects that each worker is sent for one call; it can be sent again. shares: by rank. far_ranks: those on other nodes than this process,
    to which more than `compress_above_bytes` are compressed (None: never). iterators: which iterator of each rank is meant.

    upstream: the calls whose results are among the arguments. Raises the errors of those that have failed, and what pickling raises.
    """

    def __init__(
        self,
        spec: MethodSpec,
        timeout_s: float,
        splits: tuple[int, ...],
        compress_above_bytes: int | None,
        far_ranks: Collection[int],
        shares: Sequence[Share],
        iterators: Sequence[int] = (),
    ) -> None:
        self._header = Header(
            method=spec.name,
            splits=splits,
            allow_empty=spec.allow_empty,
            timeout_s=timeout_s,
            opens_iterator=spec.opens_iterator,
            compress_above_bytes=compress_above_bytes,
        )
        self._plain = packed_header(self._header)
        self._compress_above_bytes = compress_above_bytes
        self._far_ranks = far_ranks if compress_above_bytes is not None else ()
        self._shares = shares
        self._iterators = iterators
        self._uses = Counter(map(id, shares))
        self._writers: dict[int, tuple[Writer, Any]] = {}
        self._wired: dict[tuple[tuple[int, bool], ...], tuple[bytes, list[Any], bool, frozenset[int]]] = {}
        self._calls: dict[int, PendingCall] = {}
        self._written: dict[tuple[int, bool], _Written] = {}
        for rank, share in enumerate(shares):
            if (key := (id(share), rank in self._far_ranks)) not in self._written:
                self._written[key] = self._write(share, key[1])
        # A rank that does not take a LazyResult that its peers take is told of its failure all the same, or it would wait for them in a collective.
        all_take_all = all(len(one.calls) == len(self._calls) for one in self._written.values())
        self._taken = {} if all_take_all else dict.fromkeys(result for one in self._written.values() for result in one.results)

    @property
    def upstream(self) -> list[PendingCall]:
        return list(self._calls.values())

    def objects(self, rank: int, extra: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        """The arguments of the actor's method. extra: objects that come right behind the message."""
        share = self._shares[rank]
        written = self._written[id(share), rank in self._far_ranks]
        if self._iterators:
            header = packed_header(replace(self._header, iterator=self._iterators[rank]))
            return (write(header, None, Writer(share.template).arguments, None), *extra)
        if not self._taken:
            return (written.message, *extra, *written.apart, *written.results)
        others = [result for result in self._taken if result not in written.results]
        return (written.message, *extra, *written.apart, *written.results, *others)

    def _write(self, share: Share, far: bool) -> _Written:
        writer, apart = self._writer(share.template, far)
        columns = writer.columns(share)
        header, results, calls = self._wire(writer, share.part) if writer.lazies else (self._plain, (), ())
        message: Any = write(header, share.part, writer.arguments if apart is None else None, columns)
        if isinstance(message, Packed):
            message = self._ready(message, far)
            if self._uses[id(share)] > 1:
                message = ray.put(message)  # once for all of them; Ray stores the argument of a single one by itself
        return _Written(message, () if apart is None else (apart,), results, calls)

    def _writer(self, template: Template, far: bool) -> tuple[Writer, Any]:
        if id(template) not in self._writers:
            writer = Writer(template)
            large = writer.arguments.size_bytes > STORE_BYTES
            self._writers[id(template)] = writer, {} if large else None
        writer, stored = self._writers[id(template)]
        if stored is None:
            return writer, None
        if far not in stored:
            stored[far] = ray.put(self._ready(writer.arguments, far))
        return writer, stored[far]

    def _ready(self, packed: Packed, far: bool) -> Packed:
        above = self._compress_above_bytes
        return packed.compressed() if far and above is not None and packed.size_bytes > above else packed

    def _wire(self, writer: Writer, part: Part | None) -> tuple[bytes, Sequence[Any], Collection[int]]:
        """The header for the share that was written last, with its LazyResults, the objects that they need, and their calls."""
        key = tuple((id(lazy), sliced) for lazy, sliced in writer.lazies)
        if key not in self._wired:
            results: list[Any] = []
            slots = tuple(Slot(self._tree(lazy.source, results), sliced) for lazy, sliced in writer.lazies)
            calls = frozenset(id(call.call) for lazy, _ in writer.lazies for call in lazy.source.calls() if isinstance(call, CallSource))
            header = replace(self._header, slots=slots)
            parts = dict(sorted((share.part.index, share.part) for share in self._shares if share.part is not None))
            if writer.share_has_its_own or len(results) * len(parts) <= _DIRECT_ANSWERS:
                self._wired[key] = packed_header(header), results, False, calls
            else:
                recipes: Any = _route_task().options(num_returns=len(parts)).remote(packed_header(header), list(parts.values()), *results)
                self._wired[key] = packed_header(replace(header, routed=True)), recipes if len(parts) > 1 else [recipes], True, calls
        packed, found, by_part, calls = self._wired[key]
        return packed, [found[part.index]] if by_part and part is not None else found, calls

    def _tree(self, source: Source, results: list[Any]) -> Tree:
        if isinstance(source, ViewSource):
            return Node(source.operation, tuple(self._tree(inner, results) for inner in source.inner))
        if not isinstance(source, CallSource) or not source.call.component.runtime_is_open():
            return Here(source.open(None).whole().run(None))
        source.call.raise_error()
        self._calls[id(source.call)] = source.call
        first = len(results)
        results.extend(source.call.references[rank] for rank in source.ranks)
        return Leaf(first, len(source.ranks), source.collect_how, source.mesh)


class PlainSender:
    """As Sender, for a call without arguments: every worker gets the same few bytes."""

    upstream: Sequence[PendingCall] = ()

    def __init__(self, message: Any) -> None:
        self._message = message

    def objects(self, rank: int, extra: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        """The arguments of the actor's method; see `Sender.objects`."""
        return (self._message, *extra)


@lru_cache(maxsize=512)
def sender_without_arguments(spec: MethodSpec, timeout_s: float, splits: tuple[int, ...], compress_above_bytes: int | None) -> PlainSender:
    """The sender of a method's calls that have no arguments."""
    sender = Sender(spec, timeout_s, splits, compress_above_bytes, (), [whole_share((), {})])
    return PlainSender(sender.objects(0)[0])


def at_hand(value: Any) -> Any:
    """The value of a LazyResult that is not on workers (any more), else `value`."""
    if not isinstance(value, LazyResult):
        return value
    lazy = cast("LazyResult[Any]", value)
    on_workers = any(isinstance(call, CallSource) and call.call.component.runtime_is_open() for call in lazy.source.calls())
    return lazy if on_workers else lazy.get()


@cache
def _route_task() -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(route)
