"""The transport over a folder that all processes see: a shared file system, or one machine's memory (/dev/shm)."""

import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from ._deadline import Deadline
from ._errors import ChannelMisuse, PeerFailed, TransferCorrupted
from ._messages import Abort, End, Message, decode, encode

FOLDER_VARIABLE = "TWINKLE_TRANSFER_FOLDER"
_HEADER = struct.Struct("<4sqqqq")  # magic, kind, sequence number, bytes of JSON, bytes of payload
_MAGIC = b"twf1"
_POLL_S = 0.002
_LAST_WORDS_S = 2.0  # how long a failing sender waits for the receivers to read why
_AHEAD = 2  # messages that are written and not yet read by everybody


class FolderTransport:
    """Messages as files in a folder that rank 0 makes inside the one that the environment variable TWINKLE_TRANSFER_FOLDER names.

    Without the variable it is the system's folder for temporary files, which processes of one machine share. A file appears under its name
    once it is complete; each receiver says which it has read, rank 0 deletes what all have read and is at most two files ahead of the slowest.
    A process that dies is noticed at the deadline; one that closes its transport at once.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._rank = self._world_size = 0
        self._sequence = 0

    def listen(self, deadline: Deadline) -> str:
        """Make the folder; its path is the address."""
        parent = os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir()
        if not Path(parent).is_dir():
            raise ChannelMisuse(f"{FOLDER_VARIABLE} is {parent!r}, which is no folder: name one that trainers and samplers see")
        self._folder = Path(tempfile.mkdtemp(prefix="twinkle-transfer-", dir=parent))
        return str(self._folder)

    def connect(self, address: str, rank: int, world_size: int, deadline: Deadline) -> None:
        """Say that this rank is there; waits until all are."""
        folder = Path(address)
        if not folder.is_dir():
            raise ChannelMisuse(f"rank {rank} does not see {address}: set {FOLDER_VARIABLE} of the sender to a folder that all processes share")
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._put(f"rank-{rank}", b"")
        waiting = set(range(world_size))
        while waiting := {other for other in waiting if not (folder / f"rank-{other}").exists()}:
            self._wait(deadline, f"ranks {sorted(waiting)} of the weight transfer to come to {address}")

    def send(self, messages: Iterable[Message], deadline: Deadline) -> None:
        """Write every message. When the source raises, the receivers get the time to read that."""
        try:
            for message in messages:
                self.send_message(message, deadline)
        except Exception:
            end = time.monotonic() + _LAST_WORDS_S
            while self._folder is not None and time.monotonic() < end and self._read_by_all() < self._sequence:
                time.sleep(_POLL_S)
            raise

    def send_message(self, message: Message, deadline: Deadline) -> None:
        """Write one message."""
        kind, text, payload = encode(message)
        what = f"the samplers to take message {max(0, self._sequence - _AHEAD)} of the weight transfer"
        while self._sequence - self._read_by_all() >= _AHEAD:
            self._wait(deadline, what)
        deadline.remaining_s(what)
        header = _HEADER.pack(_MAGIC, kind, self._sequence, len(text), payload.numel())
        self._put(f"message-{self._sequence}", header, text, payload.numpy().data if payload.numel() else b"")
        self._sequence += 1

    def receive(self, deadline: Deadline) -> Iterator[Message]:
        """Read the messages of one transfer. Every payload is new memory, which the loader may keep."""
        message: Message | None = None
        while not isinstance(message, End | Abort):
            message = self._receive_message(deadline)
            yield message

    def close(self) -> None:
        """Tell the others; rank 0 also removes the folder."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        if self._rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.is_dir():
            (folder / "closed").touch()

    def _receive_message(self, deadline: Deadline) -> Message:
        what = f"message {self._sequence} of the weight transfer from the trainer"
        path = self._open_folder() / f"message-{self._sequence}"
        while not path.exists():
            later = path.with_name(f"message-{self._sequence + 1}")
            if later.exists() and not path.exists():
                raise TransferCorrupted(f"message {self._sequence} of the weight transfer was lost: message {self._sequence + 1} came instead")
            self._wait(deadline, what)
        data = bytearray(path.read_bytes())
        magic, kind, sequence, json_bytes, payload_bytes = _HEADER.unpack_from(data)
        if magic != _MAGIC or sequence != self._sequence or len(data) != _HEADER.size + json_bytes + payload_bytes:
            raise TransferCorrupted(f"{what}: the file {path.name} is not what the trainer wrote")
        text = bytes(data[_HEADER.size : _HEADER.size + json_bytes])
        payload = torch.empty(payload_bytes, dtype=torch.uint8)
        if payload_bytes:
            payload.copy_(torch.frombuffer(data, dtype=torch.uint8, offset=_HEADER.size + json_bytes))
        self._sequence += 1
        self._put(f"read-{self._rank}", str(self._sequence).encode())
        return decode(kind, text, payload)

    def _read_by_all(self) -> int:
        """How many messages every receiver has read; they are deleted."""
        folder = self._open_folder()
        counts: list[int] = []
        for rank in range(1, self._world_size):
            path = folder / f"read-{rank}"
            counts.append(int(path.read_bytes() or b"0") if path.exists() else 0)
        done = min(counts)
        for sequence in range(max(0, done - _AHEAD), done):
            (folder / f"message-{sequence}").unlink(missing_ok=True)
        return done

    def _put(self, name: str, *parts: bytes | memoryview) -> None:
        folder = self._open_folder()
        hidden = folder / f".{name}-{self._rank}"
        try:
            with hidden.open("wb") as stream:
                for part in parts:
                    stream.write(part)
            hidden.replace(folder / name)
        except FileNotFoundError as error:
            raise PeerFailed(f"the trainer has closed the weight transfer ({folder} is gone)") from error

    def _wait(self, deadline: Deadline, what: str) -> None:
        deadline.remaining_s(what)
        folder = self._open_folder()
        if not folder.is_dir():
            raise PeerFailed(f"the trainer closed the weight transfer while this process waited for {what}")
        if (folder / "closed").exists():
            raise PeerFailed(f"a process left the weight transfer while this one waited for {what}")
        time.sleep(_POLL_S)

    def _open_folder(self) -> Path:
        if self._folder is None:
            raise ChannelMisuse("this folder transport is not connected, or it was closed")
        return self._folder
