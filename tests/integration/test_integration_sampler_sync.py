"""A sampler that follows a trainer, compared with transformers and peft on the same weights, after each of many updates."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import run_process

# fp32: about ten times what rounding makes of log-probabilities of this size.
TOLERANCE = 2e-5


def follow(tmp_path: Path, *arguments: str, timeout_s: float) -> dict[str, list[float]]:
    script = str(Path(__file__).with_name("sampler_follows.py"))
    done = run_process([sys.executable, script, str(tmp_path), *arguments], cwd=tmp_path, timeout_s=timeout_s)
    assert done.status == 0, done.output[-6000:]
    return json.loads(next(line for line in done.output.splitlines() if line.startswith('{"stale"')))


def check(found: dict[str, list[float]], updates: int) -> None:
    assert len(found["errors"]) == updates
    assert max(found["errors"]) <= TOLERANCE
    assert min(found["stale"]) > 0.01  # the control: every update moved the model
    assert all(found["greedy"])


def check_adapter(found: dict[str, list[float]]) -> None:
    assert max(found["adapter"] + found["adapter_merged"] + found["base"]) <= TOLERANCE
    assert min(found["adapter_control"]) > 0.01


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_sampler_in_the_trainers_process_follows_it_and_its_adapter(tmp_path):
    found = follow(tmp_path, "local", "tied", "one", "2", timeout_s=180)
    check(found, 2)
    check_adapter(found)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("model", "layout"), [("tied", "tp"), ("untied", "tp"), ("tied", "pp"), ("untied", "pp"), ("moe", "ep")])
def test_twenty_updates_from_a_trainer_of_several_ranks(tmp_path, model, layout):
    found = follow(tmp_path, "ray", model, layout, "20", timeout_s=380)
    check(found, 20)
    if model != "moe":
        check_adapter(found)
