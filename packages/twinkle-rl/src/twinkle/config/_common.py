"""Settings that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Mode = Literal["ray", "local"]
Backend = Literal["megatron", "transformers"]
TrackerName = Literal["none", "tensorboard", "wandb", "swanlab", "trackio"]


class Section(BaseModel):
    """A part of a command's configuration: unknown keys are errors, attribute docstrings become the help texts."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ActorConfig(Section):
    """The trainer group: how the model is laid out over its ranks."""

    dp: int = Field(default=1, ge=1)
    """Data parallel size."""
    tp: int = Field(default=1, ge=1)
    """Tensor parallel size; backend megatron."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallel size; backend megatron."""
    vpp: int | None = Field(default=None, ge=2)
    """Virtual pipeline stages per rank (interleaved schedule); needs pp of at least 2; backend megatron."""
    sequence_parallel: bool = False
    """Megatron-style sequence parallel; needs tp of at least 2; backend megatron."""
    fsdp: int = Field(default=1, ge=1)
    """Ranks that share the weights and have data of their own (FSDP2); backend transformers."""
    ulysses: int = Field(default=1, ge=1)
    """Ranks that share each sequence (Ulysses sequence parallel); backend transformers."""
    mixed_precision: Literal["no", "bf16"] = "no"
    """Number format of the computation: 'no' is fp32."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Sequences of one forward and backward pass on a rank; empty: the whole share of the rank at once."""

    @property
    def world_size(self) -> int:
        """Number of trainer processes."""
        return self.data_size * self.tp * self.pp * self.ulysses

    @property
    def data_size(self) -> int:
        """Number of ranks with data of their own."""
        return self.dp * self.fsdp

    def check(self, backend: Backend) -> None:
        """ValueError for sizes that do not go together, or that the backend does not have."""
        if backend == "megatron":
            if self.fsdp > 1 or self.ulysses > 1:
                raise ValueError(
                    "actor.fsdp and actor.ulysses are layouts of --backend transformers; megatron has --actor.dp, --actor.tp and --actor.pp"
                )
        elif self.tp > 1 or self.pp > 1 or self.vpp is not None or self.sequence_parallel:
            raise ValueError(
                "actor.tp, actor.pp, actor.vpp and actor.sequence_parallel are layouts of --backend megatron; transformers has --actor.dp, "
                "--actor.fsdp and --actor.ulysses"
            )
        if self.sequence_parallel and self.tp < 2:
            raise ValueError("actor.sequence_parallel splits activations over the tensor parallel ranks: set --actor.tp 2 or more")
        if self.vpp is not None and self.pp < 2:
            raise ValueError("actor.vpp interleaves the stages of a pipeline: set --actor.pp 2 or more")


class SamplerConfig(Section):
    """The sampler group: vLLM engines, one a rank."""

    dp: int = Field(default=1, ge=1)
    """Number of vLLM engines; the prompts are split over them."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the engine."""
    max_model_len: int = Field(default=64, ge=8)
    """Longest prompt plus completion, in tokens."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Most sequences that an engine decodes at once."""
    kv_cache_bytes: int = Field(default=64 << 20, ge=1 << 20)
    """Size of the key-value cache of an engine, in bytes."""


class RuntimeConfig(Section):
    """Where and how the components run."""

    mode: Mode = "ray"
    """'ray': every group in its own worker processes; 'local': all in this process (world size 1)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Hardware of both groups; 'auto' takes CUDA devices where the machine has them, else the CPU."""
    address: str | None = None
    """Address of a running Ray cluster; empty: start a Ray of our own and end it with the run."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for the workers to start, in seconds."""
    call_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait for one call to a component, in seconds."""
    threads_per_worker: int | None = Field(default=None, ge=1)
    """Threads of each worker's computation (OMP_NUM_THREADS); empty: the node's cores over the workers of its group there."""
    trace: Path | None = None
    """Write a timeline of every remote call here (open it with Perfetto)."""


class WarmupConfig(Section):
    """Supervised warm-up that teaches a fresh model the answer's form before RL."""

    enabled: bool = True
    """Run the warm-up: on for the model that preset tiny makes, off where --model is given."""
    target_accuracy: float = Field(default=0.40, gt=0, lt=1)
    """Stop when the sampled accuracy on problems kept out of the warm-up reaches this."""
    min_steps: int = Field(default=250, ge=1)
    """Steps before the first look at the accuracy."""
    max_steps: int = Field(default=1200, ge=1)
    """Give up with an error after this many steps."""
    check_every: int = Field(default=25, ge=1)
    """Steps between two looks at the accuracy."""
    check_problems: int = Field(default=512, ge=1)
    """Problems of one look, kept out of the warm-up's training data."""
    batch_size: int = Field(default=64, ge=1)
    """Problems a step."""
    lr: float = Field(default=3e-3, gt=0)
    """Peak learning rate (Adam, betas 0.9 and 0.98)."""
    lr_warmup_steps: int = Field(default=50, ge=0)
    """Steps of linear learning-rate warm-up."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""


class TaskConfig(Section):
    """The arithmetic task: sums and differences of `terms` numbers of `digits` digits (reasoning-gym's chain_sum)."""

    terms: int = Field(default=4, ge=2, le=8)
    """Numbers in an expression."""
    digits: int = Field(default=1, ge=1, le=4)
    """Digits of each number."""
    size: int = Field(default=20_000, ge=100)
    """Problems to draw before duplicates are dropped."""
    seed: int = 1234
    """Seed of the problems (not of the model)."""
    held_out: int = Field(default=1000, ge=10)
    """Held-out problems of an evaluation; none shares its expression with a training problem."""
    few_shot: int = Field(default=0, ge=0, le=8)
    """Worked examples put before each question, for models that were not trained on this task."""
