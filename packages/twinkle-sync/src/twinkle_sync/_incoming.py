"""The receiving side of one transfer, as the iterator that a sampler loads from."""

from collections.abc import Iterator

import torch

from ._buckets import Bucket, Unpacker
from ._errors import PeerFailed, TransferCorrupted
from ._ledger import Ledger, TransferReceipt
from ._messages import Abort, Begin, End, Message
from ._spec import TensorSpec


class Incoming:
    """Iterates over (name, tensor) of one transfer and verifies it on the way.

    The last step of the iteration compares the receipt with the sender's, so a loader that reaches the end has loaded exactly
    what was sent. `receipt` is set from then on.
    """

    def __init__(self, messages: Iterator[Message], version: int, *, verify: bool) -> None:
        self._messages = messages
        self._version = version
        self._ledger = Ledger()
        self._unpacker = Unpacker(self._ledger, verify=verify)
        self._over = False
        self.receipt: TransferReceipt | None = None

    def begin(self) -> tuple[TensorSpec, ...] | None:
        """Wait for the first message; the tensors that will follow, where the sender tells.

        Until it has come, and until the first tensor is asked for, nothing is lost: the receiver's weights are still the old ones.
        """
        message = self._next()
        if isinstance(message, Abort):
            raise PeerFailed(f"the sender failed before it sent anything: {message.reason}")
        if not isinstance(message, Begin):
            raise TransferCorrupted(f"the first message is {type(message).__name__}, not Begin: an earlier transfer was not read to its end")
        if message.version != self._version:
            raise TransferCorrupted(f"the sender sends version {message.version}, this receiver was told to expect {self._version}")
        return message.specs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while self.receipt is None:
            message = self._next()
            match message:
                case Bucket():
                    yield from self._unpacker.feed(message)
                    del message  # or it would be there while the one after the next arrives
                case End(sent):
                    self._check(sent)
                case Abort(reason):
                    raise PeerFailed(f"the sender failed in the middle of version {self._version}: {reason}")
                case Begin(version, _):
                    raise TransferCorrupted(f"version {version} began in the middle of version {self._version}")

    def drain(self) -> None:
        """Read on to the last message and drop it all, so that a failing receiver neither blocks the sender nor spoils the channel."""
        while not self._over:
            self._next()

    def _next(self) -> Message:
        message = next(self._messages, None)
        if message is None:
            self._over = True
            raise TransferCorrupted("the messages stopped without an End")
        self._over = isinstance(message, End | Abort)
        return message

    def _check(self, sent: TransferReceipt) -> None:
        self._unpacker.finish()
        received = self._ledger.receipt(self._version)
        if received != sent:
            raise TransferCorrupted(f"what arrived ({received}) is not what was sent ({sent})")
        self.receipt = received
