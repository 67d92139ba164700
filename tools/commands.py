"""Run commands to their end, within a deadline: for tests that start the real `twinkle` command, with its real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]

# Small enough for a test, large enough for a thousand sampled tokens a sync.
SMALL = ["--task.size", "4000", "--task.held-out", "50", "--eval-every", "0", "--warmup.check-problems", "64"]


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    status: int
    output: str


def run_process(command: Sequence[str], *, cwd: Path, timeout_s: float, env: dict[str, str] | None = None) -> Finished:
    """Run a command to its end, within a deadline; its whole process group dies with the deadline."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TWINKLE_")} | {"OMP_NUM_THREADS": "1"} | (env or {})
    process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"{' '.join(command)} did not end within {timeout_s} s:\n{output[-4000:]}")
    return Finished(process.returncode, output)


def twinkle(*words: str, cwd: Path, timeout_s: float = 240) -> Finished:
    """Run the `twinkle` command."""
    return run_process([sys.executable, "-m", "twinkle", *words], cwd=cwd, timeout_s=timeout_s)


def read_steps(folder: Path) -> list[dict[str, float]]:
    """The step lines of a run's metrics."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]
