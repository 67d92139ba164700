"""The main job, small: `twinkle grpo` as a user runs it, its checks, and its replay in other layouts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import read_steps, run_process, twinkle

pytestmark = pytest.mark.timeout(1000)


def test_the_run_folder_holds_what_is_promised(recorded_run):
    names = {path.name for path in recorded_run.iterdir()}
    assert {"config.json", "metrics.jsonl", "summary.json", "curves.png", "checkpoint", "model", "initial", "rollouts.jsonl"} <= names
    summary = json.loads((recorded_run / "summary.json").read_text())
    for key in ("eval_before", "eval_after", "eval_greedy_before", "eval_greedy_after"):
        assert 0 <= summary[key] <= 1
    assert summary["seconds"] > 0
    assert 0 < summary["peak_memory_bytes"] < 12 * 2**30
    assert json.loads((recorded_run / "config.json").read_text())["steps"] == 10
    assert len(read_steps(recorded_run)) == 10
    assert (recorded_run / "checkpoint" / "config.json").is_file()


def test_sampler_and_trainer_agree_after_every_sync(recorded_run):
    checks = json.loads((recorded_run / "summary.json").read_text())["checks"]
    assert checks["min_tokens_per_check"] >= 1000
    assert 0 < checks["max_logprob_gap"] <= 1e-4
    assert checks["max_first_ratio_gap_trainer"] <= 1e-5
    assert checks["max_first_ratio_gap_sampler"] <= 2e-4


def test_kl_to_the_initial_policy_starts_at_zero_and_grows(recorded_run):
    checks = json.loads((recorded_run / "summary.json").read_text())["checks"]
    assert checks["kl_step_1"] == 0.0
    assert checks["kl_step_10"] > 0.0


def test_the_checkpoint_is_one_that_transformers_loads(recorded_run):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(recorded_run / "checkpoint")
    trained = AutoModelForCausalLM.from_pretrained(recorded_run / "checkpoint")
    initial = AutoModelForCausalLM.from_pretrained(recorded_run / "initial")
    tokens = torch.tensor([tokenizer("State the final answer: 1 + 2 =")["input_ids"]])
    with torch.no_grad():
        assert not torch.equal(trained(tokens).logits, initial(tokens).logits)


@pytest.fixture(scope="module")
def steps(recorded_run, tmp_path_factory) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Loss and gradient norm by job and layout."""
    script = str(Path(__file__).with_name("layouts.py"))
    done = run_process([sys.executable, script, str(recorded_run)], cwd=tmp_path_factory.mktemp("layouts"), timeout_s=400)
    assert done.status == 0, done.output[-6000:]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for line in done.output.splitlines():
        if line.startswith('{"job"'):
            row = json.loads(line)
            found.setdefault((row["job"], row["layout"]), []).append(row)
    return found


@pytest.mark.parametrize("job", ["sft", "replay"])
@pytest.mark.parametrize("layout", ["tp 2", "pp 2", "tp 2 with sequence parallel", "dp 2"])
def test_every_layout_gives_the_loss_and_gradient_norm_of_one_rank(steps, job, layout):
    ours, one = steps[job, layout], steps[job, "one rank"]
    assert [row["step"] for row in ours] == [row["step"] for row in one] == [1, 2, 3]
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in one], abs=1e-6)
    assert [row["grad_norm"] for row in ours] == pytest.approx([row["grad_norm"] for row in one], rel=1e-5)


def test_replaying_gives_what_the_recorded_run_had(steps, recorded_run):
    recorded = read_steps(recorded_run)[:3]
    assert [row["loss"] for row in steps["replay", "one rank"]] == pytest.approx([row["loss"] for row in recorded], abs=1e-6)
    assert [row["grad_norm"] for row in steps["replay", "one rank"]] == pytest.approx([row["grad_norm"] for row in recorded], rel=1e-5)


def test_the_command_replays_in_another_layout_and_sees_one_changed_advantage(steps, recorded_run, tmp_path):
    """With a negative control: one advantage of 256, changed by 0.5, is seen."""
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "initial").symlink_to(recorded_run / "initial")
    lines = (recorded_run / "rollouts.jsonl").read_text().splitlines()
    record = json.loads(lines[1])
    record["features"][0]["advantages"] += 0.5
    (changed / "rollouts.jsonl").write_text("\n".join([lines[0], json.dumps(record), *lines[2:]]) + "\n")
    done = twinkle("grpo", "--replay", str(changed), "--steps", "2", "--run-dir", "run", "--actor.tp", "2", cwd=tmp_path)
    assert done.status == 0, done.output[-6000:]
    first, second = read_steps(tmp_path / "run")
    expected = steps["replay", "one rank"]
    assert first["loss"] == pytest.approx(expected[0]["loss"], abs=1e-6)
    assert first["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-5)
    assert abs(second["loss"] - expected[1]["loss"]) > 1e-5
