"""Pools of rank processes, tiny checkpoints, a batch, and what the reference trainer makes of it."""

import contextlib
import inspect
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Two libraries of threads on two cores slow each other down, and sums of one thread are in one order.
os.environ["OMP_NUM_THREADS"] = "1"

_RANK_SCRIPT = Path(__file__).with_name("megatron_rank.py")
_START_TIMEOUT_S = 150.0


class RanksFailed(AssertionError):
    """A job failed or hung; the message has every rank's traceback."""


class RankPool:
    """Processes that form one gloo group and run a function of a test file together, as often as asked."""

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: list[queue.Queue[tuple[bool, Any]]] = []
        self._starts = 0
        self._used = False

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 90.0, **kwargs: Any) -> list[Any]:
        """What `function(*args, **kwargs)` returns on each rank, in order of rank. The function is found by its name in its file."""
        if not self._processes:
            self._start()
        deadline = time.monotonic() + timeout_s + (0 if self._used else _START_TIMEOUT_S)
        job = pickle.dumps((inspect.getfile(function), function.__name__, args, kwargs))
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(job)
            process.stdin.flush()
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.world_size and time.monotonic() < deadline:
            for rank in range(self.world_size):
                if rank not in answers:
                    with contextlib.suppress(queue.Empty):
                        answers[rank] = self._answers[rank].get(timeout=0.02)
                        if not answers[rank][0]:  # its peers may wait for it in a collective: not for long
                            deadline = min(deadline, time.monotonic() + 5)
        self._used = True
        if len(answers) == self.world_size and all(fine for fine, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.world_size)]
        self.stop()
        reports = [
            f"rank {rank}: " + (str(answers[rank][1]) if rank in answers else f"no answer in time\n{self._log(rank)}")
            for rank in range(self.world_size)
        ]
        raise RanksFailed(f"{function.__name__} failed on {self.world_size} ranks\n" + "\n".join(reports))

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._answers = [], []

    def _start(self) -> None:
        self._starts += 1
        self._used = False
        store = self._folder / f"store-{self._starts}"
        for rank in range(self.world_size):
            with (self._folder / f"rank-{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-W", "ignore", str(_RANK_SCRIPT), str(rank), str(self.world_size), str(store), "120"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            answers: queue.Queue[tuple[bool, Any]] = queue.Queue()
            threading.Thread(target=_read, args=(process, answers), daemon=True).start()
            self._processes.append(process)
            self._answers.append(answers)

    def _log(self, rank: int) -> str:
        return (self._folder / f"rank-{rank}.log").read_text(errors="replace")[-4000:]


def _read(process: subprocess.Popen[bytes], answers: "queue.Queue[tuple[bool, Any]]") -> None:
    assert process.stdout is not None
    while True:
        try:
            answers.put(pickle.load(process.stdout))
        except (EOFError, pickle.UnpicklingError):
            if process.wait():
                answers.put((False, f"the process ended with exit code {process.returncode}"))
            return


_pools: list[RankPool] = []


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The ranks end with this folder's tests: the threads of their process groups cost processor time also when nothing is done."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        for pool in _pools:
            pool.stop()


def _pool(world_size: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(world_size, tmp_path_factory.mktemp(f"ranks{world_size}"))
    _pools.append(pool)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _pool(2, tmp_path_factory)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _pool(4, tmp_path_factory)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a tiny checkpoint once: checkpoint('qwen3', tie_word_embeddings=False, ...)."""
    from twinkle_train import testing

    made: dict[str, Path] = {}

    def make(family: str, **sizes: Any) -> Path:
        key = f"{family}-{sorted(sizes.items())}"
        if key not in made:
            made[key] = getattr(testing, f"tiny_{family}")(tmp_path_factory.mktemp(family), **sizes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def features() -> list[Any]:
    """Seven rows of different lengths: prompts untrained, some tokens weighted, temperatures that differ."""
    from twinkle_data import InputFeature

    random = np.random.default_rng(7)
    rows: list[Any] = []
    for length in (9, 14, 5, 12, 21, 7, 8):
        input_ids = random.integers(3, 250, length)
        labels = np.where(np.arange(length) < 3, -100, input_ids)
        weights = random.uniform(0.5, 1.5, length).astype(np.float32)
        rows.append(InputFeature(input_ids=input_ids, labels=labels, loss_weights=weights, temperature=float(random.uniform(0.7, 1.3))))
    return rows
