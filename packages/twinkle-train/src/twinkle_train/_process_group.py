"""How the ranks of a trainer meet."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

import twinkle_mesh
import twinkle_remote

from ._errors import ProcessGroupError

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def init_process_group(device_type: str, timeout_s: float = 600) -> None:
    """Makes torch.distributed's default group of this worker's group, once; a second call only checks that the first fits.

    Inside a Ray worker the ranks meet at `twinkle_remote.rendezvous()`: rank 0 serves the store on the socket that was bound for
    it, so no port is released and taken by another process. Else by the launcher's environment (torchrun). Else this process is alone.

    device_type: 'cpu' (gloo) or 'cuda' (nccl; selects the device of the local rank). timeout_s: how long ranks wait to meet, and
    the deadline of every later collective.

    Raises ProcessGroupError for another device type, when a group with another backend exists, or when the ranks do not meet in
    time (it is then also a RuntimeError that names where they should have met).
    """
    backend = _BACKENDS.get(device_type)
    if backend is None:
        raise ProcessGroupError(f"no communication backend for device type {device_type!r}; known are {', '.join(_BACKENDS)}")
    if timeout_s <= 0:
        raise ProcessGroupError(f"timeout_s must be > 0, got {timeout_s}")
    if dist.is_initialized():
        if backend not in dist.get_backend():
            raise ProcessGroupError(
                f"a process group with backend {dist.get_backend()!r} exists already, but {device_type!r} needs {backend!r}; "
                "call init_process_group before other code does, or destroy that group"
            )
        return
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise ProcessGroupError("device type 'cuda', but torch sees no CUDA device here; use device_type='cpu'")
        torch.cuda.set_device(twinkle_mesh.launcher_local_rank() % torch.cuda.device_count())
    _meet(backend, timedelta(seconds=timeout_s))


def _meet(backend: str, timeout: timedelta) -> None:
    meeting = twinkle_remote.rendezvous()
    if meeting is not None and meeting.world_size > 1:
        is_host = meeting.rank == 0
        where = f"{meeting.host}:{meeting.port} (rank {meeting.rank} of {meeting.world_size})"
        try:
            store = TCPStore(
                meeting.host,
                meeting.port,
                meeting.world_size,
                is_master=is_host,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=meeting.listen_fd if is_host else None,
            )
            dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=meeting.world_size, timeout=timeout)
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise ProcessGroupError(f"the ranks did not meet at {where} within {timeout.total_seconds():g} s: {error}") from error
    elif meeting is None and twinkle_mesh.launcher_world_size() > 1:
        where = f"MASTER_ADDR:MASTER_PORT (rank {twinkle_mesh.launcher_rank()} of {twinkle_mesh.launcher_world_size()})"
        try:
            dist.init_process_group(backend, init_method="env://", timeout=timeout)
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise ProcessGroupError(f"the ranks did not meet at {where} within {timeout.total_seconds():g} s: {error}") from error
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
