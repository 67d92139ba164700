"""Seconds per GRPO step, one after the other and a step ahead, beside TRL's GRPOTrainer, each with the parts of its time.

    ./dev bench grpo [--rounds 5] [--steps 8] [--threads N] [--trl-threads N] [--only alone|pinned|trl]

A Qwen3 of 3.4M parameters, 16 completions (groups of 8) of at most 32 tokens, fp32. TRL lives in an environment of its own, which the first run
makes in the cache folder (XDG_CACHE_HOME, ~/.cache); it generates with transformers, its default on a CPU. All take their turns in one run: so many
steps of one, then of the next; figures are medians over the rounds. A step ahead counts from an idle sampler to an idle sampler.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pinning import pin
from small_qwen3 import save_small_qwen3

from twinkle.config import GRPOConfig
from twinkle.layout import plan_layout, running
from twinkle.recipes import GRPOLoop, Task, build_components
from twinkle_data import Template
from twinkle_data.toy import arithmetic_task, toy_tokenizer
from twinkle_sync import CheckpointEngineManager

TRL = "1.16.0"
PROMPTS, SAMPLES, TOKENS = 2, 8, 32

Row = dict[str, float]
Steps = Callable[[int], list[Row]]


def trl_environment() -> Path:
    """The Python of TRL's environment, which is made where it is not there yet."""
    import torch

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinkle-bench" / f"trl-{TRL}-torch-{torch.__version__}"
    python = cache / "bin" / "python"
    done = cache / "complete"
    if not done.exists():
        uv = shutil.which("uv") or str(Path(__file__).resolve().parents[2] / ".tools" / "uv")
        shutil.rmtree(cache, ignore_errors=True)
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(cache)], check=True)
        packages = [f"trl=={TRL}", f"torch=={torch.__version__.partition('+')[0]}"]
        subprocess.run([uv, "pip", "install", "--quiet", "--python", str(python), *packages], check=True)
        done.touch()
    return python


def write_inputs(folder: Path) -> Task:
    """Model, tokenizer and prompts; the prompts' text also for TRL."""
    drawn = arithmetic_task(num_terms=4, num_digits=1, num_problems=4000, num_held_out=16, seed=0)
    problems = list(drawn.train)
    tokenizer = toy_tokenizer([problem.user_data[key] for problem in problems[:2000] for key in ("question", "response")])
    tokenizer.save_pretrained(folder)
    eos: Any = tokenizer.eos_token_id
    save_small_qwen3(folder, eos_token_id=eos)
    template = Template(str(folder))
    texts = [tokenizer.decode(template.encode(problem, add_generation_prompt=True).input_ids.tolist()) for problem in problems[:512]]
    (folder / "prompts.json").write_text(json.dumps({"texts": texts, "prompts": PROMPTS, "num_samples": SAMPLES, "max_tokens": TOKENS}))
    return VarietyTask(training=problems, validation=problems[:1], held_out=list(drawn.held_out))


class VarietyTask(Task):
    """The reward that TRL's side has, too: the share of different tokens, which an untrained model has some of."""

    def reward(self, problems: Any, responses: Any) -> list[float]:
        return [len(set(sequence.tokens)) / len(sequence.tokens) for response in responses for sequence in response.sequences]


