"""Transports whose buckets stay on GPUs: NCCL between GPUs, CUDA IPC between processes that share one."""

import base64
import importlib
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import torch

from ._board import AHEAD, NOTHING, BoardTransport
from ._deadline import Deadline
from ._errors import ChannelMisuse, PeerFailed, TransferCorrupted
from ._files import FolderBoard
from ._gloo import GlooTransport

dist: Any = importlib.import_module("torch.distributed")  # its C++ part, used here, has no stubs
_POLL_S = 0.0005
T = TypeVar("T")


class NcclTransport(GlooTransport):
    """Broadcasts from rank 0 over a `ProcessGroupNCCL` that belongs to this object alone; each process has a GPU of its own.

    Buckets lie on the GPUs at both ends. With `verify` their checksums are computed on the host, which copies them there once on either side.
    ChannelMisuse without CUDA, or when two processes are on one GPU, which NCCL cannot do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = _current_device("nccl")

    def _make_group(self, rank: int, world_size: int, address: str, deadline: Deadline, what: str) -> Any:
        # A group that holds two ranks on one GPU hangs or fails with a message that does not say so.
        self._store.set(f"gpu-{rank}", _gpu())
        gpus = [bytes(self._store.get(f"gpu-{other}")).decode() for other in range(world_size)]
        if len(set(gpus)) < world_size:
            raise ChannelMisuse(f"the {world_size} processes of this weight transfer are on {len(set(gpus))} GPUs; NCCL needs one each: use cuda_ipc")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._left(deadline, what)
        return dist.ProcessGroupNCCL(self._store, rank, world_size, options)

    def _started(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        # Here and not in a thread, whose CUDA stream would be another one than that in which the buckets are made and used.
        done: Future[T] = Future()
        done.set_result(call(*arguments))
        return done

    def _run_broadcast(self, data: torch.Tensor, options: Any, what: str, deadline: Deadline) -> None:
        staged = data.to(self.device)
        work = self._group.broadcast([staged], options)
        try:
            # Waiting for the work would only make the stream wait; the host has to know that the bytes are there, or when they do not come.
            while not work.is_completed():
                deadline.remaining_s(what)
                time.sleep(_POLL_S)
        except BaseException:
            self._group.abort()
            raise
        if staged is not data:
            data.copy_(staged)


class CudaIpcTransport(BoardTransport):
    """Buckets in GPU memory that the receivers map: for a trainer and samplers in different processes on one GPU.

    What travels through the system's folder for temporary files are names and handles. Receivers copy each bucket within the GPU, so that it is
    theirs. ChannelMisuse without CUDA, or for a process on another GPU.
    """

    def __init__(self) -> None:
        self.device = _current_device("cuda_ipc")
        self._handles = _IpcBoard(self.device)
        super().__init__(self._handles)

    def connect(self, address: str, rank: int, world_size: int, deadline: Deadline) -> None:
        """As of `BoardTransport`."""
        self._handles.rank, self._handles.world_size = rank, world_size
        super().connect(address, rank, world_size, deadline)


class _IpcBoard(FolderBoard):
    """A folder board on which payloads are handles of GPU memory: one for each receiver, since each gives its own back."""

    rank = world_size = 0

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        # What receivers may still have to copy.
        self._alive: deque[torch.Tensor] = deque(maxlen=AHEAD + 1)

    def put(self, name: str, head: bytes, payload: torch.Tensor, deadline: Deadline) -> None:
        shared: list[list[Any]] = []
        if payload.numel():
            self._alive.append(payload)
            torch.cuda.synchronize(self._device)
            storage: Any = payload.untyped_storage()
            shared = [[_to_json(part) for part in storage._share_cuda_()] for _ in range(self.world_size - 1)]
        note = json.dumps({"gpu": _gpu(), "numel": payload.numel(), "shared": shared}).encode()
        super().put(name, len(note).to_bytes(4, "little") + note + head, NOTHING, deadline)

    def wait(self, names: Sequence[str], deadline: Deadline, timeout_s: float) -> tuple[str, bytes, torch.Tensor] | None:
        found = super().wait(names, deadline, timeout_s)
        if found is None:
            return None
        name, head, _ = found
        size = int.from_bytes(head[:4], "little")
        try:
            note = json.loads(head[4 : 4 + size])
        except ValueError as error:
            raise TransferCorrupted(f"{name} of the weight transfer cannot be read: {error}") from error
        return name, head[4 + size :], self._copied(note)

    def close(self, *, is_mine: bool) -> None:
        super().close(is_mine=is_mine)
        self._alive.clear()
        if is_mine:
            torch.cuda.ipc_collect()

    def _copied(self, note: dict[str, Any]) -> torch.Tensor:
        if not note["shared"] or not self.rank:
            return NOTHING
        if note["gpu"] != _gpu():
            raise ChannelMisuse(f"the trainer's buckets lie on GPU {note['gpu']}, and this process is on {_gpu()}: use nccl or gloo")
        _, *parts = [_from_json(part) for part in note["shared"][self.rank - 1]]  # the first is the device's number in the sender's process
        storages: Any = torch.UntypedStorage
        try:
            storage = storages._new_shared_cuda(torch.cuda.current_device(), *parts)
            mapped: Any = torch.empty(0, dtype=torch.uint8, device=self._device)
            copy: torch.Tensor = mapped.set_(storage, 0, (int(note["numel"]),)).clone()
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise PeerFailed(f"the trainer's GPU memory cannot be mapped: {error}") from error
        return copy


def _current_device(name: str) -> str:
    if not torch.cuda.is_available():
        raise ChannelMisuse(f"the transport {name} needs a CUDA device in this process; use gloo")
    return f"cuda:{torch.cuda.current_device()}"


def _gpu() -> str:
    """The same string in all processes on one GPU, whatever number it has there."""
    cuda: Any = torch.cuda
    return str(cuda.get_device_properties(cuda.current_device()).uuid)


def _to_json(part: Any) -> Any:
    return {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _from_json(part: Any) -> Any:
    return base64.b64decode(cast("dict[str, str]", part)["bytes"]) if isinstance(part, dict) else part
