"""The whole job behind `twinkle grpo`: groups, components, warm-up, steps, evaluations, summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from twinkle.config import GRPOConfig
from twinkle.installed import PLOT, RAY, SAMPLER, TASK, TRAINERS, require_parts
from twinkle.layout import Layout, build_sampler, build_together, build_trainer, check_trainer, draw_layout, plan_layout, resolved, running
from twinkle.recipes._checkpoints import existing_checkpoint, write_smollm2, write_tiny_qwen3
from twinkle.recipes._evaluate import Evaluation
from twinkle.recipes._grpo import Checks, GRPOLoop, set_up_actor, train_step
from twinkle.recipes._rollouts import INITIAL_POLICY, ROLLOUTS_FILE, read_rollouts, rollout_record
from twinkle.recipes._task import Task, make_task
from twinkle.recipes._training_state import TrainingStates, last_state
from twinkle.recipes._warmup import WarmupResult, warm_up
from twinkle.run import METRICS_FILE, Metrics, PeakMemory, Progress, RunFolder, require_tracker, say, write_curves
from twinkle_data import Template
from twinkle_data.toy import toy_tokenizer
from twinkle_sync import CheckpointEngineManager
from twinkle_train import read_checkpoint

if TYPE_CHECKING:
    from twinkle.layout import Trainer
    from twinkle_vllm import vLLMSampler

# Sampled held-out accuracy after the warm-up: outside, the RL figures say nothing (no signal, or no room).
HONEST_WARMUP = (0.35, 0.60)


@dataclass
class _Record:
    """What the run has measured so far."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[tuple[int, Evaluation]] = field(default_factory=list)
    evaluation_s: float = 0.0
    warmup: WarmupResult | None = None
    state: Path | None = None
    """The training checkpoint that the run goes on from."""
    user_state: dict[str, Any] = field(default_factory=dict)

    def go_on_from(self, state: Path, folder: RunFolder) -> None:
        """Take over what the run had measured when the checkpoint was written; what it wrote later is dropped."""
        self.state, self.user_state = state, dict(read_checkpoint(state).user_state)
        if self.user_state["warmup"] is not None:
            self.warmup = WarmupResult(**self.user_state["warmup"])
        folder.cut_lines(ROLLOUTS_FILE, self.user_state["step"])
        for row in folder.cut_lines(METRICS_FILE, self.user_state["step"]):
            kind = row.pop("kind")
            if kind == "step":
                self.steps.append(row)
            else:
                evaluation = Evaluation(sampled=row["sampled"], greedy=row["greedy"], example="")
                self.evaluations.append((row["step"], evaluation))


def run_grpo(config: GRPOConfig, console: Console) -> Path:
    """Run GRPO as configured; returns the run folder.

    Raises:
        ConfigError: settings that do not go together, a model or a record that is not there.
        RunFolderError: the run folder cannot be made or written.
        WarmupError: the warm-up did not reach its target.
    """
    started = time.perf_counter()
    runtime = RAY if config.runtime.mode == "ray" else ()
    if config.replay is not None:
        require_parts([*TRAINERS[config.backend], *runtime])
        require_tracker(config.tracker)
        return _replay(config, console, started)
    require_parts([*TRAINERS[config.backend], *SAMPLER, *TASK, *PLOT, *runtime])
    require_tracker(config.tracker)
    layout = plan_layout(config.runtime, config.backend, config.actor, config.sampler)
    if config.model is not None:
        check_trainer(existing_checkpoint(config.model), layout)
    task = make_task(config.task, validation=config.warmup.check_problems if config.warmup.enabled else 0)
    record = _Record()
    if config.resume is not None:
        folder = RunFolder.reopen(config.resume)
        record.go_on_from(last_state(config.resume), folder)
    else:
        folder = RunFolder(config.run_dir) if config.run_dir else RunFolder.default("grpo")
    folder.write_json("config.json", resolved(config, folder, layout))
    say(console, draw_layout(layout))
    say(console, f"run folder: {folder.path}")
    with running(config.runtime, layout), PeakMemory() as memory, Progress(config.steps, console) as progress:
        model = starting_checkpoint(config, task, folder)
        check_trainer(model, layout)
        progress.say("starting the actor and the sampler")
        checks = _run(config, layout, model, task, folder, progress, record)
        memory.sample()
        summary = _summary(config, record, checks, time.perf_counter() - started, memory.peak_bytes)
    _finish(folder, record, summary, console)
    return folder.path


