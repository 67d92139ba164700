"""A call's arguments on their way to the workers: as bytes, with slots where LazyResults were."""

from dataclasses import dataclass
from typing import Any

from twinkle_remote._dispatch import Share
from twinkle_remote._lazy import LazyResult, packing, read_slot
from twinkle_remote._packing import pack
from twinkle_remote._ray_calls import CallSource, PendingCall
from twinkle_remote._ray_messages import Slot
from twinkle_remote._shards import put

_STORE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class PackedShare:
    """A share's arguments as bytes (or a reference to them), the slots where LazyResults were, and the upstream results, and calls, they need."""

    payload: Any
    slots: tuple[Slot, ...]
    results: tuple[Any, ...]
    calls: tuple[PendingCall, ...]


def pack_share(share: Share) -> PackedShare:
    """Pack a worker's arguments. Raises the errors of calls whose results are among them, and what pickling raises."""
    numbers: dict[tuple[int, bool], int] = {}
    slots: list[Slot] = []
    results: list[Any] = []
    calls: list[PendingCall] = []

    def register(lazy: LazyResult, sliced: bool) -> tuple[Any, ...]:
        source = lazy.source
        if not isinstance(source, CallSource) or not source.call.component.runtime_is_open():
            return (_value, (lazy.get(),))
        source.call.raise_error()
        if (key := (id(lazy), sliced)) not in numbers:
            numbers[key] = len(slots)
            slots.append(Slot(num_results=len(source.ranks), collect=source.collect_how, mesh=source.mesh, sliced=sliced))
            results.extend(source.call.references[rank] for rank in source.ranks)
            if source.call not in calls:
                calls.append(source.call)
        return (read_slot, (numbers[key],))

    token = packing.set(register)
    try:
        packed = pack((share.args, share.kwargs))
    finally:
        packing.reset(token)
    # Large arguments are stored once, for all the workers that get them.
    payload = put(packed) if len(packed) > _STORE_BYTES else packed
    return PackedShare(payload, tuple(slots), tuple(results), tuple(calls))


def at_hand(value: Any) -> Any:
    """The value of a LazyResult that is not on workers (any more), else `value`."""
    return value.get() if isinstance(value, LazyResult) and not _is_on_workers(value) else value


def _is_on_workers(lazy: LazyResult) -> bool:
    return isinstance(lazy.source, CallSource) and lazy.source.call.component.runtime_is_open()


def _value(value: Any) -> Any:
    return value
