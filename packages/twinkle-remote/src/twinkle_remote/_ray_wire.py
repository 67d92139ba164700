"""What the driver sends to a worker for a call.

One object, as few bytes and as little pickling as can be: the header and the arguments that all workers get are pickled once a call; of
the batches that are cut, a worker's part of an array is its memory alone. A message of up to 64 KiB is plain bytes, a larger one keeps the memory of
its arrays apart, which Ray stores without another copy.
"""

import pickle
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from twinkle_remote._dispatch import Column, Part, Share, Template
from twinkle_remote._lazy import LazyResult, packing, read_slot
from twinkle_remote._packing import Packed, dump_plain, is_plain_array, pack, pack_apart, unpack, view_array
from twinkle_remote._ray_messages import Header
from twinkle_remote._sequences import is_array

STORE_BYTES = 64 << 10
_WITH_SLOTS = b"slots"  # no pickle begins so
_PLAIN_ITEMS = frozenset({type(None), bool, int, float, str, bytes})


@dataclass(frozen=True, slots=True)
class Message:
    """A call's message to one worker, taken apart. columns: this worker's parts of the batches."""

    header: Header
    part: Part | None
    arguments: Any
    columns: Sequence[Any]


_columns: ContextVar[Sequence[Any]] = ContextVar("columns", default=())


def _read_column(index: int) -> Any:
    return _columns.get()[index]


def _read_array(index: int, dtype: str, row_shape: tuple[int, ...]) -> Any:
    import numpy as np

    memory = _columns.get()[index]
    return view_array(memory, dtype, (-1, *row_shape)) if len(memory) else np.empty((0, *row_shape), dtype)


class _ColumnReference:
    """A Column as it is pickled: an array is told by its dtype and the shape of its rows, its memory comes with the message."""

    __slots__ = ("array", "index")

    def __init__(self, index: int, array: Any) -> None:
        self.index = index
        self.array = array

    def __reduce__(self) -> tuple[Any, ...]:
        if self.array is None:
            return _read_column, (self.index,)
        return _read_array, (self.index, self.array.dtype.str, self.array.shape[1:])


def _with_references(value: Any, batches: Sequence[Any]) -> Any:
    if isinstance(value, Column):
        batch = batches[value.index]
        return _ColumnReference(value.index, batch if _is_memory(batch) else None)
    if type(value) is dict:
        return {key: _with_references(item, batches) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def _is_memory(batch: Any) -> bool:
    return is_array(batch) and type(batch).__name__ == "ndarray" and is_plain_array(batch) and batch.flags.c_contiguous


class Writer:
    """Writes a call's arguments.

    arguments: what all shares of the template get, packed. lazies: the LazyResults in it and in the share that was written last, and whether a
    worker takes only its part of each.
    """

    def __init__(self, template: Template) -> None:
        self._batches = template.batches
        self._memory = [_is_memory(batch) for batch in template.batches]
        self.lazies: list[tuple[LazyResult[Any], bool]] = []
        self._numbers: dict[tuple[int, bool], int] = {}
        self._first_of_share = 0
        if not template.args and not template.kwargs:
            self.arguments = _NO_ARGUMENTS
            return
        args = tuple(_with_references(value, self._batches) for value in template.args)
        self.arguments = self._packed((args, {name: _with_references(value, self._batches) for name, value in template.kwargs.items()}))
        self._first_of_share = len(self.lazies)

    @property
    def share_has_its_own(self) -> bool:
        """Whether the share that was written last has LazyResults within its part of a batch."""
        return len(self.lazies) > self._first_of_share

    def columns(self, share: Share) -> Packed | None:
        """A share's parts of the batches, packed; None where nothing was cut."""
        if not self._batches:
            return None
        for lazy, sliced in self.lazies[self._first_of_share :]:
            del self._numbers[id(lazy), sliced]
        del self.lazies[self._first_of_share :]
        parts = share.columns()
        if not all(self._memory):
            parts = [part if memory else self._column(part) for part, memory in zip(parts, self._memory, strict=True)]
        return dump_plain([pickle.PickleBuffer(part) if memory else part for part, memory in zip(parts, self._memory, strict=True)])

    def _column(self, part: Any) -> Any:
        plain = type(part) in (list, tuple) and _PLAIN_ITEMS.issuperset(map(type, part))
        packed = Packed(pickle.dumps(part, 5)) if plain else self._packed(part)
        return packed.data, tuple(packed.buffers)

    def _packed(self, value: Any) -> Packed:
        token = packing.set(self._register)
        try:
            return pack_apart(value)
        finally:
            packing.reset(token)

    def _register(self, lazy: LazyResult[Any], sliced: bool) -> tuple[Any, ...]:
        if (key := (id(lazy), sliced)) not in self._numbers:
            self._numbers[key] = len(self.lazies)
            self.lazies.append((lazy, sliced))
        return read_slot, (self._numbers[key],)


_NO_ARGUMENTS = Packed(pickle.dumps(((), {}), 5))


@lru_cache(maxsize=512)
def plain_header(header: Header) -> bytes:
    """A header without slots, packed."""
    return pickle.dumps(header, 5)


def packed_header(header: Header) -> bytes:
    """A header, packed. Raises what pickling raises."""
    return _WITH_SLOTS + pack(header) if header.slots else plain_header(header)


def read_header(packed: bytes) -> Header:
    """A header that has arrived.

    Those without slots are few and are kept. One with slots holds the caller's values and functions: they belong to one call, which may change
    them, and they may be large.
    """
    return unpack(memoryview(packed)[len(_WITH_SLOTS) :]) if packed.startswith(_WITH_SLOTS) else _plain_header(packed)


def write(header: bytes, part: Part | None, arguments: Packed | None, columns: Packed | None) -> bytes | Packed:
    """A message. arguments: None where they are sent apart, as the object that follows it."""
    place = None if part is None else (part.index, part.parts, part.total)
    content = (header, place, _flat(arguments), _flat(columns))
    size_bytes = sum(packed.size_bytes for packed in (arguments, columns) if packed is not None)
    return pickle.dumps(content, 5) if size_bytes <= STORE_BYTES else dump_plain(content)


def read(message: Any, following: Sequence[Any]) -> tuple[Message, Sequence[Any]]:
    """A message taken apart, and what of the objects that follow it is not part of it."""
    header, place, inside, packed_columns = pickle.loads(message) if isinstance(message, bytes) else message.unpack()
    arguments, rest = (following[0], following[1:]) if inside is None else (Packed(*inside), following)
    columns: list[Any] = [] if packed_columns is None else Packed(*packed_columns).unpack()
    return Message(read_header(header), None if place is None else Part(*place), arguments, columns), rest


def unpack_arguments(message: Message) -> tuple[Any, Any]:
    """The arguments, in a context where the slots are filled. Raises what unpickling raises."""
    columns = [Packed(*cast("tuple[Any, Any]", column)).unpack() if isinstance(column, tuple) else column for column in message.columns]
    token = _columns.set(columns)
    try:
        return message.arguments.unpack()
    finally:
        _columns.reset(token)


def _flat(packed: Packed | None) -> tuple[Any, ...] | None:
    return None if packed is None else (packed.data, tuple(packed.buffers), packed.codec)


@lru_cache(maxsize=512)
def _plain_header(packed: bytes) -> Header:
    return pickle.loads(packed)
