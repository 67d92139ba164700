"""What transports over a board have in common: a place where all processes of a transfer put values under names and look for those of others."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import torch

from ._deadline import Deadline
from ._errors import ChannelMisuse, PeerFailed, TransferCorrupted, TransferTimeout
from ._messages import Abort, End, Message, decode, encode

_HEADER = struct.Struct("<qq")  # kind, sequence number
_LAST_WORDS_S = 2.0  # how long a failing sender waits for the receivers to read why
AHEAD = 2  # messages that are up and not yet read by everybody
_CLOSED = "closed"
NOTHING = torch.empty(0, dtype=torch.uint8)


class Board(Protocol):
    """Bytes under names, seen by all processes of a transfer. PeerFailed from any method: rank 0 has closed the board."""

    def open(self, deadline: Deadline) -> str:
        """Make the board; its address."""
        ...

    def join(self, address: str, deadline: Deadline) -> None:
        """Find the board that another process has made."""
        ...

    def put(self, name: str, head: bytes, payload: torch.Tensor, deadline: Deadline) -> None:
        """Put up a head and a payload (uint8 [N], on the CPU), whole at once."""
        ...

    def wait(self, names: Sequence[str], deadline: Deadline, timeout_s: float) -> tuple[str, bytes, torch.Tensor] | None:
        """The first of these that is there, within `timeout_s` (0: now), else None. Its payload is new memory."""
        ...

    def drop(self, names: Sequence[str]) -> None:
        """Take these down."""
        ...

    def close(self, *, is_mine: bool) -> None:
        """Be done with it; whoever made it takes it away."""
        ...


class BoardTransport:
    """Messages as values on a board. Each receiver says which it has read; rank 0 takes down what all have read, and is at most two messages ahead
    of the slowest. A process that closes its transport is noticed at once, one that dies at the deadline.
    """

    def __init__(self, board: Board) -> None:
        self._board: Board | None = board
        self._is_mine = self._is_open = False
        self._rank = self._world_size = 0
        self._sequence = 0

    def listen(self, deadline: Deadline) -> str:
        """Make the board."""
        self._is_mine = self._is_open = True
        return self._usable().open(deadline)

    def connect(self, address: str, rank: int, world_size: int, deadline: Deadline) -> None:
        """Say that this rank is there; waits until all are."""
        board = self._usable(opening=True)
        if not self._is_mine:
            board.join(address, deadline)
            self._is_open = True
        self._rank, self._world_size = rank, world_size
        board.put(f"rank-{rank}", b"", NOTHING, deadline)
        for other in range(world_size):
            self._wait([f"rank-{other}"], deadline, f"rank {other} of the weight transfer ({world_size} processes) to come to {address}")

    def send(self, messages: Iterable[Message], deadline: Deadline) -> None:
        """Put every message up, and wait until all have been read. When the source raises, the receivers get the time to read that."""
        try:
            for message in messages:
                self.send_message(message, deadline)
            for ack in self._acks(self._sequence - 1):
                self._wait([ack], deadline, f"the samplers to take message {self._sequence - 1}, the last of the weight transfer")
        except Exception:  # raised again, when the samplers have read why
            self._let_them_read()
            raise

    def send_message(self, message: Message, deadline: Deadline) -> None:
        """Put one message up."""
        kind, text, payload = encode(message)
        oldest = self._sequence - AHEAD
        if oldest >= 0:
            acks = self._acks(oldest)
            for ack in acks:
                self._wait([ack], deadline, f"the samplers to take message {oldest} of the weight transfer")
            self._usable().drop([f"message-{oldest}", *acks])
        self._usable().put(f"message-{self._sequence}", _HEADER.pack(kind, self._sequence) + text, payload, deadline)
        self._sequence += 1

    def receive(self, deadline: Deadline) -> Iterator[Message]:
        """Read the messages of one transfer. Every payload is new memory, which the loader may keep."""
        message: Message | None = None
        while not isinstance(message, End | Abort):
            message = self._receive_message(deadline)
            yield message

    def close(self) -> None:
        """Tell the others; rank 0 also takes the board away."""
        board, self._board = self._board, None
        if board is None or not self._is_open:
            return
        if not self._is_mine:
            with suppress(PeerFailed, TransferTimeout):  # nobody is left to be told
                board.put(_CLOSED, b"", NOTHING, Deadline(1.0))
        board.close(is_mine=self._is_mine)

    def _receive_message(self, deadline: Deadline) -> Message:
        name, later = f"message-{self._sequence}", f"message-{self._sequence + 1}"
        what = f"message {self._sequence} of the weight transfer from the trainer"
        found, head, payload = self._wait([name, later], deadline, what)
        if found == later:
            # A board may look for the one before the other: both may have come in between.
            again = self._usable().wait([name], deadline, 0.0)
            if again is None:
                raise TransferCorrupted(f"message {self._sequence} of the weight transfer was lost: message {self._sequence + 1} came instead")
            _, head, payload = again
        if len(head) < _HEADER.size or _HEADER.unpack_from(head)[1] != self._sequence:
            raise TransferCorrupted(f"{what}: {name} is not what the trainer put up")
        message = decode(_HEADER.unpack_from(head)[0], head[_HEADER.size :], payload)
        try:
            self._usable().put(self._ack(self._rank, self._sequence), b"", NOTHING, deadline)
        except PeerFailed:
            if not isinstance(message, End | Abort):  # after the last one nobody needs to be there any more
                raise
        self._sequence += 1
        return message

    def _wait(self, names: Sequence[str], deadline: Deadline, what: str) -> tuple[str, bytes, torch.Tensor]:
        try:
            found = self._usable().wait([*names, _CLOSED], deadline, deadline.remaining_s(what))
        except PeerFailed as error:
            raise PeerFailed(f"{error}, while this process waited for {what}") from error
        if found is None:
            raise deadline.expired(what)
        if found[0] == _CLOSED:
            raise PeerFailed(f"a process left the weight transfer while this one waited for {what}")
        return found

    def _let_them_read(self) -> None:
        until = Deadline(_LAST_WORDS_S)
        with suppress(ChannelMisuse, PeerFailed, TransferTimeout):  # the source's own exception says more
            for ack in self._acks(self._sequence - 1) if self._sequence else ():
                self._usable().wait([ack, _CLOSED], until, until.remaining_s("the receivers"))

    def _acks(self, sequence: int) -> list[str]:
        return [self._ack(rank, sequence) for rank in range(1, self._world_size)]

    def _ack(self, rank: int, sequence: int) -> str:
        return f"read-{rank}-{sequence}"

    def _usable(self, *, opening: bool = False) -> Board:
        if self._board is None or not (self._is_open or opening):
            raise ChannelMisuse(f"this {type(self).__name__} is not connected, or it was closed")
        return self._board
