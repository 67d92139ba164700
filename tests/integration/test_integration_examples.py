"""The example script of a user, in both modes."""

from __future__ import annotations

import re
import sys

import pytest
from commands import ROOT, run_process

pytestmark = pytest.mark.timeout(800)

EXAMPLE = str(ROOT / "examples" / "grpo.py")


@pytest.mark.parametrize("mode", ["local", "ray"])
def test_the_example_trains(recorded_run, mode, tmp_path):
    done = run_process(
        [sys.executable, EXAMPLE, "--model", str(recorded_run / "checkpoint"), "--mode", mode, "--steps", "3"], cwd=tmp_path, timeout_s=180
    )
    assert done.status == 0, done.output[-6000:]
    rewards = [float(value) for value in re.findall(r"reward ([\d.]+)", done.output)]
    assert len(rewards) == 3
    assert 0 < max(rewards) <= 1
    assert len((ROOT / "examples" / "grpo.py").read_text().splitlines()) <= 70
