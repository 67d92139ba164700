"""Configuration of `twinkle sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from twinkle.config._base import CommandConfig
from twinkle.config._common import ActorConfig, Backend, RuntimeConfig, TaskConfig, TrackerName


class SFTConfig(CommandConfig):
    """Supervised fine-tuning on chat data, or on the arithmetic task's worked answers."""

    preset: Literal["tiny"] = "tiny"
    """Where the defaults come from: 'tiny' makes a small Qwen3."""
    model: str | None = None
    """Folder of a Hugging Face checkpoint to start from; empty: what the preset brings."""
    dataset: Path | None = None
    """A JSONL, JSON, Parquet or CSV file of conversations: OpenAI messages, ShareGPT, Alpaca, prompt and completion, or question and answer;
    empty: the arithmetic task."""
    run_dir: Path | None = None
    """Folder for everything that the run writes; empty: runs/<command>-<time>."""
    seed: int = Field(default=0, ge=0)
    """Seed of the model's initialisation and of the order of the data."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps; the data is repeated as often as needed."""
    batch_size: int = Field(default=64, ge=1)
    """Sequences a step, over all data ranks."""
    max_length: int | None = Field(default=None, ge=2)
    """Longest sequence in tokens; longer ones are an error that names the row."""
    lr: float = Field(default=3e-3, gt=0)
    """Peak learning rate (Adam, betas 0.9 and 0.98)."""
    lr_warmup_steps: int = Field(default=50, ge=0)
    """Steps of linear learning-rate warm-up."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Adam's epsilon; a large one (1e-3) keeps rounding differences between layouts from being amplified."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""
    tracker: TrackerName = "none"
    """Also send the metrics there; files of trackers are in run_dir/tracker. W&B is offline unless WANDB_MODE says otherwise."""
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
    """The problems, where no dataset is given."""
    backend: Backend = "megatron"
    """Who trains: 'megatron' (MegatronModel), or 'transformers' (TransformersModel: any causal language model of transformers)."""
    actor: ActorConfig = ActorConfig()
    """The trainer group."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Where the components run."""

    @classmethod
    def presets(cls) -> dict[str, dict[str, Any]]:
        """Defaults of each preset; anything not named keeps the class's default."""
        return {"tiny": {}}

    @model_validator(mode="after")
    def _check(self) -> SFTConfig:
        if self.runtime.mode == "local" and self.actor.world_size > 1:
            raise ValueError(
                f"mode 'local' is one process, but the actor asks for {self.actor.world_size} ranks; use --runtime.mode ray, or leave the sizes at 1"
            )
        self.actor.check(self.backend)
        if self.batch_size < self.actor.data_size:
            raise ValueError(
                f"batch_size={self.batch_size} is less than the actor's {self.actor.data_size} data ranks (dp x fsdp): some would have nothing to do"
            )
        return self
