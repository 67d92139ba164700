"""Fixtures: real processes that meet over gloo, and a tiny checkpoint."""

import contextlib
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch

torch.set_num_threads(1)


def _rank_main(rank: int, world_size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...], results: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # The parent serves the store, as torchrun's agent does: no port is picked, released and taken by another process.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    try:
        results.put((rank, function(*arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`run_ranks(function, world_size, *arguments, timeout_s=60)`: what the function returned on each rank, in processes that torchrun's
    environment describes. AssertionError with every rank's traceback when one raised, or with the silent ranks after the deadline."""

    def run(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 60) -> list[Any]:
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), False)
        context = multiprocessing.get_context("fork")  # functions of test modules cannot be imported by name
        results = context.Queue()
        processes = [
            context.Process(target=_rank_main, args=(rank, world_size, store.port, function, arguments, results), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        got: dict[int, tuple[Any, str | None]] = {}
        try:
            while len(got) < world_size and time.monotonic() < deadline:
                if results.empty() and not any(process.is_alive() for process in processes):
                    break
                with contextlib.suppress(queue.Empty):
                    rank, value, failure = results.get(timeout=0.2)
                    got[rank] = (value, failure)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
        failures = [f"rank {rank}:\n{failure}" for rank, (_, failure) in sorted(got.items()) if failure]
        silent = sorted(set(range(world_size)) - got.keys())
        if failures or silent:
            raise AssertionError("\n".join([*failures, f"ranks without a result after {timeout_s} s: {silent}"]))
        return [got[rank][0] for rank in range(world_size)]

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3."""
    from twinkle_train.testing import tiny_qwen3

    return tiny_qwen3(tmp_path_factory.mktemp("qwen3"))
