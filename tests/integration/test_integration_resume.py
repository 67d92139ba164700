"""Runs that were cut off and go on with `--resume` give the metrics of runs that were not, exactly."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import read_steps, twinkle

pytestmark = pytest.mark.timeout(1200)

SFT = ["--runtime.mode", "local", "--steps", "8", "--checkpoint-every", "3", "--batch-size", "16", "--no-save-model"]
SFT += ["--task.size", "2000", "--task.held-out", "50"]


def _numbers(folder: Path) -> list[dict[str, float]]:
    """The step lines without what depends on the clock."""
    return [{name: value for name, value in row.items() if not name.endswith("_s")} for row in read_steps(folder)]


def test_a_grpo_run_goes_on_exactly_in_sampling_training_data_and_versions(recorded_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(recorded_run, run)
    # As a run that was killed in its seventh step left it: the last checkpoint is of step 4, the metrics went on, the last line is cut off.
    for state in ("step-000008", "step-000010"):
        shutil.rmtree(run / "training-state" / state)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:7]) + lines[7][:40])
    (run / "training-state" / ".unfinished-step-000008").mkdir()
    done = twinkle("grpo", "--resume", str(run), cwd=tmp_path, timeout_s=500)
    assert done.status == 0, done.output[-6000:]
    assert "going on after step 4" in done.output
    assert "warm-up on worked answers" not in done.output
    assert _numbers(run) == _numbers(recorded_run)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, recorded_run)]
    for name in ("eval_before", "eval_after", "eval_greedy_after", "checks", "steps", "warmup"):
        assert summaries[0][name] == summaries[1][name]
    states = [json.loads((folder / "training-state" / "step-000010" / "checkpoint.json").read_text()) for folder in (run, recorded_run)]
    assert states[0]["user_state"] == states[1]["user_state"]
    assert states[0]["user_state"]["loop"]["weight_version"] > 10
    assert sorted(path.name for path in (run / "training-state").iterdir()) == ["step-000004", "step-000008", "step-000010"]
    rollouts = [(folder / "rollouts.jsonl").read_text() for folder in (run, recorded_run)]
    assert rollouts[0] == rollouts[1]


def test_an_sft_run_that_is_killed_goes_on_exactly(tmp_path):
    whole = twinkle("sft", *SFT, "--run-dir", "whole", cwd=tmp_path, timeout_s=500)
    assert whole.status == 0, whole.output[-6000:]
    expected = _numbers(tmp_path / "whole")
    assert len({row["loss"] for row in expected}) == 8

    process = subprocess.Popen([sys.executable, "-m", "twinkle", "sft", *SFT, "--run-dir", "killed"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 400
    try:
        while not metrics.exists() or metrics.read_text().count("\n") < 5:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()
    done = twinkle("sft", "--resume", "killed", cwd=tmp_path, timeout_s=500)
    assert done.status == 0, done.output[-6000:]
    assert "going on after step" in done.output
    assert _numbers(tmp_path / "killed") == expected

    longer = twinkle("sft", "--resume", "killed", "--steps", "9", cwd=tmp_path, timeout_s=500)
    assert longer.status == 0, longer.output[-6000:]
    assert _numbers(tmp_path / "killed")[:8] == expected
    assert len(_numbers(tmp_path / "killed")) == 9


def test_a_changed_setting_or_a_folder_without_a_state_is_refused(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"preset": "tiny", "lr": 0.1, "steps": 3}))
    for words, message in (
        (["--lr", "0.2"], "other settings: lr (0.1, now 0.2)"),
        (["--run-dir", "elsewhere"], "leave --run-dir out"),
        (["--runtime.mode", "local"], "no training checkpoint"),
    ):
        done = twinkle("sft", "--resume", str(run), *words, cwd=tmp_path, timeout_s=100)
        assert done.status == 2, done.output
        assert message in done.output.replace("\n", " ")
    done = twinkle("sft", "--resume", "absent", cwd=tmp_path, timeout_s=100)
    assert done.status == 2
    assert "no config.json of a run" in done.output
