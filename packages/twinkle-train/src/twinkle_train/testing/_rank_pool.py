"""Rank processes that live for many tests: importing torch and transformers takes longer than most of what is tested."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_START_TIMEOUT_S = 150.0
_COLLECTIVE_TIMEOUT_S = 120.0


class RankPool:
    """Processes that form one gloo group and run functions of test files together, as often as asked. They start with the first run.

    world_size: number of processes. folder: an empty one, for their logs and the store at which they meet.
    """

    def __init__(self, world_size: int, folder: str | os.PathLike[str]) -> None:
        self.world_size = world_size
        self._folder = Path(folder)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: list[queue.Queue[tuple[bool, Any]]] = []
        self._starts = 0
        self._used = False

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 90.0, **keywords: Any) -> list[Any]:
        """What `function(*arguments, **keywords)` returns on each rank, in order of rank.

        function: at the top level of a file, which each rank runs anew; it and what it gets and returns must pickle. timeout_s: deadline for all
        ranks together; where one has failed, the others have five seconds more.

        Raises AssertionError with the traceback of every rank that failed; the processes are ended then, and new ones start with the next run.
        """
        if not self._processes:
            self._start()
        deadline = time.monotonic() + timeout_s + (0 if self._used else _START_TIMEOUT_S)
        job = pickle.dumps((inspect.getfile(function), function.__name__, arguments, keywords))
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
                        if not answers[rank][0]:
                            deadline = min(deadline, time.monotonic() + 5)
        self._used = True
        if len(answers) == self.world_size and all(fine for fine, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.world_size)]
        self.stop()
        reports = [
            f"rank {rank}: " + (str(answers[rank][1]) if rank in answers else f"no answer in time\n{self._log(rank)}")
            for rank in range(self.world_size)
        ]
        raise AssertionError(f"{function.__name__} failed on {self.world_size} ranks\n" + "\n".join(reports))

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._answers = [], []

    def _start(self) -> None:
        self._starts += 1
        self._used = False
        store = self._folder / f"store-{self._starts}"
        command = "import sys; from twinkle_train.testing._rank_pool import serve; serve(*sys.argv[1:])"
        for rank in range(self.world_size):
            with (self._folder / f"rank-{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-c", command, str(rank), str(self.world_size), str(store)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},  # sums of one thread are in one order
                )
            answers: queue.Queue[tuple[bool, Any]] = queue.Queue()
            threading.Thread(target=_read, args=(process, answers), daemon=True).start()
            self._processes.append(process)
            self._answers.append(answers)

    def _log(self, rank: int) -> str:
        return (self._folder / f"rank-{rank}.log").read_text(errors="replace")[-4000:]


def _read(process: subprocess.Popen[bytes], answers: queue.Queue[tuple[bool, Any]]) -> None:
    assert process.stdout is not None
    while True:
        try:
            answers.put(pickle.load(process.stdout))
        except (EOFError, pickle.UnpicklingError):
            if process.wait():
                answers.put((False, f"the process ended with exit code {process.returncode}"))
            return


def serve(rank: str, world_size: str, store_file: str) -> None:
    """What each process does: jobs come over stdin as pickles, answers go over stdout."""
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print goes to the log
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size})

    import torch.distributed as dist

    store = dist.FileStore(store_file, int(world_size))
    timeout = timedelta(seconds=_COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world_size), timeout=timeout)
    while True:
        try:
            path, name, arguments, keywords = pickle.load(jobs)
        except EOFError:
            return
        try:
            spec = importlib.util.spec_from_file_location("jobs_of_" + Path(path).stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            answer = (True, getattr(module, name)(*arguments, **keywords))
        except BaseException:  # the edge of a process: told to the test
            answer = (False, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()