@contextmanager
def trl_steps(folder: Path, threads: int | None) -> Iterator[Steps]:
    """TRL's trainer in a process of its own."""
    command = [str(trl_environment()), str(Path(__file__).with_name("_trl_steps.py")), str(folder)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    with (
        (folder / "trl.log").open("w") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def answer() -> str:
            line = stdout.readline()
            if not line:
                raise SystemExit(f"TRL's trainer ended:\n{(folder / 'trl.log').read_text()[-3000:]}")
            return line

        def steps(count: int) -> list[Row]:
            print(count, file=stdin, flush=True)
            return [
                {
                    "seconds": row["seconds"],
                    "sample_s": row["sample_s"],
                    "score_s": row["rollout_s"] - row["sample_s"],
                    "train_s": row["seconds"] - row["rollout_s"],
                }
                for row in json.loads(answer())
            ]

        try:
            assert answer().strip() == "ready"
            yield steps
        finally:
            process.kill()


def our_steps(options: list[str], task: Task, components: dict[str, Any]) -> Steps:
    """GRPOLoop over components that run already; a loop for each block, so that nothing is under way between two."""

    def steps(count: int) -> list[Row]:
        config = GRPOConfig.load([*options, "--steps", str(count)])
        loop = GRPOLoop(config, task=task, **components)
        start = time.perf_counter()
        rows = [loop.step()[0] for _ in range(count)]
        seconds = (time.perf_counter() - start) / count
        return [{"seconds": seconds} | {name: row[name] for name in ("sync_s", "sample_s", "reward_s", "train_s")} for row in rows]

    return steps


def take_turns(sides: dict[str, Steps], rounds: int, steps: int) -> dict[str, list[Row]]:
    """Each side's means over its steps, a round; one round before is not counted."""
    found: dict[str, list[Row]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides) if number % 2 else list(sides)[::-1]:
            rows = sides[name](steps)
            if number:
                found[name].append({key: statistics.fmean(row[key] for row in rows) for key in rows[0]})
    return found


def show(title: str, found: dict[str, list[Row]], base: str) -> None:
    print(f"{title}: medians of {len(found[base])} rounds", flush=True)
    for name, rows in found.items():
        ratio = statistics.median(row["seconds"] / other["seconds"] for row, other in zip(rows, found[base], strict=True))
        parts = ", ".join(f"{key.removesuffix('_s')} {statistics.median(row[key] for row in rows):.3f}" for key in rows[0] if key != "seconds")
        print(f"  {name:28} {statistics.median(row['seconds'] for row in rows):7.3f} s a step   {ratio:6.3f} x {base}   {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each side in a round")
    parser.add_argument("--threads", type=int, default=1, help="of each of our two processes")
    parser.add_argument("--only", choices=["alone", "pinned", "trl"], help="alone: without TRL; pinned: a core for each process")
    parser.add_argument("--trl-threads", type=int, default=None, help="of TRL's process; by default as many as torch takes")
    arguments = parser.parse_args()
    options = ["--no-measure-kl", "--old-logprobs", "sampler", "--prompts-per-step", str(PROMPTS), "--num-samples", str(SAMPLES)]
    options += ["--max-tokens", str(TOKENS), "--lr", "1e-5", "--sampler.max-model-len", "128", "--sampler.max-num-seqs", "32"]
    options += ["--runtime.threads-per-worker", str(arguments.threads)]
    with tempfile.TemporaryDirectory(prefix="bench-grpo-") as name:
        folder = Path(name)
        task = write_inputs(folder)
        config = GRPOConfig.load(options)
        layout = plan_layout(config.runtime, config.backend, config.actor, config.sampler)
        with running(config.runtime, layout):
            actor, sampler, _ = build_components(config, layout, folder)
            weights, template = CheckpointEngineManager(model=actor, sampler=sampler), Template(str(folder))
            sampler.set_template(template)
            parts = {"actor": actor, "sampler": sampler, "weights": weights, "template": template}
            ours = {
                name: our_steps([*options, "--async-steps", str(ahead)], task, parts) for ahead, name in enumerate(("synchronous", "a step ahead"))
            }
            if arguments.only in (None, "trl"):
                with trl_steps(folder, arguments.trl_threads) as theirs:
                    show("Beside TRL", take_turns({"TRL": theirs} | ours, arguments.rounds, arguments.steps), "TRL")
            if arguments.only in (None, "alone"):
                show("Alone", take_turns(ours, arguments.rounds, arguments.steps), "synchronous")
            if arguments.only in (None, "pinned"):
                pin(actor, sampler)
                show("A core for each process", take_turns(ours, arguments.rounds, arguments.steps), "synchronous")


if __name__ == "__main__":
    main()
