"""Supervised warm-up: the model learns the answer's form, and stops well before it has learned the task."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinkle._errors import WarmupError
from twinkle.config import WarmupConfig
from twinkle.recipes._evaluate import accuracy
from twinkle.recipes._task import Task
from twinkle_data import DataLoader, SamplingParams, Template, Trajectory
from twinkle_sync import CheckpointEngineManager

if TYPE_CHECKING:
    from twinkle.layout import Trainer
    from twinkle_vllm import vLLMSampler


@dataclass(frozen=True, kw_only=True)
class WarmupResult:
    """How the warm-up ended: optimizer steps, sampled accuracy on problems kept out of it, seconds."""

    steps: int
    accuracy: float
    seconds: float


def set_up_sft(actor: Trainer, *, lr: float, lr_warmup_steps: int, adam_eps: float = 1e-8) -> None:
    """Give the actor cross-entropy, a fresh Adam (betas 0.9 and 0.98) and its schedule."""
    actor.set_loss("cross_entropy")
    actor.set_optimizer("adam", lr=lr, betas=(0.9, 0.98), weight_decay=0.0, eps=adam_eps)
    actor.set_lr_scheduler("constant", warmup_steps=lr_warmup_steps)


def sft_step(actor: Trainer, template: Template, batch: Sequence[Trajectory], *, max_grad_norm: float, micro_batch_size: int | None) -> float | None:
    """One update on a batch of whole conversations; returns its loss."""
    features = template.batch_encode(batch)
    loss = actor.forward_backward(features, micro_batch_size=micro_batch_size).loss
    actor.clip_grad_and_step(max_grad_norm)
    return loss


def warm_up(
    config: WarmupConfig,
    *,
    actor: Trainer,
    sampler: vLLMSampler,
    weights: CheckpointEngineManager,
    template: Template,
    task: Task,
    max_tokens: int,
    micro_batch_size: int | None,
    seed: int,
    say: Callable[[str], None],
) -> WarmupResult:
    """Train on worked answers until the sampled accuracy on `task.validation` reaches the target.

    Raises:
        WarmupError: it does not within `config.max_steps`.
    """
    start = time.perf_counter()
    say(f"warm-up on worked answers; the first look at the accuracy is after step {config.min_steps}")
    set_up_sft(actor, lr=config.lr, lr_warmup_steps=config.lr_warmup_steps)
    problems = task.validation[: config.check_problems]
    prompts = [template.encode(problem, add_generation_prompt=True) for problem in problems]
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, logprobs=False)
    worked = [task.worked(problem) for problem in task.training]
    loader = DataLoader(worked, batch_size=config.batch_size, shuffle=True, seed=seed, num_epochs=None)
    for step, batch in enumerate(loader, 1):
        loss = sft_step(actor, template, batch, max_grad_norm=config.max_grad_norm, micro_batch_size=micro_batch_size)
        if step >= config.min_steps and (step - config.min_steps) % config.check_every == 0:
            weights.sync_weights()
            share, _ = accuracy(sampler, prompts, problems, task.reward, params)
            say(f"warm-up step {step}: loss {loss:.4f}, sampled accuracy {share:.3f} on {len(problems)} problems kept out of it")
            if share >= config.target_accuracy:
                return WarmupResult(steps=step, accuracy=share, seconds=time.perf_counter() - start)
        if step >= config.max_steps:
            break
    raise WarmupError(
        f"the warm-up ended after {config.max_steps} steps below the target accuracy {config.target_accuracy}; "
        "raise --warmup.max-steps, or lower --warmup.target-accuracy"
    )
