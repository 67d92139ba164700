"""Weights for an engine whose workers are processes of their own (tensor parallelism): a second, small transfer on the engine's machine."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from twinkle_sync import ChannelMisuse, Deadline, FolderTransport, Incoming, PeerFailed, outgoing

from ._errors import EngineFailed

if TYPE_CHECKING:
    from vllm import LLM

_TIMEOUT_S = 1800.0  # the synchronisation that brings the tensors has a deadline of its own, which is the one that matters
_BUCKET_BYTES = 64 << 20
_MEMORY = "/dev/shm"

LoadWeights = Callable[[Any, Iterable[tuple[str, torch.Tensor]], bool], None]


def load_in_workers(engine: "LLM", tensors: Iterable[tuple[str, torch.Tensor]], load: LoadWeights, on_cpu: bool, num_workers: int) -> None:
    """Hand `tensors` to all workers, bucket by bucket through files in the machine's memory, and run `load(worker, tensors, on_cpu)` in each.

    Each worker's loader takes its own part of a tensor. Raises what the iterable raises, else what went wrong in the workers.
    """
    deadline = Deadline(_TIMEOUT_S)
    transport = FolderTransport(_MEMORY if Path(_MEMORY).is_dir() else None)
    address = transport.listen(deadline)
    failures: list[Exception] = []

    def run_workers() -> None:
        try:
            told = engine.collective_rpc(_receive, args=(address, num_workers + 1, load, on_cpu))
            failures.extend(EngineFailed(f"a worker of the engine failed: {text}") for text in told if text is not None)
        except Exception as error:  # told to the thread that called
            failures.append(error)
        if failures:
            transport.close()  # which may wait for the workers

    thread = threading.Thread(target=run_workers, name="twinkle-vllm-weights", daemon=True)
    thread.start()
    try:
        transport.connect(address, 0, num_workers + 1, deadline)
        transport.send(outgoing(tensors, version=0, bucket_size_bytes=_BUCKET_BYTES, verify=False), deadline)
    except BaseException as error:
        if not isinstance(error, Exception):
            transport.close()  # an interruption, of which the workers have not been told
        thread.join(_TIMEOUT_S)
        if failures and isinstance(error, PeerFailed | ChannelMisuse):  # these only say that the workers have gone
            raise failures[0] from error
        raise
    finally:
        thread.join(_TIMEOUT_S)
        transport.close()
    if failures:
        raise failures[0]


def _receive(worker: Any, address: str, world_size: int, load: LoadWeights, on_cpu: bool) -> str | None:
    """Runs in each of vLLM's workers; what went wrong.

    Not raised: after one worker's exception vLLM 0.32 does not read the answers of the others, and takes them for those of the next call.
    """
    deadline = Deadline(_TIMEOUT_S)
    transport = FolderTransport()
    try:
        transport.connect(address, 1 + worker.rank, world_size, deadline)
        incoming = Incoming(transport.receive(deadline), 0, verify=False)
        incoming.begin()
        load(worker, incoming, on_cpu)
    except Exception as error:  # the answer to the engine, which compares all workers' answers
        # Only then: to the others, who may still read, a worker that leaves is one that failed.
        transport.close()
        return f"{type(error).__name__}: {error}"
    return None
