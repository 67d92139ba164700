"""Configuration of `twinkle grpo` and its presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from twinkle.config._base import CommandConfig
from twinkle.config._common import ActorConfig, Backend, RuntimeConfig, SamplerConfig, TaskConfig, TrackerName, WarmupConfig


class GRPOConfig(CommandConfig):
    """Reinforcement learning with group-relative policy optimisation (GRPO, arXiv 2402.03300)."""

    preset: Literal["tiny", "smollm2"] = "tiny"
    """Where the defaults come from: 'tiny' makes a small Qwen3 and warms it up; 'smollm2' is SmolLM2-135M-Instruct."""
    model: str | None = None
    """Folder of a Hugging Face checkpoint to start from; empty: what the preset brings."""
    run_dir: Path | None = None
    """Folder for everything that the run writes; empty: runs/<command>-<time>."""
    seed: int = Field(default=0, ge=0)
    """Seed of the model's initialisation, of the order of the data and of sampling."""
    steps: int = Field(default=120, ge=0)
    """GRPO steps (one weight sync, one rollout, one or more updates each)."""
    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts of one rollout."""
    num_samples: int = Field(default=8, ge=2)
    """Completions of each prompt: the group that the advantages are relative to."""
    max_tokens: int = Field(default=11, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; it travels with every token to the loss."""
    lr: float = Field(default=2e-4, gt=0)
    """Peak learning rate (Adam, betas 0.9 and 0.95)."""
    lr_warmup_steps: int = Field(default=5, ge=0)
    """Steps of linear learning-rate warm-up."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Adam's epsilon; a large one (1e-3) keeps rounding differences between layouts from being amplified."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """PPO ratios below 1 - clip_low are clipped."""
    clip_high: float = Field(default=0.28, gt=0)
    """PPO ratios above 1 + clip_high are clipped (clip-higher, arXiv 2503.14476)."""
    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term to the frozen initial policy in the loss (0: the KL is only measured)."""
    measure_kl: bool = True
    """Keep the frozen initial policy beside the actor and measure the KL to it at every step."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Whose log-probabilities the PPO ratio starts from; with 'trainer' they are recomputed before the update."""
    async_steps: int = Field(default=0, ge=0)
    """Steps that the sampler is ahead: it samples the next batches while the actor trains on an older one, whose tokens are weighted for the
    difference (0: one after the other, on-policy)."""
    importance_cap: float = Field(default=2.0, ge=1)
    """With --async-steps: no token counts more than so many times for being likelier now than when it was sampled."""
    advantage: Literal["group", "shuffled", "likelihood"] = "group"
    """'group' is GRPO; the other two are controls that must not learn: advantages shuffled within each group, and
    the policy's own likelihood as the reward."""
    tracker: TrackerName = "none"
    """Also send the metrics there; files of trackers are in run_dir/tracker. W&B is offline unless WANDB_MODE says otherwise."""
    eval_every: int = Field(default=40, ge=0)
    """Steps between two evaluations on held-out problems (0: only before and after)."""
    eval_samples: int = Field(default=2, ge=1)
    """Samples of each held-out problem at the training temperature (greedy decoding is evaluated beside it)."""
    record: bool = False
    """Keep every rollout in run_dir/rollouts.jsonl, so that `--replay` can train on it again."""
    replay: Path | None = None
    """Train on the rollouts of an earlier run's folder instead of sampling (for comparing layouts)."""
    save_model: bool = True
    """Write the trained model as a Hugging Face checkpoint into the run folder."""
    resume: Path | None = None
    """Go on with the run in this folder, from its last training checkpoint, with its settings (--steps, --actor, --runtime and what is written may
    differ); empty: begin a run."""
    checkpoint_every: int = Field(default=50, ge=0)
    """Steps between two training checkpoints, from which `--resume` goes on (0: none). They are written while training goes on."""
    checkpoint_keep: int = Field(default=2, ge=1)
    """How many training checkpoints are kept; older ones are deleted."""
    task: TaskConfig = TaskConfig()
    """The problems."""
    backend: Backend = "megatron"
    """Who trains: 'megatron' (MegatronModel), or 'transformers' (TransformersModel: any causal language model of transformers)."""
    actor: ActorConfig = ActorConfig()
    """The trainer group."""
    sampler: SamplerConfig = SamplerConfig()
    """The sampler group."""
    warmup: WarmupConfig = WarmupConfig()
    """The supervised warm-up."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Where the components run."""

    @classmethod
    def presets(cls) -> dict[str, dict[str, Any]]:
        """Defaults of each preset; anything not named keeps the class's default."""
        return {
            "tiny": {},
            "smollm2": {
                "steps": 20,
                "prompts_per_step": 4,
                "num_samples": 4,
                "max_tokens": 16,
                "lr": 1e-6,
                "eval_every": 0,
                "eval_samples": 1,
                "task": {"size": 2000, "held_out": 32, "few_shot": 3},
                "sampler": {"max_model_len": 384, "max_num_seqs": 64, "kv_cache_bytes": 512 << 20},
                "warmup": {"enabled": False},
                "actor": {"micro_batch_size": 4},
            },
        }

    @classmethod
    def may_change_on_resume(cls) -> frozenset[str]:
        """Also what is measured and recorded, and where samples are made."""
        return super().may_change_on_resume() | {"eval_every", "eval_samples", "sampler"}

    @classmethod
    def defaults_for_own_model(cls) -> dict[str, Any]:
        """A model of one's own is not warmed up on arithmetic unless that is asked for."""
        return {"warmup": {"enabled": False}}

    @model_validator(mode="after")
    def _check(self) -> GRPOConfig:
        if self.resume is not None and self.replay is not None:
            raise ValueError("--resume goes on with a run, --replay trains on the record of one: leave one of them out")
        if self.runtime.mode == "local" and (self.actor.world_size > 1 or self.sampler.dp > 1):
            raise ValueError(
                f"mode 'local' is one process, but the actor asks for {self.actor.world_size} ranks and the sampler for {self.sampler.dp}; "
                "use --runtime.mode ray, or leave the sizes at 1"
            )
        if self.runtime.mode == "local" and self.async_steps:
            raise ValueError("--async-steps lets two groups work at the same time, and mode 'local' is one process: use --runtime.mode ray")
        if self.replay is not None and self.async_steps:
            raise ValueError("--replay samples nothing: leave --async-steps out")
        self.actor.check(self.backend)
        if self.warmup.enabled and self.warmup.max_steps < self.warmup.min_steps:
            raise ValueError(
                f"warmup.max_steps={self.warmup.max_steps} ends the warm-up before its first look at the accuracy, at step {self.warmup.min_steps}: "
                "raise --warmup.max-steps, lower --warmup.min-steps, or leave the warm-up out with --no-warmup.enabled"
            )
        rows = self.prompts_per_step * self.num_samples
        if rows % self.actor.data_size:
            raise ValueError(
                f"{self.prompts_per_step} prompts x {self.num_samples} samples = {rows} sequences do not divide over the actor's "
                f"{self.actor.data_size} data ranks (dp x fsdp)"
            )
        if self.prompts_per_step < self.sampler.dp:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} is less than sampler.dp={self.sampler.dp}: some engines would have nothing to do"
            )
        return self
