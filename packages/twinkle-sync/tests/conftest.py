"""Real processes for the tests of transports: forked from a server that has imported torch once."""

import multiprocessing
import os
import pickle
import runpy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle_remote import initialize

os.environ.setdefault("OMP_NUM_THREADS", "1")

SCENARIOS = Path(__file__).parent / "transport_scenarios.py"


@dataclass
class Outcome:
    """What became of one rank: its value, its exception, or neither when it died."""

    value: Any = None
    error: Exception | None = None
    traceback: str = ""
    exitcode: int | None = None
    seconds: float = 0.0


RunRanks = Callable[..., list[Outcome]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, Any]]:
    """What a process needs to become part of a Ray cluster of the tests' own."""
    with initialize("ray"):
        import ray

        environment = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
        yield {"address": ray.get_runtime_context().gcs_address, "environment": environment}


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "twinkle_sync"])

    def run(scenario: str, world_size: int = 3, deadline_s: float = 60.0, **arguments: Any) -> list[Outcome]:
        address: Any = context.Queue()
        transport = arguments.get("transport")
        if transport == "ray":
            arguments["cluster"] = request.getfixturevalue("cluster")
            deadline_s += 60  # each process becomes part of the cluster first
        needed = {"cuda_ipc": 1, "nccl": world_size}.get(str(transport), 0)
        if torch.cuda.device_count() < needed:
            pytest.skip(f"{transport} needs {needed} CUDA devices for {world_size} processes")
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=runpy.run_path,
                args=(str(SCENARIOS),),
                kwargs={"init_globals": {"CALL": (scenario, rank, world_size, address, sender, arguments)}, "run_name": "gloo_rank"},
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        started = time.monotonic()
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        outcomes: list[Outcome] = []
        for rank, (process, (receiver, _)) in enumerate(zip(processes, pipes, strict=True)):
            process.join(max(0.1, started + deadline_s - time.monotonic()))
            if process.exitcode is None:
                for other in processes:
                    other.kill()
                pytest.fail(f"rank {rank} of {scenario} still ran after {deadline_s} s")
            try:
                outcome = pickle.loads(receiver.recv_bytes())
            except EOFError:
                outcome = {}
            outcomes.append(Outcome(**outcome, exitcode=process.exitcode))
        for rank, outcome in enumerate(outcomes):
            if outcome.traceback:
                print(f"--- rank {rank} of {scenario}\n{outcome.traceback}")
        return outcomes

    return run
