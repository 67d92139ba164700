"""The trainer contract: what a training script may call, and what every trainer guarantees."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinkle_data import InputFeature, InputProcessor, ModelOutput, PackedFeature, Template, Trajectory

from ._lora import HasToDict, LoraConfig
from ._loss import LossInput, LossOutput
from ._metrics import AnyMetric

Row = InputFeature | PackedFeature
"""An encoded row: one sequence, or several that do not see one another."""

Inputs = Sequence[InputFeature] | Sequence[Row] | Sequence[Trajectory]
"""A batch: encoded rows, or conversations where a template was set."""


class TrainModel(ABC):
    """A model in training, on one rank of its mesh. Every rank of the mesh calls the same methods in the same order.

        What holds for all implementations, and is checked by `twinkle_train.testing.conformance`:

        - Every method takes this rank's share of the batch (remote dispatch or the data loader has sliced it).
        - Losses, weights, metrics and norms are reduced over all ranks before they are returned: every layout gives one number.
        - Gradients of the **sum** of the loss accumulate over calls; `clip_grad_norm` and `step` divide them once, by the global weight of
          all calls. So the result does not depend on layout, micro-batch size, or how a batch is divided over calls.
        - Results are one array a row. A packed row's has those of its sequences one after another, 0 at the first token of each. A trainer that
      cannot keep sequences of a row apart refuses packed rows.
    - Log-probabilities are at each row's `temperature`: logits are divided by it before the log-softmax.
        - `adapter_name` is compared exactly; '' is the base model. Adapters share no loss, optimizer, gradient or counter.

        Order of calls (anything else is a CallOrderError that names the missing call):
        set_loss, set_optimizer, then any number of (forward, calculate_loss, backward) or forward_backward, then at most one clip_grad_norm, step,
        zero_grad, and lr_step; `clip_grad_and_step` is these four. `forward_only` may come anywhere and disturbs nothing.
    """

    @abstractmethod
    def forward(self, inputs: Inputs, *, adapter_name: str = "") -> ModelOutput:
        """Runs the model on all rows at once and keeps the graph for `calculate_loss` and `backward`.

        Returns log-probabilities and entropies, one [T] a row, aligned with `input_ids`; no loss. Where the model is a pipeline there is no
        graph to keep: `calculate_loss` works, `backward` is an error that names `forward_backward`. Ranks that are not on the last
        stage return neither.

        Raises InputError without rows.
        """

    @abstractmethod
    def calculate_loss(self, *, adapter_name: str = "") -> float:
        """The global loss of the last `forward`: its sum over all ranks divided by its weight over all ranks.

        Raises CallOrderError without a forward or a loss, PeerError when the loss failed on another rank.
        """

    @abstractmethod
    def backward(self, *, adapter_name: str = "") -> None:
        """Adds the gradients of the last loss's sum to those accumulated, and its global weight to theirs. Uses the forward up.

        Raises CallOrderError before calculate_loss, a second time, after clip_grad_norm or step without zero_grad, and on a pipeline.
        """

    @abstractmethod
    def forward_only(
        self,
        inputs: Inputs,
        micro_batch_size: int | None = None,
        adapter_name: str = "",
        *,
        micro_batch_tokens: int | None = None,
        top_k: int = 0,
        logits: bool = False,
    ) -> ModelOutput:
        """Log-probabilities and entropies without a graph, as `forward` returns them, in micro-batches of that many rows.

        micro_batch_tokens: instead of a number of rows, how many tokens a micro-batch has at most (padding counts, where rows are padded); rows of
        like lengths go together then, and come back in their order. top_k: also the so many likeliest tokens after each token, and their
        log-probabilities. logits: also all logits, whole, whatever the layout; they are large.

        On MegatronModel, TransformersModel and other remote trainers the result is lazy, in every mode: `forward_only(rows).get().logprobs`.

        Changes nothing: gradients, a pending forward and metrics stay as they are.

        Raises InputError without rows or for a row that is longer than micro_batch_tokens, ConfigError for sizes below 1, both sizes, or a
        top_k that is no number of tokens of the vocabulary.
        """

    @abstractmethod
    def forward_backward(
        self, inputs: Inputs, micro_batch_size: int | None = None, adapter_name: str = "", *, micro_batch_tokens: int | None = None
    ) -> ModelOutput:
        """Loss and gradients of the rows, in micro-batches of that many rows (all at once when None).

        Accumulates as `backward` does. Returns the global loss, its weight, the loss's metrics over all ranks, and this rank's
        log-probabilities and entropies. The loss does not depend on `micro_batch_size` or `micro_batch_tokens` (see `forward_only`).

        Raises CallOrderError without a loss, or after clip_grad_norm or step without zero_grad; InputError for rows that lack what the
        loss needs; PeerError when another rank failed; NonFiniteError when the loss is not finite (where the trainer skips such steps, it
        returns the loss as it is).
        """

    @abstractmethod
    def clip_grad_norm(self, max_grad_norm: float = 1.0, *, adapter_name: str = "") -> float:
        """Divides the accumulated gradients by their global weight and scales them so that their norm is at most `max_grad_norm`.

        Returns the global 2-norm before clipping (after the division), each weight counted once whatever the layout. `inf` only measures.

        Raises CallOrderError without gradients, InputError when no token was trained on, NonFiniteError when the norm is not finite (where the
        trainer skips such steps, it returns the norm as it is).
        """

    @abstractmethod
    def step(self, *, adapter_name: str = "") -> None:
        """One optimizer step with the accumulated gradients divided by their global weight (once, also after clip_grad_norm).

        Where the trainer skips steps whose loss or gradient is not finite, such a one changes nothing and is not counted.

        Raises CallOrderError without an optimizer or gradients, or twice without zero_grad and new gradients, NonFiniteError when a gradient is not
        finite.
        """

    @abstractmethod
    def zero_grad(self, *, adapter_name: str = "") -> None:
        """Drops accumulated gradients and their weight."""

    @abstractmethod
    def lr_step(self, *, adapter_name: str = "") -> float:
        """Sets the learning rate to the schedule's at the number of steps taken, and returns it. Calling it twice is harmless."""

    @abstractmethod
    def clip_grad_and_step(self, max_grad_norm: float = 1.0, *, adapter_name: str = "") -> float:
        """clip_grad_norm, step, zero_grad and lr_step. Returns the norm before clipping."""

    @abstractmethod
    def set_loss(self, loss: str | type | Callable[[LossInput], LossOutput], *, adapter_name: str = "", **options: Any) -> None:
        """The loss: a name ('cross_entropy', 'grpo', ...; a wrong one lists them), a class, or a callable.

        The options go to its constructor (see `resolve_loss`).

        Metrics that were not taken yet are forgotten: they are those of the loss before.
        """

    @abstractmethod
    def set_optimizer(
        self,
        name: str | type[torch.optim.Optimizer] = "adamw",
        lr: float = 1e-5,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        options: Mapping[str, Any] | None = None,
        adapter_name: str = "",
    ) -> None:
        """A fresh optimizer (see `OptimizerConfig`): no state, step counter 0, constant learning rate until set_lr_scheduler.

        name: or a class of torch.optim, where the engine has it.
        """

    @abstractmethod
    def adjust_optimizer(
        self,
        *,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        adapter_name: str = "",
    ) -> None:
        """Other settings for the optimizer that is there, from the next step on; None keeps one. Its states, the step counter and the schedule
        stay (`lr` is the rate that the schedule multiplies).

        Raises CallOrderError without an optimizer, ConfigError for values out of range.
        """

    @abstractmethod
    def set_lr_scheduler(
        self,
        name: str = "constant",
        *,
        warmup_steps: int = 0,
        total_steps: int | None = None,
        min_lr_ratio: float = 0.0,
        decay_steps: int | None = None,
        adapter_name: str = "",
    ) -> None:
        """The learning-rate schedule (see `LRSchedule`), counted in optimizer steps. Raises CallOrderError before set_optimizer."""

    @abstractmethod
    def add_adapter_to_model(self, adapter_name: str, config: LoraConfig | HasToDict | Mapping[str, Any]) -> None:
        """Puts a low-rank adapter (see `LoraConfig`) on the model; from now on its name is an `adapter_name`. All ranks call it.

        It begins as peft's do, with an update of zero, in every layout alike. It has a loss, optimizer, schedule, gradients and counters of its own;
        training it changes neither the base model nor other adapters.

        Raises ConfigError for a name that is taken or empty, and for a configuration that this model or layout cannot have.
        """

    @abstractmethod
    def remove_adapter(self, adapter_name: str) -> None:
        """Takes an adapter off the model and frees its memory, optimizer and gradients; the name may be used again. All ranks call it.

        Raises ConfigError for '', the base model; UnknownAdapterError when there is none of that name.
        """

    @abstractmethod
    def set_template(self, template: Template | str, *, adapter_name: str = "") -> None:
        """The chat template (or the path of its tokenizer) by which Trajectory inputs are encoded. InputFeature inputs need none.

        An adapter without one has the base model's.
        """

    @abstractmethod
    def set_processor(self, processor: InputProcessor, *, adapter_name: str = "") -> None:
        """The collator. An adapter without one has the base model's. Raises ConfigError when its alignment does not suit the layout."""

    @abstractmethod
    def add_metric(self, metric: type | Callable[[LossInput], Mapping[str, AnyMetric]], *, adapter_name: str = "", **options: Any) -> None:
        """Measures more beside the loss: called with what the loss gets of each micro-batch, without a graph, it returns sums and weights (`Metric`)
        or maxima (`MaxMetric`) by name, always the same names. They are in the metrics of `forward_backward` and in `calculate_metric`.

        metric: a callable, or a class that is constructed with the options. It stays when the loss is set anew.

        Raises ConfigError for what cannot be called. A name that the loss or another metric has is a ConfigError where the loss is computed.
        """

    @abstractmethod
    def calculate_metric(self, *, adapter_name: str = "") -> dict[str, float]:
        """Means over all data ranks and calls since the last call, then forgets them.

        `loss`, `grad_norm` (before clipping), `lr` (of the last step), and the loss's own. A name is absent when nothing was measured. Where steps
        may be skipped, `skipped_steps` is their number.
        """

    @abstractmethod
    def save(self, path: str | os.PathLike[str], *, adapter_name: str = "", merge: bool = False) -> None:
        """Writes the weights as a Hugging Face checkpoint (safetensors, config, tokenizer) into the folder, which all ranks name alike.

        adapter_name: an adapter is written alone, in peft's format (adapter_config.json, adapter_model.safetensors). merge: write the whole model
        with the adapter added to its weights instead.

        All ranks call it; when it returns, on any of them, the folder is complete. A checkpoint that was there is replaced.

        Raises CheckpointError when it could not be written, also when there is something else at the path, which would be deleted.
        """

    @abstractmethod
    def load(self, path: str | os.PathLike[str], *, adapter_name: str = "") -> None:
        """Reads weights that `save` (or Hugging Face) wrote into this model. Optimizer state and counters stay.

        adapter_name: an adapter that was added, from a folder in peft's format of one that is configured alike.
        """

    @abstractmethod
    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        user_state: Mapping[str, Any] | None = None,
        background: bool = False,
        adapter_name: str | None = None,
    ) -> None:
        """Writes all that training goes on from: weights, optimizer states, schedule, counters and generators; see `resume_from_checkpoint`.

        The folder appears whole or not at all, and replaces one that is there only then: a process that dies in the middle leaves the checkpoints
        before as they were (`list_checkpoints`). Losses, processors and metrics that were not taken yet are not part of it. All ranks call it,
        between steps.

        path: the checkpoint's own folder, which all ranks name alike and share. user_state: plain JSON that resume_from_checkpoint gives back (a
        loader's position, a weight version). background: return as soon as the state is copied, and write while training goes on; a failure is
        raised by the next step, save_checkpoint or wait_for_checkpoint, on all ranks, and a second save waits for the first. adapter_name: write only
        this adapter and its states, not the base model; None writes the base model and all adapters.

        Raises CallOrderError while gradients are accumulated, ConfigError for a user_state that is no JSON, CheckpointError when it could not be
        written, also when there is something at the path that is no training checkpoint, which would be deleted.
        """

    @abstractmethod
    def wait_for_checkpoint(self) -> None:
        """Returns when the checkpoint that is written in the background is whole. All ranks call it; raises CheckpointError when that failed."""

    @abstractmethod
    def resume_from_checkpoint(self, path: str | os.PathLike[str], *, adapter_name: str | None = None, saved_as: str | None = None) -> dict[str, Any]:
        """Goes on where `save_checkpoint` was called, in this layout or another; returns its user_state.

        Optimizer and schedule are set as they were; set_loss is still the caller's. Gradients are dropped. Generators are restored where the layout
        is the same. In the same layout everything that follows is bit-identical; in another, equal to rounding.

        adapter_name: take only this adapter from the checkpoint and leave all else (generators, too); None takes all that is in it. Adapters must
        have been added as they were. saved_as: the adapter's name when it was saved, where it is another.

        Raises CheckpointError for a folder that is no whole checkpoint, or is one of another model, precision or adapter.
        """

    @abstractmethod
    def get_state_dict(self, *, adapter_name: str = "") -> dict[str, Tensor]:
        """Whole weights by Hugging Face name, or an adapter's matrices by peft's, as CPU tensors; on rank 0 (other ranks may return fewer).

        All ranks call it. Unlike `save` it holds the whole model in memory.
        """

    @abstractmethod
    def export_weights(self, *, adapter_name: str = "") -> dict[str, NDArray[np.float32]]:
        """For tests: whole weights by Hugging Face name, on rank 0 (other ranks may return fewer). All ranks call it."""

    @abstractmethod
    def export_gradients(self, *, adapter_name: str = "") -> dict[str, NDArray[np.float32]]:
        """For tests: whole gradients, divided by the global weight, by Hugging Face name, on rank 0. All ranks call it.

        Like clip_grad_norm it turns sums into means, so gradients can no longer be added to. A weight without a gradient has zeros.

        Raises CallOrderError without gradients.
        """

    @abstractmethod
    def get_train_configs(self) -> dict[str, Any]:
        """How the trainer is set up, in plain types: engine settings, and for each adapter its loss, optimizer, schedule and step."""
