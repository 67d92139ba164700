"""The transport over a folder that all processes see: a shared file system, or one machine's memory (/dev/shm)."""

import os
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from twinkle_remote import ScratchFolder

from ._board import BoardTransport
from ._deadline import Deadline
from ._errors import ChannelMisuse, PeerFailed, TransferCorrupted

FOLDER_VARIABLE = "TWINKLE_TRANSFER_FOLDER"
_SIZES = struct.Struct("<4sqq")  # magic, bytes of the head, bytes of the payload
_MAGIC = b"twf2"
_POLL_S = 0.002


class FolderTransport(BoardTransport):
    """Messages as files in a folder that rank 0 makes inside the one that the environment variable TWINKLE_TRANSFER_FOLDER names.

    Without the variable it is the system's folder for temporary files, which processes of one machine share. A file appears under its name
    once it is complete. What a killed rank 0 leaves is removed by the next that makes a folder there.

    Args:
        parent: the folder to make it in, on rank 0, in place of the variable's.
    """

    def __init__(self, parent: str | None = None) -> None:
        super().__init__(FolderBoard(parent))


class FolderBoard:
    """A board of files. The methods are described in `Board`."""

    def __init__(self, parent: str | None = None) -> None:
        self._parent = parent
        self._folder = Path()
        self._made: ScratchFolder | None = None

    def open(self, deadline: Deadline) -> str:
        parent = self._parent or os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir()
        if not Path(parent).is_dir():
            raise ChannelMisuse(f"{FOLDER_VARIABLE} is {parent!r}, which is no folder: name one that trainers and samplers see")
        self._made = ScratchFolder("twinkle-transfer-", parent)
        self._folder = self._made.path
        return str(self._folder)

    def join(self, address: str, deadline: Deadline) -> None:
        self._folder = Path(address)
        if not self._folder.is_dir():
            raise ChannelMisuse(f"this process does not see {address}: set {FOLDER_VARIABLE} of the sender to a folder that all processes share")

    def put(self, name: str, head: bytes, payload: torch.Tensor, deadline: Deadline) -> None:
        hidden = self._folder / f".{name}-{os.getpid()}"
        try:
            with hidden.open("wb") as stream:
                stream.write(_SIZES.pack(_MAGIC, len(head), payload.numel()))
                stream.write(head)
                if payload.numel():
                    stream.write(payload.numpy().data)
            hidden.replace(self._folder / name)
        except FileNotFoundError as error:
            raise PeerFailed(f"the trainer has closed the weight transfer ({self._folder} is gone)") from error

    def wait(self, names: Sequence[str], deadline: Deadline, timeout_s: float) -> tuple[str, bytes, torch.Tensor] | None:
        end = time.monotonic() + timeout_s
        while True:
            for name in names:
                try:
                    return name, *_read(self._folder / name)
                except FileNotFoundError:
                    continue
            if not self._folder.is_dir():
                raise PeerFailed(f"the trainer has closed the weight transfer ({self._folder} is gone)")
            if time.monotonic() >= end:
                return None
            time.sleep(_POLL_S)

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def close(self, *, is_mine: bool) -> None:
        if self._made is not None:
            self._made.remove()


def _read(path: Path) -> tuple[bytes, torch.Tensor]:
    with path.open("rb") as stream:
        sizes = stream.read(_SIZES.size)
        magic, head_bytes, payload_bytes = _SIZES.unpack(sizes) if len(sizes) == _SIZES.size else (b"", 0, 0)
        if magic != _MAGIC or os.fstat(stream.fileno()).st_size != _SIZES.size + head_bytes + payload_bytes:
            raise TransferCorrupted(f"the file {path.name} of the weight transfer is not what was written")
        head = stream.read(head_bytes)
        payload = torch.empty(payload_bytes, dtype=torch.uint8)
        if payload_bytes:
            stream.readinto(payload.numpy().data)
        return head, payload
