"""Does GRPO learn? Three seeds of the `tiny` preset, and two controls that must not.

    ./dev bench grpo_learns [--seeds 0,1,2] [--steps 60] [--lr 3e-4] [--json FILE]

Every seed: a fresh Qwen3, the supervised warm-up, GRPO, and held-out exact match before and after. Controls, from the same warm policy as the
first seed: advantages shuffled within their groups, and the policy's own likelihood as the reward. Exits with 1 when a target is missed:

- the warm-up ends with a sampled accuracy in [0.35, 0.60];
- sampled accuracy rises by 0.15 in the mean and 0.10 for each seed, greedy by 0.10 in the mean;
- shuffled advantages raise neither by 0.05; the likelihood reward raises sampled by less than 0.08 and greedy by less than 0.05.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.config import GRPOConfig
from twinkle.layout import plan_layout
from twinkle.recipes import Evaluation, GRPOLoop, Task, build_components, make_task, warm_up, write_tiny_qwen3
from twinkle.run import PeakMemory
from twinkle_data import Template
from twinkle_data.toy import toy_tokenizer
from twinkle_remote import initialize
from twinkle_sync import CheckpointEngineManager

if TYPE_CHECKING:
    from twinkle_megatron import MegatronModel
    from twinkle_vllm import vLLMSampler


@dataclass
class Bench:
    """The components, started once, and what they work on."""

    config: GRPOConfig
    actor: MegatronModel
    sampler: vLLMSampler
    weights: CheckpointEngineManager
    template: Template
    task: Task
    started: float

    def say(self, message: str) -> None:
        print(f"[{time.perf_counter() - self.started:6.1f} s] {message}", flush=True)

    def reinforce(self, seed: int, advantage: str, warm: Path, before: Evaluation | None) -> tuple[Evaluation, Evaluation, dict[str, Any]]:
        """GRPO from the warm policy; accuracy before (where it is not known yet) and after, and the checks of the run."""
        self.actor.load(str(warm))
        config = self.config.model_copy(update={"seed": seed, "advantage": advantage})
        loop = GRPOLoop(config, actor=self.actor, sampler=self.sampler, weights=self.weights, template=self.template, task=self.task)
        before = before or loop.evaluate()
        rewards = [loop.step()[0]["reward"] for _ in range(config.steps)]
        after = loop.evaluate()
        first, last = rewards[: len(rewards) // 6 or 1], rewards[-(len(rewards) // 6) or -1 :]
        self.say(
            f"seed {seed} {advantage}: sampled {before.sampled:.3f} -> {after.sampled:.3f} ({after.sampled - before.sampled:+.3f}), "
            f"greedy {before.greedy:.3f} -> {after.greedy:.3f} ({after.greedy - before.greedy:+.3f}), "
            f"reward {sum(first) / len(first):.3f} -> {sum(last) / len(last):.3f}"
        )
        return before, after, loop.checks.to_summary()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    # Half the preset's steps at a higher rate, so that three seeds and two controls fit into about ten minutes on two cores.
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--json", type=Path, default=None, help="write every figure here")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="grpo-learns-") as folder:
        report = measure(Path(folder), seeds, args.steps, args.lr, started)
    report["seconds"] = time.perf_counter() - started
    missed = verdict(report)
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print("every target is met" if not missed else "missed: " + "; ".join(missed))
    return 1 if missed else 0


def measure(folder: Path, seeds: list[int], steps: int, lr: float, started: float) -> dict[str, Any]:
    """Run every seed and control in one set of workers."""
    # The sampler's log-probabilities as the old ones: the loss compares them with the trainer's by itself, which saves a pass a step.
    config = GRPOConfig.load(["--no-measure-kl", "--old-logprobs", "sampler", "--steps", str(steps), "--lr", str(lr)])
    task = make_task(config.task, validation=config.warmup.check_problems)
    texts = [problem.user_data[key] for key in ("question", "response") for problem in task.training[:2000]]
    tokenizer = toy_tokenizer(texts)
    models = {seed: write_tiny_qwen3(folder / f"model-{seed}", tokenizer, seed=seed) for seed in seeds}
    layout = plan_layout(config.runtime, config.actor, config.sampler)
    runs: list[dict[str, Any]] = []
    with PeakMemory() as memory, initialize("ray", groups=list(layout.groups)):
        actor, sampler, _ = build_components(config, layout, models[seeds[0]])
        weights = CheckpointEngineManager(model=actor, sampler=sampler)
        template = Template(str(models[seeds[0]]))
        sampler.set_template(template)
        bench = Bench(config, actor, sampler, weights, template, task, started)
        for number, seed in enumerate(seeds):
            actor.load(str(models[seed]))
            warmed = warm_up(
                config.warmup,
                actor=actor,
                sampler=sampler,
                weights=weights,
                template=template,
                task=task,
                max_tokens=config.max_tokens,
                micro_batch_size=None,
                seed=seed,
                say=bench.say,
            )
            warm = folder / f"warm-{seed}"
            actor.save(str(warm))
            before: Evaluation | None = None
            for advantage in ("group", "shuffled", "likelihood") if number == 0 else ("group",):
                before, after, checks = bench.reinforce(seed, advantage, warm, before)
                runs.append(
                    {
                        "seed": seed,
                        "advantage": advantage,
                        "warmup_steps": warmed.steps,
                        "sampled_before": before.sampled,
                        "sampled_after": after.sampled,
                        "greedy_before": before.greedy,
                        "greedy_after": after.greedy,
                        "checks": checks,
                    }
                )
        memory.sample()
    return {"runs": runs, "peak_memory_bytes": memory.peak_bytes}


def verdict(report: dict[str, Any]) -> list[str]:
    """The targets that were missed."""
    missed: list[str] = []
    gains: dict[str, list[tuple[float, float]]] = {}
    for run in report["runs"]:
        gains.setdefault(run["advantage"], []).append((run["sampled_after"] - run["sampled_before"], run["greedy_after"] - run["greedy_before"]))
        if not 0.35 <= run["sampled_before"] <= 0.60:
            missed.append(f"seed {run['seed']}: the warm-up ended at {run['sampled_before']:.3f}, outside [0.35, 0.60]: invalid")
        if run["checks"]["max_logprob_gap"] > 1e-4:
            missed.append(f"seed {run['seed']}: sampler and trainer differ by {run['checks']['max_logprob_gap']:.1e}")
    sampled, greedy = zip(*gains["group"], strict=True)
    if sum(sampled) / len(sampled) < 0.15 or min(sampled) < 0.10:
        missed.append(f"sampled gains {[round(gain, 3) for gain in sampled]}")
    if sum(greedy) / len(greedy) < 0.10:
        missed.append(f"greedy gains {[round(gain, 3) for gain in greedy]}")
    for control, (most_sampled, most_greedy) in {"shuffled": (0.05, 0.05), "likelihood": (0.08, 0.05)}.items():
        for gain_sampled, gain_greedy in gains.get(control, []):
            if gain_sampled >= most_sampled or gain_greedy >= most_greedy:
                missed.append(f"control {control} gained {gain_sampled:+.3f} sampled, {gain_greedy:+.3f} greedy")
    return missed


if __name__ == "__main__":
    sys.exit(main())
