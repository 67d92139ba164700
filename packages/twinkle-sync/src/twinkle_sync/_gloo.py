"""The transport between processes on CPUs: broadcasts over a gloo group of its own."""

import importlib
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch

from twinkle_remote import held_port

from ._ahead import started
from ._buffers import Buffers
from ._deadline import Deadline
from ._errors import ChannelMisuse, PeerFailed, SyncError, TransferCorrupted
from ._messages import Abort, End, Message, decode, encode

dist: Any = importlib.import_module("torch.distributed")  # its C++ part, used here, has no stubs
_MAGIC = 0x7477_6B31  # "twk1": tells a header from stray bytes
_MAX_JSON_BYTES = 1 << 30
_HEAD_BYTES, _NUMBERS_BYTES = 4096, 5 * 8
_ROOM = _HEAD_BYTES - _NUMBERS_BYTES  # for JSON
T = TypeVar("T")


class GlooTransport:
    """Broadcasts from rank 0 over a `ProcessGroupGloo` that belongs to this object alone.

    The group meets at a TCP store on a port that rank 0 holds from the moment it is picked. The default process group of
    torch.distributed is neither needed nor touched. A message is a head (five int64: magic, kind, sequence number, two sizes; and
    the JSON, as much as has room), the rest of the JSON, and its bytes. The sequence number tells a lost message from a late one.
    """

    device = "cpu"  # where payloads lie

    def __init__(self) -> None:
        self._store: Any = None
        self._group: Any = None
        self._sequence = 0

    def listen(self, deadline: Deadline) -> str:
        """Hold a port and start the store on it; returns `host:port`."""
        port = held_port()
        self._store = dist.TCPStore(
            port.host,
            port.port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._left(deadline, "the meeting point of the weight transfer"),
            master_listen_fd=port.listen_fd,
        )
        return f"{port.host}:{port.port}"

    def connect(self, address: str, rank: int, world_size: int, deadline: Deadline) -> None:
        """Join the group; waits until all `world_size` ranks are there."""
        what = f"{world_size} processes (one trainer, {world_size - 1} samplers) to meet at {address} for the weight transfer; this is number {rank}"
        host, _, port = address.rpartition(":")
        try:
            if self._store is None:
                self._store = dist.TCPStore(host, int(port), wait_for_workers=False, timeout=self._left(deadline, what))
            self._store.set_timeout(self._left(deadline, what))
            self._group = self._make_group(rank, world_size, address, deadline, what)
        except RuntimeError as error:
            if isinstance(error, SyncError):
                raise
            raise self._failure(error, what, deadline) from error

    def send(self, messages: Iterable[Message], deadline: Deadline) -> None:
        """Broadcast every message. While one travels the source makes the next, so that there are two buckets at most."""
        underway: Future[None] | None = None
        try:
            for message in messages:
                if underway is not None:
                    underway.result()
                underway = self._started(self.send_message, message, deadline)
                del message  # a bucket, which would be kept while the one after the next is filled
        except BaseException:  # raised again, once the last message (why the source failed) is out
            if underway is not None:
                wait([underway])
            raise
        if underway is not None:
            underway.result()

    def send_message(self, message: Message, deadline: Deadline) -> None:
        """Broadcast one message."""
        kind, text, payload = encode(message)
        head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
        head[:_NUMBERS_BYTES].view(torch.int64).copy_(torch.tensor([_MAGIC, kind, self._sequence, len(text), payload.numel()]))
        inside = text[:_ROOM]
        head[_NUMBERS_BYTES : _NUMBERS_BYTES + len(inside)].copy_(torch.frombuffer(bytearray(inside), dtype=torch.uint8))
        what = f"the samplers to take message {self._sequence} of the weight transfer"
        self._sequence += 1
        self._broadcast(head, what, deadline)
        if len(text) > _ROOM:
            self._broadcast(torch.frombuffer(bytearray(text[_ROOM:]), dtype=torch.uint8), what, deadline)
        if payload.numel():
            self._broadcast(payload, what, deadline)

    def receive(self, deadline: Deadline) -> Iterator[Message]:
        """Receive the messages of one transfer, each while the loader has the one before. The loader may keep views of a payload."""
        buffers = Buffers(self.device)
        coming: Future[Message] | None = self._started(self._receive_message, buffers, deadline)
        try:
            while coming is not None:
                buffers.need(True)
                message: Message | None = coming.result()
                buffers.need(False)
                coming = None if isinstance(message, End | Abort) else self._started(self._receive_message, buffers, deadline)
                yield message
                message = None
        finally:
            buffers.need(True)  # whatever is still to come must not wait for a loader that has given up

    def close(self) -> None:
        """Leave the group and close the store."""
        self._group = None
        self._store = None

    def _make_group(self, rank: int, world_size: int, address: str, deadline: Deadline, what: str) -> Any:
        host, _, port = address.rpartition(":")
        options = dist.ProcessGroupGloo._Options()
        # Not gloo's default, which resolves the host name: in containers that often is an address that peers cannot reach.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host, int(port)))]
        options._timeout = self._left(deadline, what)
        return dist.ProcessGroupGloo(self._store, rank, world_size, options)

    def _started(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        return started(call, *arguments)

    def _run_broadcast(self, data: torch.Tensor, options: Any, what: str, deadline: Deadline) -> None:
        # Held here: a group that another thread closes in the meantime ends when this broadcast does, and not before, which `close` would wait for.
        group = self._group
        try:
            group.broadcast([data], options).wait()
        finally:
            del group  # an error's traceback would keep it, and peers would not be woken

    def _receive_message(self, buffers: Buffers, deadline: Deadline) -> Message:
        what = f"message {self._sequence} of the weight transfer from the trainer"
        head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
        self._broadcast(head, what, deadline)
        numbers = cast("list[int]", head[:_NUMBERS_BYTES].view(torch.int64).tolist())  # pyright: ignore[reportUnknownMemberType]
        magic, kind, sequence, json_bytes, payload_bytes = numbers
        if magic != _MAGIC or not 0 <= json_bytes < _MAX_JSON_BYTES or payload_bytes < 0:
            self.close()
            raise TransferCorrupted(f"{what}: these bytes are no message header; sender and receiver are out of step")
        text = head[_NUMBERS_BYTES : _NUMBERS_BYTES + min(json_bytes, _ROOM)].numpy().tobytes()
        if json_bytes > _ROOM:
            rest = torch.empty(json_bytes - _ROOM, dtype=torch.uint8)
            self._broadcast(rest, what, deadline)
            text += rest.numpy().tobytes()
        payload = torch.empty(0, dtype=torch.uint8)
        if payload_bytes:
            payload = buffers.take(payload_bytes, wait_s=deadline.remaining_s(what))
            self._broadcast(payload, what, deadline)
        if sequence != self._sequence:
            self.close()
            raise TransferCorrupted(f"message {self._sequence} of the weight transfer was lost: message {sequence} came instead")
        self._sequence += 1
        return decode(kind, text, payload)

    def _broadcast(self, data: torch.Tensor, what: str, deadline: Deadline) -> None:
        if self._group is None:
            raise ChannelMisuse("this gloo transport is not connected, or it failed before")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._left(deadline, what)
        try:
            self._run_broadcast(data, options, what, deadline)
        except SyncError:
            self.close()
            raise
        except RuntimeError as error:
            raise self._failure(error, what, deadline) from error

    def _left(self, deadline: Deadline, what: str) -> timedelta:
        return timedelta(seconds=max(deadline.remaining_s(what), 0.001))  # gloo counts in milliseconds; 0 would mean for ever

    def _failure(self, error: RuntimeError, what: str, deadline: Deadline) -> SyncError:
        """After any error the group cannot be used again: gloo's pairs are broken. Closing it also wakes the peers."""
        self.close()
        text = str(error).split("\n", 1)[0]
        if "imed out" in text or "timeout" in text.lower():
            return deadline.expired(f"{what} ({text})")
        return PeerFailed(f"the connection broke while this process waited for {what}: {text}")


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the network on which it reaches `host` (no packet is sent)."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
