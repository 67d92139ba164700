"""`twinkle grpo --async-steps 1`, as a user runs it, with its figures in TensorBoard."""

from __future__ import annotations

import json

import pytest
from commands import SMALL, read_steps, twinkle


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_that_samples_a_step_ahead_weights_its_tokens_and_can_be_resumed(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    warm = ["--warmup.min-steps", "40", "--warmup.target-accuracy", "0.0001", "--warmup.max-steps", "400"]
    options = [*SMALL, *warm, "--steps", "4", "--async-steps", "1", "--tracker", "tensorboard", "--checkpoint-every", "2"]
    done = twinkle("grpo", *options, "--run-dir", "run", cwd=tmp_path, timeout_s=300)
    assert done.status == 0, done.output[-6000:]
    first, *later = read_steps(tmp_path / "run")
    assert abs(first["importance_max"] - 1) < 1e-3
    assert len(later) == 3
    for row in later:  # the weights of one step before
        assert row["importance_min"] < 1 < row["importance_max"] <= 2
        assert row["ratio_max_deviation"] <= 1e-5
    checks = json.loads((tmp_path / "run" / "summary.json").read_text())["checks"]
    assert checks["max_first_ratio_gap_trainer"] <= 1e-5
    assert 0 < checks["max_logprob_gap"] <= 1e-4  # of the first step
    shown = EventAccumulator(str(tmp_path / "run" / "tracker"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("step/loss")] == [1, 2, 3, 4]
    resumed = twinkle("grpo", "--resume", "run", "--steps", "6", cwd=tmp_path, timeout_s=200)
    assert resumed.status == 0, resumed.output[-6000:]
    steps = read_steps(tmp_path / "run")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert abs(steps[4]["importance_max"] - 1) < 1e-3  # what had been under way is sampled anew
    assert steps[5]["importance_max"] > 1
