"""`--backend transformers`: the numbers of Megatron, and a sampler that follows."""

from __future__ import annotations

import pytest
from commands import read_steps, twinkle

pytestmark = pytest.mark.timeout(600)

SMALL = ["--task.size", "500", "--task.held-out", "10", "--checkpoint-every", "0"]


def test_sft_gives_megatrons_losses_and_norms_also_to_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = {}
    for backend in ("megatron", "transformers"):
        options = ["--backend", backend, "--runtime.mode", "local", "--steps", "3", "--batch-size", "16", "--adam-eps", "1e-3"]
        done = twinkle("sft", *options, *SMALL, "--tracker", "tensorboard", "--run-dir", backend, cwd=tmp_path)
        assert done.status == 0, done.output[-6000:]
        steps[backend] = read_steps(tmp_path / backend)
    losses, norms = ({name: [row[key] for row in rows] for name, rows in steps.items()} for key in ("loss", "grad_norm"))
    assert losses["transformers"] == pytest.approx(losses["megatron"], abs=2e-6)
    assert norms["transformers"] == pytest.approx(norms["megatron"], rel=1e-5)
    assert abs(losses["megatron"][2] - losses["megatron"][0]) > 1e-2
    for backend in steps:
        shown = EventAccumulator(str(tmp_path / backend / "tracker"))
        shown.Reload()
        events = [(event.step, event.value) for event in shown.Scalars("step/loss")]
        assert events == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in enumerate(losses[backend], 1)]


@pytest.mark.full
def test_the_sampler_of_grpo_has_what_the_actor_has_after_a_step(tmp_path):
    """Of a model that SFT has trained, with two FSDP2 ranks."""
    options = ["--backend", "transformers", "--runtime.mode", "local", "--steps", "3", "--batch-size", "16"]
    done = twinkle("sft", *options, *SMALL, "--run-dir", "transformers", cwd=tmp_path)
    assert done.status == 0, done.output[-6000:]
    options = ["--backend", "transformers", "--actor.fsdp", "2", "--steps", "2", "--prompts-per-step", "8", "--eval-every", "0", "--no-measure-kl"]
    model = str(tmp_path / "transformers" / "checkpoint")
    done = twinkle("grpo", *options, *SMALL, "--no-save-model", "--model", model, "--run-dir", "grpo", cwd=tmp_path, timeout_s=400)
    assert done.status == 0, done.output[-6000:]
    assert "TransformersModel" in done.output
    gaps = [row["sampler_logprob_gap"] for row in read_steps(tmp_path / "grpo")]
    assert len(gaps) == 2
    assert 0 < max(gaps) <= 1e-4