def _run(config: GRPOConfig, layout: Layout, model: Path, task: Task, folder: RunFolder, progress: Progress, record: _Record) -> Checks:
    """Components, warm-up, steps and the checkpoint, on a runtime that runs; fills `record`."""
    actor, sampler, reference = build_components(config, layout, model)
    loop_state = record.user_state.get("loop")
    weights = CheckpointEngineManager(model=actor, sampler=sampler, first_version=1 + (loop_state["weight_version"] if loop_state else 0))
    template = Template(str(model))
    sampler.set_template(template)
    if loop_state is None and config.warmup.enabled:
        record.warmup = warm_up(
            config.warmup,
            actor=actor,
            sampler=sampler,
            weights=weights,
            template=template,
            task=task,
            max_tokens=config.max_tokens,
            micro_batch_size=config.actor.micro_batch_size,
            seed=config.seed,
            say=progress.say,
        )
        model = _keep_initial(actor, folder)
        if reference is not None:
            reference.load(str(model))
    elif loop_state is None and config.record:
        _keep_initial(actor, folder)
    loop = GRPOLoop(config, actor=actor, sampler=sampler, weights=weights, template=template, task=task, reference=reference)
    if loop_state is not None:
        actor.resume_from_checkpoint(str(record.state))
        loop.load_state_dict(loop_state)
        progress.say(f"going on after step {loop.steps}")
    states = TrainingStates(actor, folder, every=config.checkpoint_every, keep=config.checkpoint_keep, last_step=config.steps)
    with Metrics(folder, config.tracker, config.model_dump(mode="json")) as metrics:
        _train(config, loop, folder, metrics, progress, record, states)
    states.finish()
    if config.save_model:
        with folder.writing("checkpoint") as path:
            actor.save(str(path))
    return loop.checks


def starting_checkpoint(config: GRPOConfig, task: Task, folder: RunFolder) -> Path:
    """The checkpoint that the run starts from (a resumed one: its initial policy); the preset's is made inside the run folder."""
    if config.resume is not None and (folder.path / INITIAL_POLICY).is_dir():
        return existing_checkpoint(str(folder.path / INITIAL_POLICY))
    if config.model is not None:
        return existing_checkpoint(config.model)
    if config.resume is not None:
        return existing_checkpoint(str(folder.path / "model"))
    with folder.writing("model") as path:
        if config.preset == "smollm2":
            return write_smollm2(path)
        texts = [problem.user_data[key] for key in ("question", "response") for problem in task.training[:2000]]
        return write_tiny_qwen3(path, toy_tokenizer(texts), seed=config.seed)


def build_components(config: GRPOConfig, layout: Layout, model: Path) -> tuple[Trainer, vLLMSampler, Trainer | None]:
    """Build the actor, the sampler and, where it is needed, the reference; on Ray all at the same time."""
    trainer = partial(build_trainer, model, layout, config.actor, config.seed)
    builders: list[Callable[[], Any]] = [trainer, partial(build_sampler, model, layout, config)]
    if config.measure_kl or config.kl_beta > 0:
        builders.append(trainer)
    actor, sampler, *reference = [build() for build in builders] if config.runtime.mode == "local" else build_together(*builders)
    return actor, sampler, reference[0] if reference else None


def _keep_initial(actor: Trainer, folder: RunFolder) -> Path:
    with folder.writing(INITIAL_POLICY) as path:
        actor.save(str(path))
    return path


def _train(
    config: GRPOConfig, loop: GRPOLoop, folder: RunFolder, metrics: Metrics, progress: Progress, record: _Record, states: TrainingStates
) -> None:
    if not record.evaluations:
        _evaluate(loop, 0, metrics, progress, record)
    warmup = None if record.warmup is None else asdict(record.warmup)
    for step in range(loop.steps + 1, config.steps + 1):
        row, features, rewards = loop.step()
        record.steps.append(row)
        metrics.write("step", row)
        if config.record:
            folder.append_line(ROLLOUTS_FILE, rollout_record(step, features, rewards))
        progress.step(row)
        if config.eval_every and step % config.eval_every == 0 and step < config.steps:
            _evaluate(loop, step, metrics, progress, record)
        states.after(step, lambda: {"loop": loop.state_dict(), "warmup": warmup})
    if config.steps and record.evaluations[-1][0] != config.steps:
        _evaluate(loop, config.steps, metrics, progress, record)


