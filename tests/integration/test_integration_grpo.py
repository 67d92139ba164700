"""The main job, small: `twinkle grpo` as a user runs it, its checks, and its replay in other layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import SMALL, read_steps, twinkle

pytestmark = pytest.mark.timeout(600)

# 60 warm-up steps reach a few percent: the job's way is tested here, not that it learns (that is tools/bench/grpo_learns.py).
WARM = ["--warmup.min-steps", "40", "--warmup.target-accuracy", "0.0001", "--warmup.max-steps", "400"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A recorded run of 10 steps."""
    folder = tmp_path_factory.mktemp("grpo")
    done = twinkle("grpo", *SMALL, *WARM, "--steps", "10", "--record", "--run-dir", "run", cwd=folder)
    assert done.status == 0, done.output[-6000:]
    return folder / "run"


def test_the_run_folder_holds_what_is_promised(run):
    names = {path.name for path in run.iterdir()}
    assert {"config.json", "metrics.jsonl", "summary.json", "curves.png", "checkpoint", "model", "initial", "rollouts.jsonl"} <= names
    summary = json.loads((run / "summary.json").read_text())
    for key in ("eval_before", "eval_after", "eval_greedy_before", "eval_greedy_after"):
        assert 0 <= summary[key] <= 1
    assert summary["seconds"] > 0
    assert 0 < summary["peak_memory_bytes"] < 12 * 2**30
    assert json.loads((run / "config.json").read_text())["steps"] == 10
    assert len(read_steps(run)) == 10
    assert (run / "checkpoint" / "config.json").is_file()


def test_sampler_and_trainer_agree_after_every_sync(run):
    checks = json.loads((run / "summary.json").read_text())["checks"]
    assert checks["min_tokens_per_check"] >= 1000
    assert 0 < checks["max_logprob_gap"] <= 1e-4
    assert checks["max_first_ratio_gap_trainer"] <= 1e-5
    assert checks["max_first_ratio_gap_sampler"] <= 2e-4


def test_kl_to_the_initial_policy_starts_at_zero_and_grows(run):
    checks = json.loads((run / "summary.json").read_text())["checks"]
    assert checks["kl_step_1"] == 0.0
    assert checks["kl_step_10"] > 0.0


def test_the_checkpoint_is_one_that_transformers_loads(run):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run / "checkpoint")
    trained = AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    initial = AutoModelForCausalLM.from_pretrained(run / "initial")
    tokens = torch.tensor([tokenizer("State the final answer: 1 + 2 =")["input_ids"]])
    with torch.no_grad():
        assert not torch.equal(trained(tokens).logits, initial(tokens).logits)


LAYOUTS = {
    "one rank": [],
    "tp 2": ["--actor.tp", "2"],
    "pp 2": ["--actor.pp", "2"],
    "tp 2 with sequence parallel": ["--actor.tp", "2", "--actor.sequence-parallel"],
    "dp 2": ["--actor.dp", "2"],
}


@pytest.fixture(scope="module")
def replays(run, tmp_path_factory) -> dict[str, list[dict[str, float]]]:
    """Three steps of the recorded rollouts in every layout."""
    folder = tmp_path_factory.mktemp("replays")
    return {name: _replay(run, folder / name.replace(" ", "-"), flags) for name, flags in LAYOUTS.items()}


def _replay(run: Path, folder: Path, flags: list[str]) -> list[dict[str, float]]:
    done = twinkle("grpo", "--replay", str(run), "--steps", "3", "--run-dir", str(folder), *flags, cwd=folder.parent)
    assert done.status == 0, done.output[-6000:]
    return read_steps(folder)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one rank"])
def test_a_replay_gives_the_loss_and_gradient_norm_of_one_rank(replays, layout):
    assert len(replays[layout]) == len(replays["one rank"]) == 3
    for ours, one in zip(replays[layout], replays["one rank"], strict=True):
        assert ours["loss"] == pytest.approx(one["loss"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def test_the_replay_repeats_the_recorded_run(run, replays):
    for replayed, recorded in zip(replays["one rank"], read_steps(run), strict=False):
        assert replayed["loss"] == pytest.approx(recorded["loss"], abs=1e-6)
        assert replayed["grad_norm"] == pytest.approx(recorded["grad_norm"], rel=1e-5)


def test_a_replay_of_other_rollouts_gives_another_loss(run, replays, tmp_path):
    """Negative control: the comparison sees a difference of one advantage in 256."""
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "initial").symlink_to(run / "initial")
    lines = (run / "rollouts.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    record["features"][0]["advantages"] += 0.5
    (changed / "rollouts.jsonl").write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    other = _replay(changed, tmp_path / "other", [])
    assert abs(other[0]["loss"] - replays["one rank"][0]["loss"]) > 1e-6
