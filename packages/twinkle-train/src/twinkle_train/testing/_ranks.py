"""Run a function on several ranks: fresh processes that a launcher's environment describes."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import runpy
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# transformers' models take seconds to import; the server ignores what is not installed.
_PRELOADED = ["torch", "torch.distributed", "twinkle_train.testing", "transformers.models.qwen3.modeling_qwen3"]


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call `function(*arguments)` in `world_size` new processes with the environment of torchrun, and wait for all of them.

    The processes come from a server that has imported torch and transformers, and done nothing else: no process group, thread or module
    of the caller is theirs.

    Args:
        function: a function at the top level of a file (a test module need not be importable by name: its file is run again).
        world_size: number of processes.
        arguments: passed to every rank; must pickle.
        timeout_s: deadline for all of them together, in seconds.

    Returns:
        what the function returned, rank by rank.

    Raises:
        ValueError: the function is a lambda, a method, or defined in another function.
        AssertionError: with the traceback of every rank that raised, and the ranks that died or did not end in time.
    """
    from torch._C._distributed_c10d import TCPStore

    if function.__qualname__ != function.__name__ or function.__name__ == "<lambda>":
        raise ValueError(f"run_ranks takes a function at the top level of a file, not {function.__qualname__}")
    # This process serves the store, as torchrun's agent does: no port is picked, released, and taken by another process meanwhile.
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    call = pickle.dumps(arguments)
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }
        process = context.Process(target=_rank_main, args=(environment, inspect.getfile(function), function.__name__, call, sender), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    deadline = time.monotonic() + timeout_s
    values: list[Any] = []
    failures: list[str] = []
    try:
        for rank, receiver in enumerate(pipes):
            try:
                if not receiver.poll(max(0.0, deadline - time.monotonic())):
                    failures.append(f"rank {rank} had no result after {timeout_s:g} s")
                    continue
                value, failure = pickle.loads(receiver.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                failures.append(f"rank {rank} ended without a result, with exit code {processes[rank].exitcode}")
                continue
            values.append(value)
            if failure:
                failures.append(f"rank {rank}:\n{failure}")
    finally:
        for process in processes:
            process.join(0 if failures else 5)
            if process.is_alive():
                process.kill()
                process.join()
    if failures:
        raise AssertionError("\n".join(failures))
    return values


def _rank_main(environment: dict[str, str], file: str, name: str, call: bytes, sender: Any) -> None:
    import torch

    os.environ |= environment
    torch.set_num_threads(1)
    try:
        result = (runpy.run_path(file, run_name=f"rank of {name}")[name](*pickle.loads(call)), None)
        message = pickle.dumps(result)
    except BaseException:
        message = pickle.dumps((None, traceback.format_exc()))
    sender.send_bytes(message)
