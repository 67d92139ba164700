"""Does GRPO learn? Three seeds of the `tiny` preset, and two controls that must not.

    ./dev bench grpo_learns [--seeds 0,1,2] [--steps 60] [--lr 3e-4] [--lanes 2] [--ahead] [--json FILE]

Every seed: a fresh Qwen3, the supervised warm-up, GRPO, and held-out exact match before and after. Controls, from the same warm policy as the
first seed: advantages shuffled within their groups, and the policy's own likelihood as the reward. The runs are shared out over two sets of
workers (`--lanes`), since one run of a model this small leaves half of two cores idle. Exits with 1 when a target is missed:

- the warm-up ends with a sampled accuracy in [0.35, 0.60];
- sampled accuracy rises by 0.15 in the mean and 0.10 for each seed, greedy by 0.10 in the mean;
- shuffled advantages raise neither by 0.05; the likelihood reward raises sampled by less than 0.08 and greedy by less than 0.05.

With `--ahead` there are no controls. Every seed is also run with the sampler a step ahead (`--async-steps 1`; the loss corrects for older weights)
from the same warm policy; the mean accuracy afterwards must differ by at most 0.05.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.config import GRPOConfig
from twinkle.layout import plan_layout, running
from twinkle.recipes import Evaluation, GRPOLoop, Task, build_components, make_task, warm_up, write_tiny_qwen3
from twinkle.run import PeakMemory
from twinkle_data import Template
from twinkle_data.toy import toy_tokenizer
from twinkle_sync import CheckpointEngineManager

if TYPE_CHECKING:
    from twinkle.layout import Trainer
    from twinkle_vllm import vLLMSampler


Job = tuple[int, tuple[str, ...]]
"""A seed and what its advantages are, run after run."""
CONTROLLED = ("group", "shuffled", "likelihood")
AHEAD = "ahead"  # advantages as 'group', the sampler a step ahead
DEADLINE_S = 3600.0


@dataclass
class Bench:
    """The components, started once, and what they work on."""

    config: GRPOConfig
    actor: Trainer
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
        ahead = advantage == AHEAD
        config = self.config.model_copy(update={"seed": seed, "advantage": "group" if ahead else advantage, "async_steps": int(ahead)})
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
    # Half the preset's steps at a higher rate, so that three seeds and two controls fit into ten minutes on two cores.
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--lanes", type=int, default=2, help="sets of workers that run at the same time")
    parser.add_argument("--ahead", action="store_true", help="every seed also with the sampler a step ahead, in place of the controls")
    parser.add_argument("--json", type=Path, default=None, help="write every figure here")
    parser.add_argument("--jobs", type=json.loads, default=None, help=argparse.SUPPRESS)  # one lane's share, given by the parent
    args = parser.parse_args()
    started = time.perf_counter()
    if args.jobs is not None:
        with tempfile.TemporaryDirectory(prefix="grpo-learns-") as folder:
            report = measure(Path(folder), [(seed, tuple(kinds)) for seed, kinds in args.jobs], args.steps, args.lr, args.lanes, started)
        args.json.write_text(json.dumps(report), encoding="utf-8")
        return 0
    report = run_lanes([int(seed) for seed in args.seeds.split(",")], args.steps, args.lr, args.lanes, args.ahead)
    report["seconds"] = time.perf_counter() - started
    missed = verdict(report)
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print("every target is met" if not missed else "missed: " + "; ".join(missed))
    return 1 if missed else 0


def run_lanes(seeds: list[int], steps: int, lr: float, lanes: int, ahead: bool) -> dict[str, Any]:
    """Every run, shared out over processes of their own: the first seed with its controls takes about as long as two other seeds."""
    jobs = [(seed, ("group", AHEAD) if ahead else CONTROLLED if number == 0 else CONTROLLED[:1]) for number, seed in enumerate(seeds)]
    shares: list[list[Job]] = [[] for _ in range(max(1, min(lanes, len(jobs))))]
    for job in jobs:
        min(shares, key=lambda share: sum(1 + len(kinds) for _, kinds in share)).append(job)
    with tempfile.TemporaryDirectory(prefix="grpo-learns-") as folder:
        files = [Path(folder) / f"lane-{number}.json" for number in range(len(shares))]
        options = ["--steps", str(steps), "--lr", str(lr), "--lanes", str(len(shares))]
        processes = [
            subprocess.Popen([sys.executable, "-P", __file__, *options, "--jobs", json.dumps(share), "--json", str(file)])
            for share, file in zip(shares, files, strict=True)
        ]
        try:
            failed = [process.wait(DEADLINE_S) for process in processes]
        finally:
            for process in processes:
                process.terminate()  # ends its workers, too
        if any(failed):
            raise SystemExit(f"a lane failed: exit codes {failed}")
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    runs = sorted((run for report in reports for run in report["runs"]), key=lambda run: ((*CONTROLLED, AHEAD).index(run["advantage"]), run["seed"]))
    return {"runs": runs, "peak_memory_bytes": sum(report["peak_memory_bytes"] for report in reports)}


def measure(folder: Path, jobs: list[Job], steps: int, lr: float, lanes: int, started: float) -> dict[str, Any]:
    """Run one lane's seeds and controls in one set of workers."""
    # The sampler's log-probabilities as the old ones: the loss compares them with the trainer's by itself, which saves a pass a step.
    threads = max(1, (os.cpu_count() or 1) // lanes)
    options = ["--no-measure-kl", "--old-logprobs", "sampler", "--steps", str(steps), "--lr", str(lr)]
    config = GRPOConfig.load([*options, "--runtime.threads-per-worker", str(threads)])
    task = make_task(config.task, validation=config.warmup.check_problems)
    texts = [problem.user_data[key] for key in ("question", "response") for problem in task.training[:2000]]
    tokenizer = toy_tokenizer(texts)
    models = {seed: write_tiny_qwen3(folder / f"model-{seed}", tokenizer, seed=seed) for seed, _ in jobs}
    layout = plan_layout(config.runtime, config.backend, config.actor, config.sampler)
    runs: list[dict[str, Any]] = []
    with PeakMemory() as memory, running(config.runtime, layout):
        first = models[jobs[0][0]]
        actor, sampler, _ = build_components(config, layout, first)
        weights = CheckpointEngineManager(model=actor, sampler=sampler)
        template = Template(str(first))
        sampler.set_template(template)
        bench = Bench(config, actor, sampler, weights, template, task, started)
        for seed, kinds in jobs:
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
            for advantage in kinds:
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
    if AHEAD in gains:
        for kind in ("sampled_after", "greedy_after"):
            means = [sum(run[kind] for run in report["runs"] if run["advantage"] == way) / len(gains[way]) for way in ("group", AHEAD)]
            if abs(means[0] - means[1]) > 0.05:
                missed.append(f"a step ahead {kind} is {means[1]:.3f} in the mean, one after the other {means[0]:.3f}")
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
