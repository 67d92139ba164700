"""Supervised training gives one loss, however it is laid out and started."""

from __future__ import annotations

import re
import sys

import pytest
from commands import ROOT, SMALL, read_steps, run_process, twinkle

pytestmark = pytest.mark.timeout(400)

EXAMPLE = str(ROOT / "examples" / "sft.py")
LAYOUTS = {
    "tp 2": ["--actor.tp", "2"],
    "pp 2": ["--actor.pp", "2"],
    "tp 2 with sequence parallel": ["--actor.tp", "2", "--actor.sequence-parallel"],
    "dp 2": ["--actor.dp", "2"],
}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return _train(tmp_path_factory.mktemp("one"), [])


def _train(folder, flags):
    done = twinkle("sft", *SMALL[:4], "--steps", "3", "--no-save-model", "--run-dir", "run", *flags, cwd=folder)
    assert done.status == 0, done.output[-6000:]
    return read_steps(folder / "run")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_loss_and_gradient_norm_of_one_rank(one_rank, layout, tmp_path):
    for ours, one in zip(_train(tmp_path, LAYOUTS[layout]), one_rank, strict=True):
        assert ours["loss"] == pytest.approx(one["loss"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def test_another_seed_gives_another_loss(one_rank, tmp_path):
    other = _train(tmp_path, ["--seed", "1"])
    assert abs(other[0]["loss"] - one_rank[0]["loss"]) > 1e-4


def _losses(output: str) -> list[float]:
    """The losses by step; under torchrun every rank prints them, and they must agree."""
    found: dict[int, set[float]] = {}
    for step, loss in re.findall(r"step (\d+)  loss ([\d.]+)", output):
        found.setdefault(int(step), set()).add(float(loss))
    assert all(max(losses) - min(losses) <= 2e-6 for losses in found.values()), found
    return [min(found[step]) for step in sorted(found)]


def test_one_script_gives_equal_losses_in_local_mode_under_torchrun_and_on_ray(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    commands = {
        "local": [sys.executable, EXAMPLE, "--steps", "6"],
        "torchrun": [*torchrun, EXAMPLE, "--steps", "6"],
        "ray": [sys.executable, EXAMPLE, "--mode", "ray", "--dp", "2", "--steps", "6"],
    }
    losses = {}
    for name, command in commands.items():
        done = run_process(command, cwd=tmp_path, timeout_s=120)
        assert done.status == 0, done.output[-6000:]
        losses[name] = _losses(done.output)
    assert len(losses["local"]) == 6
    assert losses["local"][-1] < losses["local"][0]
    # Adam amplifies rounding a little more with every step; two ranks against one stay within this over six.
    assert losses["torchrun"] == pytest.approx(losses["local"], abs=5e-5)
    assert losses["ray"] == pytest.approx(losses["torchrun"], abs=2e-7)
