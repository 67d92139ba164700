"""The example script of a user, in both modes."""

from __future__ import annotations

import re
import sys

import pytest
from commands import ROOT, SMALL, run_process, twinkle

pytestmark = pytest.mark.timeout(400)

EXAMPLE = str(ROOT / "examples" / "grpo.py")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model that gets some answers right."""
    folder = tmp_path_factory.mktemp("sft")
    done = twinkle("sft", *SMALL[:4], "--steps", "150", "--run-dir", "run", cwd=folder)
    assert done.status == 0, done.output[-6000:]
    return folder / "run" / "checkpoint"


@pytest.mark.parametrize("mode", ["local", "ray"])
def test_the_example_trains(checkpoint, mode, tmp_path):
    done = run_process([sys.executable, EXAMPLE, "--model", str(checkpoint), "--mode", mode, "--steps", "3"], cwd=tmp_path, timeout_s=180)
    assert done.status == 0, done.output[-6000:]
    rewards = [float(value) for value in re.findall(r"reward ([\d.]+)", done.output)]
    assert len(rewards) == 3
    assert 0 < max(rewards) <= 1
    assert len((ROOT / "examples" / "grpo.py").read_text().splitlines()) <= 70
