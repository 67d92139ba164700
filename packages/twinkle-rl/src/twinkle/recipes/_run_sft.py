"""The whole job behind `twinkle sft`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from twinkle._errors import ConfigError
from twinkle.config import SFTConfig
from twinkle.installed import RAY, TRAINERS, require_parts
from twinkle.layout import build_trainer, check_trainer, draw_layout, plan_layout, resolved, running
from twinkle.recipes._checkpoints import existing_checkpoint, write_tiny_qwen3
from twinkle.recipes._task import make_task
from twinkle.recipes._training_state import TrainingStates, last_state
from twinkle.recipes._warmup import set_up_sft, sft_step
from twinkle.run import METRICS_FILE, Interruption, Metrics, PeakMemory, RunFolder, require_tracker, say
from twinkle_data import DataError, DataLoader, Dataset, Template, Trajectory
from twinkle_data.toy import toy_tokenizer

if TYPE_CHECKING:
    from twinkle.layout import Trainer


def run_sft(config: SFTConfig, console: Console) -> Path:
    """Supervised fine-tuning as configured; returns the run folder with `metrics.jsonl`, `summary.json` and the checkpoint.

    Raises:
        ConfigError: settings that do not go together, a model or a dataset that is not there.
        RunFolderError: the run folder cannot be made or written.
    """
    started = time.perf_counter()
    require_parts([*TRAINERS[config.backend], *(RAY if config.runtime.mode == "ray" else ())])
    require_tracker(config.tracker)
    layout = plan_layout(config.runtime, config.backend, config.actor)
    if config.model is not None:
        check_trainer(existing_checkpoint(config.model), layout)
    conversations, texts = _conversations(config)
    if len(conversations) < config.batch_size:
        raise ConfigError(f"the data has {len(conversations)} conversations, less than one batch of {config.batch_size}; lower --batch-size")
    folder, state = _open(config)
    folder.write_json("config.json", resolved(config, folder, layout))
    say(console, draw_layout(layout))
    say(console, f"run folder: {folder.path}")
    model = _starting_checkpoint(config, texts, folder)
    check_trainer(model, layout)
    with running(config.runtime, layout), PeakMemory() as memory, Interruption() as interruption:
        template = Template(str(model), max_length=config.max_length)
        actor = build_trainer(model, layout, config.actor, config.seed)
        with Metrics(folder, config.tracker, config.model_dump(mode="json")) as metrics:
            losses = _train(config, actor, template, conversations, folder, metrics, state, console, interruption)
        if config.save_model:
            with folder.writing("checkpoint") as path:
                actor.save(str(path))
        memory.sample()
    summary = {"steps": len(losses), "loss_first": losses[0], "loss_last": losses[-1], "seconds": time.perf_counter() - started}
    folder.write_json("summary.json", {**summary, "peak_memory_bytes": memory.peak_bytes})
    say(console, f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {summary['seconds']:.0f} s; written to {folder.path}")
    return folder.path


def _open(config: SFTConfig) -> tuple[RunFolder, Path | None]:
    """The run folder, and the training checkpoint to go on from."""
    if config.resume is not None:
        return RunFolder.reopen(config.resume), last_state(config.resume)
    return RunFolder(config.run_dir) if config.run_dir else RunFolder.default("sft"), None


def _train(
    config: SFTConfig,
    actor: Trainer,
    template: Template,
    conversations: list[Trajectory],
    folder: RunFolder,
    metrics: Metrics,
    state: Path | None,
    console: Console,
    interruption: Interruption,
) -> list[float]:
    """All steps, or those that are left; returns the losses of all."""
    set_up_sft(actor, lr=config.lr, lr_warmup_steps=config.lr_warmup_steps, adam_eps=config.adam_eps)
    loader = DataLoader(conversations, batch_size=config.batch_size, shuffle=True, seed=config.seed, num_epochs=None)
    losses: list[float] = []
    done = 0
    if state is not None:
        user_state = actor.resume_from_checkpoint(str(state))
        done = user_state["step"]
        loader.load_state_dict(user_state["loader"])
        losses = [row["loss"] for row in folder.cut_lines(METRICS_FILE, done)]
        say(console, f"going on after step {done}")
    states = TrainingStates(actor, folder, every=config.checkpoint_every, keep=config.checkpoint_keep, last_step=config.steps)
    for step, batch in zip(range(done + 1, config.steps + 1), loader, strict=False):
        interruption.check()
        sft_step(actor, template, batch, max_grad_norm=config.max_grad_norm, micro_batch_size=config.actor.micro_batch_size)
        row: dict[str, Any] = {"step": step, **dict(actor.calculate_metric())}
        metrics.write("step", row)
        losses.append(row["loss"])
        if step == 1 or step % 10 == 0 or step == config.steps:
            console.print(f"step {step}/{config.steps}  loss {row['loss']:.4f}  gradient norm {row['grad_norm']:.4f}", highlight=False)
        states.after(step, lambda: {"loader": loader.state_dict()})
    states.finish()
    return losses


def _starting_checkpoint(config: SFTConfig, texts: list[str], folder: RunFolder) -> Path:
    if config.model is not None:
        return existing_checkpoint(config.model)
    if config.resume is not None:
        return existing_checkpoint(str(folder.path / "model"))
    with folder.writing("model") as path:
        return write_tiny_qwen3(path, toy_tokenizer(texts), seed=config.seed)


def _conversations(config: SFTConfig) -> tuple[list[Trajectory], list[str]]:
    """The conversations to train on, and texts for the preset's tokenizer."""
    if config.dataset is None:
        task = make_task(config.task, validation=0)
        texts = [problem.user_data[key] for key in ("question", "response") for problem in task.training[:2000]]
        return [task.worked(problem) for problem in task.training], texts
    if not config.dataset.is_file():
        raise ConfigError(f"--dataset {config.dataset}: there is no such file; give a JSONL, JSON, Parquet or CSV file of conversations")
    try:
        rows = list(Dataset(str(config.dataset)).conversations())
    except DataError as error:
        raise ConfigError(f"--dataset {config.dataset}: {error}") from error
    pairs = [index for index, row in enumerate(rows) if not isinstance(row, Trajectory)]
    if pairs:
        raise ConfigError(
            f"--dataset {config.dataset}: row {pairs[0]} is a preference pair (chosen and rejected); sft trains on conversations: "
            "keep the chosen answer of each as `messages`"
        )
    return rows, [message.content for row in rows[:2000] for message in row.messages]
