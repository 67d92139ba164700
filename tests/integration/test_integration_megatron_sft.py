"""The example of megatron-core's layouts gives one loss in each of them."""

from __future__ import annotations

import json
import re
import sys

import pytest
from commands import ROOT, run_process

pytestmark = pytest.mark.timeout(400)

EXAMPLE = str(ROOT / "examples" / "megatron_sft.py")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny model and a file of conversations in its words."""
    from twinkle.recipes import write_tiny_qwen3
    from twinkle_data.toy import arithmetic_task, toy_tokenizer, with_response

    folder = tmp_path_factory.mktemp("small")
    problems = [with_response(problem) for problem in arithmetic_task(num_problems=400).train][:64]
    write_tiny_qwen3(folder / "model", toy_tokenizer(message.content for problem in problems for message in problem.messages), seed=0)
    rows = [{"messages": [{"role": message.role, "content": message.content} for message in problem.messages]} for problem in problems]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _steps(small, ranks, *options):
    torchrun = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    data = ["--model", str(small / "model"), "--data", str(small / "rows.jsonl"), "--steps", "3", "--lr", "3e-3"]
    done = run_process([sys.executable, *torchrun, EXAMPLE, *data, *options], cwd=small, timeout_s=150)
    assert done.status == 0, done.output[-6000:]
    steps = re.findall(r"step \d+  loss ([\d.]+)  gradient norm ([\d.]+)", done.output)
    assert len(steps) == 3
    return [(float(loss), float(norm)) for loss, norm in steps]


def test_the_example_has_equal_losses_in_three_layouts(small):
    single = _steps(small, 1)
    assert single[-1][0] < single[0][0] - 0.1
    for options in (("--tp", "2"), ("--pp", "2")):
        for (loss, norm), (other_loss, other_norm) in zip(single, _steps(small, 2, *options), strict=True):
            # Printed with 6 and 5 digits; Adam amplifies rounding a little more with every step.
            assert other_loss == pytest.approx(loss, abs=2e-5)
            assert other_norm == pytest.approx(norm, abs=1e-4)


def test_the_example_does_not_train_for_a_folder_that_it_may_not_replace(small):
    done = run_process([sys.executable, EXAMPLE, "--model", str(small / "model"), "--save", str(small)], cwd=small, timeout_s=100)
    assert done.status == 2
    assert "the folder holds other files" in done.output


@pytest.mark.full
def test_the_example_trains_an_adapter_and_saves_it(small):
    single = _steps(small, 1, "--lora", "4", "--save", str(small / "adapter"))
    assert (small / "adapter" / "adapter_model.safetensors").is_file()
    two = _steps(small, 2, "--lora", "4", "--dp", "2")
    assert [loss for loss, _ in two] == pytest.approx([loss for loss, _ in single], abs=2e-5)
    assert single[-1][0] < single[0][0]
