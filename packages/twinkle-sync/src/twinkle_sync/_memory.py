"""The transport inside one process: the receiver pulls straight from the sender's iterator."""

import itertools
from collections.abc import Iterable, Iterator
from weakref import WeakValueDictionary

from ._deadline import Deadline
from ._errors import ChannelMisuse, TransferTimeout
from ._messages import Abort, End, Message


class _Slot:
    messages: Iterator[Message] | None = None


_slots: WeakValueDictionary[str, _Slot] = WeakValueDictionary()
_numbers = itertools.count()


class MemoryTransport:
    """Hands messages over inside one process and one thread: `send` leaves the iterator, `receive` runs it.

    Nothing is queued, so at most one bucket exists at a time; the source's own exception passes through to the receiver.
    One receiver only.
    """

    def __init__(self) -> None:
        self._slot: _Slot | None = None

    def listen(self, deadline: Deadline) -> str:
        """Make the slot that sender and receiver share."""
        self._slot = _Slot()
        address = f"memory-{next(_numbers)}"
        _slots[address] = self._slot
        return address

    def connect(self, address: str, rank: int, world_size: int, deadline: Deadline) -> None:
        """Take the slot of `address`; ChannelMisuse when it was made in another process or there are several receivers."""
        if world_size != 2:
            raise ChannelMisuse(f"the memory transport has one receiver, not {world_size - 1}; use gloo")
        slot = _slots.get(address)
        if slot is None:
            raise ChannelMisuse(f"nothing listens at {address} in this process; the memory transport does not leave it, use gloo")
        self._slot = slot

    def send(self, messages: Iterable[Message], deadline: Deadline) -> None:
        """Leave the messages for the receiver of this process, which then runs the iterator."""
        self._connected().messages = iter(messages)

    def receive(self, deadline: Deadline) -> Iterator[Message]:
        """Run the sender's iterator."""
        slot = self._connected()
        messages, slot.messages = slot.messages, None
        if messages is None:
            raise TransferTimeout("nothing was sent: in one process the sender must send before the receiver receives")
        for message in messages:
            deadline.remaining_s("the next message of the sender in this process")
            if isinstance(message, Abort):
                continue  # the iterator now raises the source's own exception, which says more
            yield message
            if isinstance(message, End):
                return

    def close(self) -> None:
        """Forget the slot."""
        self._slot = None

    def _connected(self) -> _Slot:
        if self._slot is None:
            raise ChannelMisuse("this memory transport is not connected")
        return self._slot