def _evaluate(loop: GRPOLoop, step: int, metrics: Metrics, progress: Progress, record: _Record) -> None:
    start = time.perf_counter()
    result = loop.evaluate()
    record.evaluation_s += time.perf_counter() - start
    record.evaluations.append((step, result))
    metrics.write("evaluation", {"step": step, "sampled": result.sampled, "greedy": result.greedy})
    progress.say(f"held-out exact match after step {step}: sampled {result.sampled:.3f}, greedy {result.greedy:.3f}")
    progress.say(f"one of them, greedy: {result.example}")


def _summary(config: GRPOConfig, record: _Record, checks: Checks, seconds: float, peak_bytes: int) -> dict[str, Any]:
    before, after = record.evaluations[0][1], record.evaluations[-1][1]
    low, high = HONEST_WARMUP
    return {
        "preset": config.preset,
        "seed": config.seed,
        "steps": len(record.steps),
        "eval_before": before.sampled,
        "eval_after": after.sampled,
        "eval_greedy_before": before.greedy,
        "eval_greedy_after": after.greedy,
        "warmup": {"steps": record.warmup.steps, "accuracy": record.warmup.accuracy, "seconds": record.warmup.seconds} if record.warmup else None,
        "warmup_in_range": low <= before.sampled <= high if record.warmup else None,
        "checks": checks.to_summary(),
        "seconds": seconds,
        "seconds_of": {
            "warm-up": record.warmup.seconds if record.warmup else 0.0,
            "steps": sum(row[part] for row in record.steps for part in ("sync_s", "sample_s", "reward_s", "train_s")),
            "evaluation": record.evaluation_s,
        },
        "peak_memory_bytes": peak_bytes,
    }


def _finish(folder: RunFolder, record: _Record, summary: dict[str, Any], console: Console) -> None:
    folder.write_json("summary.json", summary)
    evaluations = [{"step": step, "sampled": result.sampled, "greedy": result.greedy} for step, result in record.evaluations]
    with folder.writing("curves.png") as path:
        write_curves(path, record.steps, evaluations)
    say(
        console,
        f"held-out exact match: sampled {summary['eval_before']:.3f} -> {summary['eval_after']:.3f}, "
        f"greedy {summary['eval_greedy_before']:.3f} -> {summary['eval_greedy_after']:.3f}; "
        f"{summary['seconds']:.0f} s, peak memory {summary['peak_memory_bytes'] / 2**30:.1f} GiB; written to {folder.path}",
    )
    if summary["warmup_in_range"] is False:
        console.print(f"the warm-up ended outside {HONEST_WARMUP}: this run's gain says little", style="yellow")


def _replay(config: GRPOConfig, console: Console, started: float) -> Path:
    """Train on recorded rollouts: no sampler, no evaluation; the losses and gradient norms are what is compared."""
    assert config.replay is not None
    source = config.replay.expanduser().absolute()  # workers of a running cluster have another current folder
    rollouts = read_rollouts(source)
    first = next(rollouts, None)
    layout = plan_layout(config.runtime, config.backend, config.actor)
    check_trainer(source / INITIAL_POLICY, layout)
    folder = RunFolder(config.run_dir) if config.run_dir else RunFolder.default("grpo-replay")
    folder.write_json("config.json", resolved(config, folder, layout))
    say(console, draw_layout(layout))
    metrics = Metrics(folder, config.tracker, config.model_dump(mode="json"))
    with running(config.runtime, layout), Progress(config.steps, console) as progress, metrics:
        actor = build_trainer(source / INITIAL_POLICY, layout, config.actor, config.seed)
        set_up_actor(actor, config)
        count = 0
        while first is not None and count < config.steps:
            step, features, rewards = first
            row = {"step": step, "reward": sum(rewards) / len(rewards), **train_step(actor, features, config)}
            metrics.write("step", row)
            progress.say(f"replayed step {step}: loss {row['loss']:.9f}, gradient norm {row['grad_norm']:.9f}")
            count += 1
            first = next(rollouts, None)
    folder.write_json("summary.json", {"replay": str(source), "steps": count, "seconds": time.perf_counter() - started})
    return folder.path
