"""What every trainer does alike: order of calls, micro-batches, losses, reduction, metrics. Engines fill in a few hooks."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinkle_data import Batch, InputFeature, InputProcessor, ModelOutput, PackedFeature, Template, Trajectory

from ._checkpoints import AdapterProgress, CheckpointInfo, read_checkpoint
from ._contract import Inputs, Row, TrainModel
from ._errors import CallOrderError, CheckpointError, ConfigError, InputError, PeerError
from ._lora import HasToDict, LoraConfig
from ._loss import Loss, LossInput, LossOutput
from ._losses import resolve_loss
from ._metrics import AnyMetric
from ._micro_batches import loss_input_from_batch, num_micro_batches, split_by_tokens, split_micro_batches, split_rows, unshift_rows
from ._optimizer import OptimizerConfig, check_number
from ._schedules import LRSchedule, ScheduleName
from ._state import Gradients, TrainState, check_finite, is_finite, state_of
from ._totals import ReduceGroups, Totals, reduce_max, reduce_totals

# As torch.nn.utils.clip_grad_norm_ and megatron-core have it, so that clipped steps agree with theirs.
_CLIP_EPSILON = 1e-6
_HALF_LOADED = "the last load or resume_from_checkpoint did not end, and weights or optimizer may be mixed with older ones: load or resume again"
_HALF_STEPPED = (
    "the last step was interrupted, and the weights and moments are mixed: resume_from_checkpoint, or load and set_optimizer, before going on"
)


@dataclass(frozen=True)
class TokenOutputs:
    """What an engine makes of one micro-batch's logits, gathered over tensor and context parallel ranks; [B, T] of the batch.

    logprobs_BT: of `batch.targets` at `batch.temperature`, fp32, with a graph where one is wanted. entropy_BT: in nats, no graph.
    router_logits_BTLE: of the L layers with E experts, no graph; None unless they are to be returned.
    top_tokens_BTK, top_logprobs_BTK, logits_BTV: what `Wanted` asks for, of the token after each, no graph; else None. Tokens may be of any type
    that holds them exactly.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor | None = None
    router_logits_BTLE: Tensor | None = None
    top_tokens_BTK: Tensor | None = None
    top_logprobs_BTK: Tensor | None = None
    logits_BTV: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What `forward_only` was asked for beside log-probabilities: the top_k likeliest tokens after each token, all logits."""

    top_k: int = 0
    logits: bool = False


T = TypeVar("T")

OnNonFinite = Literal["error", "skip"]
"""What a loss or gradient that is NaN or infinite is."""

ComputeLoss = Callable[[int, TokenOutputs], LossOutput]
"""What an engine calls on each micro-batch: its index and outputs to the loss whose `sum` is run backward."""


@dataclass
class PendingForward:
    """What `forward` leaves for `calculate_loss` and `backward`. outputs: None on ranks that are not on the last stage."""

    batch: Batch
    outputs: TokenOutputs | None
    has_graph: bool
    loss_output: LossOutput | None = None
    totals: Totals | None = None


class TrainerBase(TrainModel):
    """The part of TrainModel that no engine needs to write; an engine implements the methods that start with an underscore.

    groups: over which ranks totals are reduced. processor: the collator; its alignment must be a multiple of `alignment`.
    has_graph: whether `_forward` can keep a graph (False for pipelines). equal_micro_batches: whether data ranks must run equally many
    micro-batches (expert parallel and sharded models do, since they communicate inside the model). packed_rows: whether the engine keeps
    the sequences of one row apart (`Batch.sequence_ids`, `Batch.cu_seq_lens`); without it packed rows and padding-free batches are refused.
    on_non_finite: what a loss or gradient that is NaN or infinite is: 'error' or 'skip' (the step is not taken, and `skipped_steps` of
    calculate_metric counts it). vocab_size: rows with tokens from it on are refused, and so is a larger top_k; None: not looked at.
    While `_run` is called, `_wanted` says what is to be returned beside log-probabilities.
    skips_overflow: gradients that overflow are skipped whatever on_non_finite says (float16 with loss scaling).
    """

    def __init__(
        self,
        *,
        groups: ReduceGroups,
        processor: InputProcessor,
        alignment: int = 1,
        has_graph: bool = True,
        equal_micro_batches: bool = False,
        packed_rows: bool = False,
        on_non_finite: OnNonFinite = "error",
        skips_overflow: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        if on_non_finite not in get_args(OnNonFinite):
            raise ConfigError(f"on_non_finite is 'error' or 'skip', not {on_non_finite!r}")
        self._groups = groups
        self._alignment = alignment
        self._has_graph = has_graph
        self._equal_micro_batches = equal_micro_batches
        self._packed_rows = packed_rows
        self._vocab_size = vocab_size
        self._skips_losses = on_non_finite == "skip"
        self._skips_gradients = self._skips_losses or skips_overflow
        self._states: dict[str, TrainState[PendingForward]] = {"": TrainState()}
        # Those of the adapter that was used last.
        self._template: Template | None = None
        self._processor = processor
        self._wanted = Wanted()
        self._used = ""
        self._mixed: dict[str, str] = {}
        self._closed = False  # an engine sets it
        self.set_processor(processor)

    # What an engine implements.

    @abstractmethod
    def _forward(self, adapter_name: str, batch: Batch) -> TokenOutputs:
        """The model on one batch with a graph. Not called when `has_graph` is False."""

    @abstractmethod
    def _run(self, adapter_name: str, batches: Sequence[Batch], compute_loss: ComputeLoss | None) -> list[TokenOutputs] | None:
        """The model on all micro-batches, in order; outputs without a graph, None on ranks that are not on the last stage.

        compute_loss: None runs without gradients. Else the engine calls it once a micro-batch on the last stage, with the micro-batch's
        index and its outputs, and runs backward of `LossOutput.sum` as it is, undivided, so that gradients add to those that are there.
        """

    @abstractmethod
    def _reduce_gradients(self, adapter_name: str) -> None:
        """Sums gradients over the ranks that hold other data (and tied or replicated weights); called once between zero_grads."""

    @abstractmethod
    def _scale_gradients(self, adapter_name: str, factor: float) -> None:
        """Multiplies all gradients."""

    @abstractmethod
    def _gradient_norm(self, adapter_name: str) -> float:
        """The 2-norm of the whole gradient, over all ranks, each weight counted once."""

    @abstractmethod
    def _make_optimizer(self, adapter_name: str, config: OptimizerConfig) -> None:
        """Replaces the optimizer by a fresh one."""

    @abstractmethod
    def _adjust_optimizer(self, adapter_name: str, config: OptimizerConfig) -> None:
        """Other settings (betas, eps, weight decay) for the optimizer that is there; its kind and its momentum are as they were."""

    @abstractmethod
    def _optimizer_step(self, adapter_name: str, learning_rate: float) -> None:
        """One optimizer step with the gradients as they are, without clipping or scaling them again."""

    def _step_skipped(self, adapter_name: str) -> None:
        """Called instead of `_optimizer_step` when a loss or gradient was not finite."""

    @abstractmethod
    def _zero_gradients(self, adapter_name: str) -> None:
        """Drops all gradients."""

    @abstractmethod
    def _export_gradients(self, adapter_name: str) -> dict[str, NDArray[np.float32]]:
        """Whole gradients as they are, by Hugging Face name, on rank 0."""

    def _add_adapter(self, adapter_name: str, config: LoraConfig) -> None:
        """Puts an adapter of a new name on the model."""
        raise ConfigError(f"{type(self).__name__} has no adapters")

    def _remove_adapter(self, adapter_name: str) -> None:
        """Takes an adapter that is there off the model."""
        raise ConfigError(f"{type(self).__name__} has no adapters")

    def _backward(self, adapter_name: str, output: LossOutput) -> None:
        """Backward of a loss whose forward kept a graph."""
        output.sum.backward()

    def _engine_config(self) -> dict[str, Any]:
        """The engine's own entries of get_train_configs."""
        return {}

    def _write_checkpoint(self, target: Path, info: CheckpointInfo, *, background: bool) -> None:
        """Writes weights, optimizer states and generators of `info.adapters` into `begin_checkpoint(target)`, then calls `publish_checkpoint`."""
        raise ConfigError(f"{type(self).__name__} does not write training checkpoints; use save(path) for the weights")

    def _read_checkpoint(self, path: Path, info: CheckpointInfo) -> None:
        """Reads what `_write_checkpoint` wrote of `info.adapters`, maybe some of those. Optimizers are fresh, of the checkpoint's configuration."""
        raise ConfigError(f"{type(self).__name__} does not read training checkpoints; use load(path) for the weights")

    def _check_checkpoint(self, path: Path, info: CheckpointInfo) -> None:
        """CheckpointError when the checkpoint is of another model; called before anything is changed."""

    # The contract.

    def forward(self, inputs: Inputs, *, adapter_name: str = "") -> ModelOutput:
        state = self._state(adapter_name)
        state.pending = None
        self._use_inputs_of(state)
        features, batch = self._agreed(lambda: self._one_batch(inputs))
        if self._has_graph:
            outputs = self._forward(adapter_name, batch)
        else:
            ran = self._run(adapter_name, [batch], None)
            outputs = None if ran is None else ran[0]
        state.pending = PendingForward(batch, outputs, self._has_graph)
        return _model_output([batch], None if outputs is None else [outputs], range(len(features)), len(features))

    def calculate_loss(self, *, adapter_name: str = "") -> float:
        state = self._state(adapter_name)
        pending = state.require_pending("calculate_loss")
        loss = state.require_loss("calculate_loss")
        if pending.totals is not None:
            return pending.totals.loss
        error: Exception | None = None
        if pending.outputs is not None:
            try:
                pending.loss_output = _compute(loss, pending.batch, pending.outputs, state.metrics)
            except Exception as raised:  # raised again by reduce_totals, once the other ranks know
                error = raised
        local = None if pending.loss_output is None else Totals.of([pending.loss_output])
        pending.totals = reduce_totals(local, self._groups, error=error)
        if not self._skips_losses or is_finite(pending.totals):
            state.record(pending.totals)
        return pending.totals.loss

    def backward(self, *, adapter_name: str = "") -> None:
        state = self._state(adapter_name)
        pending = state.require_pending("backward")
        if not pending.has_graph:
            raise CallOrderError("backward after forward does not work on a pipeline, which keeps no graph: use forward_backward(inputs)")
        if pending.totals is None or pending.loss_output is None:
            raise CallOrderError("backward needs a loss: call calculate_loss() first")
        state.check_can_accumulate("backward")
        self._check_whole(adapter_name)
        skipped = self._skips_losses and not is_finite(pending.totals)
        try:
            if not skipped:
                check_finite(pending.totals)
            self._backward(adapter_name, pending.loss_output)
        except BaseException:
            state.mark_broken()
            raise
        if skipped:
            state.add_non_finite()
        else:
            state.add_gradients(pending.totals)
        state.pending = None

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
        self._use_inputs_of(self._state(adapter_name))
        wanted = Wanted(top_k=top_k, logits=logits)
        self._check_wanted(wanted)
        features, batches, order = self._prepared(inputs, micro_batch_size, micro_batch_tokens)
        self._wanted = wanted
        try:
            ran = self._run(adapter_name, batches, None)
        finally:
            self._wanted = Wanted()
        return _model_output(batches, ran, order, len(features))

    def forward_backward(
        self, inputs: Inputs, micro_batch_size: int | None = None, adapter_name: str = "", *, micro_batch_tokens: int | None = None
    ) -> ModelOutput:
        state = self._state(adapter_name)
        loss = state.require_loss("forward_backward")
        state.check_can_accumulate("forward_backward")
        self._use_inputs_of(state)
        features, batches, order = self._prepared(inputs, micro_batch_size, micro_batch_tokens)
        losses: list[LossOutput] = []

        def compute_loss(index: int, outputs: TokenOutputs) -> LossOutput:
            output = _compute(loss, batches[index], outputs, state.metrics)
            losses.append(LossOutput(output.sum.detach(), output.weight, output.metrics))
            return output

        ran: list[TokenOutputs] | None = None
        error: Exception | None = None
        try:
            ran = self._run(adapter_name, batches, compute_loss)
        except Exception as raised:  # raised again by reduce_totals, once the other ranks know
            error = raised
        except BaseException:  # Ctrl-C: some micro-batches have left their gradients
            state.mark_broken()
            raise
        totals = self._count_gradients(state, losses, error)
        return _model_output(batches, ran, order, len(features), totals)

    def clip_grad_norm(self, max_grad_norm: float = 1.0, *, adapter_name: str = "") -> float:
        return self._clip(self._state(adapter_name), max_grad_norm, "clip_grad_norm")

    def step(self, *, adapter_name: str = "") -> None:
        self._take_step(self._state(adapter_name), "step")

    def zero_grad(self, *, adapter_name: str = "") -> None:
        self._clear(self._state(adapter_name))

    def lr_step(self, *, adapter_name: str = "") -> float:
        return self._state(adapter_name).update_learning_rate()

    def clip_grad_and_step(self, max_grad_norm: float = 1.0, *, adapter_name: str = "") -> float:
        state = self._state(adapter_name)
        state.require_optimizer("clip_grad_and_step")
        norm = self._clip(state, max_grad_norm, "clip_grad_and_step")
        self._take_step(state, "clip_grad_and_step")
        self._clear(state)
        state.update_learning_rate()
        return norm

    def set_loss(self, loss: str | type | Callable[[LossInput], LossOutput], *, adapter_name: str = "", **options: Any) -> None:
        state = self._state(adapter_name)
        state.loss = resolve_loss(loss, **options)
        state.take_metrics()  # those of another loss would be mixed into this one's

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
        state = self._state(adapter_name)
        config = OptimizerConfig(
            name=OptimizerConfig.name_of(name),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            momentum=momentum,
            options=options or {},
        )
        self._make_optimizer(adapter_name, config)
        state.set_optimizer(config)

    def adjust_optimizer(
        self,
        *,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        adapter_name: str = "",
    ) -> None:
        state = self._state(adapter_name)
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        config = replace(state.require_optimizer("adjust_optimizer"), **{name: value for name, value in given.items() if value is not None})
        self._adjust_optimizer(adapter_name, config)
        state.adjust_optimizer(config)

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
        # LRSchedule checks the name.
        schedule = LRSchedule(cast(ScheduleName, name), warmup_steps, total_steps, min_lr_ratio, decay_steps)
        self._state(adapter_name).set_schedule(schedule)

    def add_adapter_to_model(self, adapter_name: str, config: LoraConfig | HasToDict | Mapping[str, Any]) -> None:
        if not adapter_name:
            raise ConfigError("adapter_name is empty, which is the base model's name: give the adapter another")
        if adapter_name in self._states:
            raise ConfigError(f"there is an adapter {adapter_name!r} already; there are {sorted(self._states)} ('' is the base model)")
        lora = LoraConfig.of(config)
        self._add_adapter(adapter_name, lora)
        self._states[adapter_name] = TrainState(adapter_name=adapter_name, lora=lora)

    def remove_adapter(self, adapter_name: str) -> None:
        if not adapter_name:
            raise ConfigError("the base model ('') cannot be removed: name an adapter")
        self._state(adapter_name)
        self._remove_adapter(adapter_name)
        del self._states[adapter_name]
        self._mixed.pop(adapter_name, None)

    def set_template(self, template: Template | str, *, adapter_name: str = "") -> None:
        self._state(adapter_name).template = Template(template) if isinstance(template, str) else template

    def set_processor(self, processor: InputProcessor, *, adapter_name: str = "") -> None:
        state = self._state(adapter_name)
        if processor.alignment % self._alignment:
            raise ConfigError(f"this layout needs rows aligned to {self._alignment} tokens, the processor aligns to {processor.alignment}")
        if processor.padding_free and not self._packed_rows:
            raise ConfigError(f"{type(self).__name__} does not keep the sequences of one row apart: set padding_free=False")
        state.processor = processor

    def add_metric(self, metric: type | Callable[[LossInput], Mapping[str, AnyMetric]], *, adapter_name: str = "", **options: Any) -> None:
        state = self._state(adapter_name)
        if not callable(metric) or (options and not isinstance(metric, type)):
            raise ConfigError(f"a metric is a class, whose constructor the options go to, or a callable without options, not {metric!r}")
        state.metrics.append(metric(**options) if isinstance(metric, type) else metric)

    def calculate_metric(self, *, adapter_name: str = "") -> dict[str, float]:
        state = self._state(adapter_name)
        skipped = {"skipped_steps": float(state.num_skipped)} if self._skips_gradients else {}
        return state.take_metrics() | skipped

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        user_state: Mapping[str, Any] | None = None,
        background: bool = False,
        adapter_name: str | None = None,
    ) -> None:
        states = self._states if adapter_name is None else {adapter_name: self._state(adapter_name)}
        for name, state in states.items():
            self._check_whole(name)
            if state.gradients not in (Gradients.NONE, Gradients.USED):
                raise CallOrderError("save_checkpoint between accumulated gradients and their step: call step() (or zero_grad()) first")
        adapters = {
            name: AdapterProgress(optimizer=state.optimizer, schedule=state.schedule, step=state.step, lora=state.lora)
            for name, state in states.items()
        }
        info = CheckpointInfo(
            step=self._state(adapter_name or "").step, adapters=adapters, user_state=dict(user_state or {}), engine=self._checkpoint_entries()
        )
        info.to_json()  # what cannot be written is an error before anything is
        self._write_checkpoint(Path(os.path.realpath(path)), info, background=background)

    def wait_for_checkpoint(self) -> None:
        pass  # an engine that writes in the background overrides it

    def resume_from_checkpoint(self, path: str | os.PathLike[str], *, adapter_name: str | None = None, saved_as: str | None = None) -> dict[str, Any]:
        folder = Path(os.path.abspath(path))
        info = read_checkpoint(folder)
        if saved_as is not None and not (adapter_name and saved_as):
            raise ConfigError("saved_as is for an adapter that is read under another name: name both")
        if adapter_name is not None:
            self._state(adapter_name)
            written = adapter_name if saved_as is None else saved_as
            if written not in info.adapters:
                raise CheckpointError(f"{folder} has no adapter {written!r}; it has {sorted(info.adapters)} ('' is the base model)")
            renamed = {} if written == adapter_name else {adapter_name: written}
            info = replace(info, adapters={adapter_name: info.adapters[written]}, renamed=renamed)
        if unknown := sorted(set(info.adapters) - set(self._states)):
            raise CheckpointError(f"{folder} has adapters {unknown}, this trainer has {sorted(self._states)}: add them first")
        for name, progress in info.adapters.items():
            if progress.lora != self._state(name).lora:
                raise CheckpointError(f"{folder} has the adapter {name!r} with {progress.lora}, this trainer has it with {self._state(name).lora}")
        self._check_checkpoint(folder, info)
        with self._loading(info.adapters):
            self._resume(folder, info)
        return dict(info.user_state)

    def _resume(self, folder: Path, info: CheckpointInfo) -> None:
        for name, progress in info.adapters.items():
            state = self._state(name)
            state.pending = None
            self._clear(state)
            # Where the checkpoint has no optimizer, one that was set is kept, without its states.
            if (config := progress.optimizer or state.optimizer) is not None:
                self._make_optimizer(name, config)
                state.set_optimizer(config)
            if progress.optimizer is not None:
                state.set_schedule(progress.schedule)
                state.step = progress.step
                state.update_learning_rate()
            state.take_metrics()  # those of the run that is left
        self._read_checkpoint(folder, info)

    def _checkpoint_entries(self) -> dict[str, Any]:
        """The engine's own entries of a checkpoint, in plain JSON."""
        return {}

    def get_state_dict(self, *, adapter_name: str = "") -> dict[str, Tensor]:
        return {name: torch.from_numpy(weight) for name, weight in self.export_weights(adapter_name=adapter_name).items()}

    def export_gradients(self, *, adapter_name: str = "") -> dict[str, NDArray[np.float32]]:
        state = self._state(adapter_name)
        self._check_whole(adapter_name)
        self._make_means(state, "export_gradients")
        return self._export_gradients(adapter_name)

    def get_train_configs(self) -> dict[str, Any]:
        return {**self._engine_config(), "adapters": {name: _state_config(state) for name, state in self._states.items()}}

    # Shared steps.

    def _state(self, adapter_name: str) -> TrainState[PendingForward]:
        if self._closed:
            raise CallOrderError("the model is closed: build a new one")
        return state_of(self._states, adapter_name)

    def _count_gradients(self, state: TrainState[PendingForward], losses: Sequence[LossOutput], error: Exception | None) -> Totals:
        """After backward of a call's losses: their totals over all ranks, which the gradients are of. error: what this rank's own work raised."""
        try:
            totals = reduce_totals(Totals.of(losses), self._groups, error=error)
            skipped = self._skips_losses and not is_finite(totals)
            if not skipped:
                check_finite(totals)
        except BaseException:
            state.mark_broken()
            raise
        if skipped:
            state.add_non_finite()
        else:
            state.add_gradients(totals)
            state.record(totals)
        return totals

    def _use_inputs_of(self, state: TrainState[PendingForward]) -> None:
        """From now on rows are encoded and collated as the adapter's are: by its own template and processor, or the base model's."""
        base = self._states[""]
        self._used = state.adapter_name
        self._template = state.template or base.template
        self._processor = state.processor or base.processor or self._processor

    def _features(self, inputs: Inputs) -> list[Row]:
        self._check_whole(self._used)  # here, where an error of one rank reaches the others
        features: list[Row] = []
        for row in inputs:
            if isinstance(row, Trajectory):
                if self._template is None:
                    raise CallOrderError("a Trajectory needs a chat template to be encoded: call set_template first, or give InputFeatures")
                features.append(self._template.encode(row))
            elif isinstance(row, PackedFeature) and not self._packed_rows:
                raise InputError(f"{type(self).__name__} does not keep the sequences of one row apart: give one sequence a row, not packed ones")
            elif isinstance(row, (InputFeature, PackedFeature)):
                features.append(row)
            else:
                raise InputError(f"a trainer takes InputFeature, PackedFeature or Trajectory, got {type(row).__name__}")
        if self._vocab_size is not None:
            for index, feature in enumerate(features):
                for name, tokens in _tokens_of(feature):
                    if tokens.max() >= self._vocab_size:
                        raise InputError(
                            f"inputs[{index}].{name} has the token {tokens.max()}, and the model's vocabulary has "
                            f"{self._vocab_size}: encode with the tokenizer of this model."
                        )
        return features

    def _prepared(
        self, inputs: Inputs, micro_batch_size: int | None, micro_batch_tokens: int | None = None
    ) -> tuple[list[Row], list[Batch], Sequence[int]]:
        """This rank's rows, its micro-batches, and which row each of theirs is; PeerError where the rows of another rank could not be used."""
        features = self._agreed(lambda: self._checked_features(inputs, micro_batch_size, micro_batch_tokens))
        batches, order = self._agreed(lambda: self._micro_batches(features, micro_batch_size, micro_batch_tokens))
        return features, batches, order

    def _checked_features(self, inputs: Inputs, micro_batch_size: int | None, micro_batch_tokens: int | None) -> list[Row]:
        """Raises what `_micro_batches` would raise before a collective."""
        features = self._features(inputs)
        num_micro_batches(len(features), micro_batch_size)
        if micro_batch_tokens is not None:
            split_by_tokens(features, micro_batch_tokens, padded=not self._processor.padding_free)
        return features

    def _one_batch(self, inputs: Inputs) -> tuple[list[Row], Batch]:
        (features,) = split_micro_batches(self._features(inputs))
        return features, self._collate(features)

    def _agreed(self, make: Callable[[], T]) -> T:
        """What this rank makes of its rows before the model runs. Where that fails on one rank, the other data ranks raise PeerError, instead of
        waiting for it in the model or the loss."""
        made: T | None = None
        error: Exception | None = None
        try:
            made = make()
        except Exception as raised:  # raised below, once the other ranks know
            error = raised
        (failed,) = reduce_max([float(error is not None)], self._groups)
        if error is not None:
            raise error
        if failed:
            raise PeerError(
                f"rank {torch.distributed.get_rank()} stopped: the rows of another rank of this trainer cannot be used (its own error says why)"
            )
        return cast(T, made)

    def _micro_batches(self, features: list[Row], micro_batch_size: int | None, micro_batch_tokens: int | None) -> tuple[list[Batch], Sequence[int]]:
        """The rows in batches, and which row each of theirs is. Collective over the data ranks where they run equally many."""
        if micro_batch_tokens is None:
            count = self._num_micro_batches(num_micro_batches(len(features), micro_batch_size), len(features), is_free=micro_batch_size is None)
            parts = split_micro_batches(features, micro_batch_size, count=count)
            order: Sequence[int] = range(max(len(features), count or 0))
        else:
            if micro_batch_size is not None:
                raise ConfigError("give micro_batch_size or micro_batch_tokens, not both")
            padded = not self._processor.padding_free
            parts, order = split_by_tokens(features, micro_batch_tokens, padded=padded)
            if (count := self._num_micro_batches(len(parts), len(features), is_free=False)) is not None:
                parts, order = split_by_tokens(features, micro_batch_tokens, padded=padded, count=count)
        return [self._collate(rows) for rows in parts], order

    def _num_micro_batches(self, needed: int, num_rows: int, *, is_free: bool) -> int | None:
        """How many to make, at least `needed`; None: as many as that. is_free: the caller did not ask for any size."""
        if not self._equal_micro_batches:
            return None
        (largest,) = reduce_max([needed], self._groups)
        return int(largest)

    def _collate(self, rows: list[Row]) -> Batch:
        """A micro-batch of rows."""
        return self._processor(rows)

    def _check_wanted(self, wanted: Wanted) -> None:
        if not isinstance(wanted.top_k, (int, np.integer)) or wanted.top_k < 0:
            raise ConfigError(f"top_k must be a whole number >= 0, got {wanted.top_k!r}")
        if self._vocab_size is not None and wanted.top_k > self._vocab_size:
            raise ConfigError(f"top_k={wanted.top_k}, and the model's vocabulary has {self._vocab_size} tokens")

    def _make_means(self, state: TrainState[PendingForward], method: str) -> None:
        if state.non_finite and state.gradients is Gradients.SUMS:
            state.mark_means()  # they will not be used
            return
        divisor = state.divisor(method)
        if divisor is None:
            return
        with _broken_unless_done(state):
            self._reduce_gradients(state.adapter_name)
            self._scale_gradients(state.adapter_name, 1 / divisor)
        state.mark_means()

    def _clip(self, state: TrainState[PendingForward], max_grad_norm: float, method: str) -> float:
        check_number("max_grad_norm", max_grad_norm)
        if not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be > 0, got {max_grad_norm}; use float('inf') to measure only")
        self._make_means(state, method)
        if state.non_finite:
            return float("nan")
        norm = self._gradient_norm(state.adapter_name)
        if self._skips_gradients and not abs(norm) < float("inf"):
            state.non_finite = True
            return norm
        state.record_grad_norm(norm)
        if norm > max_grad_norm:
            with _broken_unless_done(state):
                self._scale_gradients(state.adapter_name, max_grad_norm / (norm + _CLIP_EPSILON))
        return norm

    def _take_step(self, state: TrainState[PendingForward], method: str) -> None:
        state.require_optimizer(method)
        self._make_means(state, method)
        if not state.non_finite and not state.norm_is_known:
            norm = self._gradient_norm(state.adapter_name)
            state.non_finite = self._skips_gradients and not abs(norm) < float("inf")
            if not state.non_finite:
                state.check_grad_norm(norm)
        if state.non_finite:
            self._step_skipped(state.adapter_name)
            state.skip_step()
            return
        self._check_whole(state.adapter_name)
        self._mixed[state.adapter_name] = _HALF_STEPPED
        try:
            self._optimizer_step(state.adapter_name, state.learning_rate)
        except CheckpointError:  # of one that was written in the background; the step was not begun
            del self._mixed[state.adapter_name]
            raise
        except BaseException:  # some weights may have been changed, so that a second try would change them twice
            state.mark_broken()
            raise
        del self._mixed[state.adapter_name]
        state.finish_step()

    @contextmanager
    def _loading(self, names: Iterable[str]) -> Iterator[None]:
        """In this context weights of the base model ('') or of adapters are changed in place; when it does not end well, they are a mixture."""
        names = list(names)
        self._mixed |= dict.fromkeys(names, _HALF_LOADED)
        for name, state in self._states.items():
            if name in names or "" in names:
                state.pending = None  # its graph is of the old weights
        yield
        for name in names:
            self._mixed.pop(name, None)

    def _check_whole(self, adapter_name: str) -> None:
        """CallOrderError when the weights of an adapter, or of the base model below it, are a mixture of old and new ones. An engine asks before it
        computes with weights or gives them away."""
        for name in ("", adapter_name):
            if name in self._mixed:
                raise CallOrderError(self._mixed[name] + (f" (it was the adapter {name!r}'s)" if name else ""))

    def _clear(self, state: TrainState[PendingForward]) -> None:
        self._zero_gradients(state.adapter_name)
        state.clear_gradients()


@contextmanager
def _broken_unless_done(state: TrainState[PendingForward]) -> Iterator[None]:
    """Gradients are changed in place in this context: when it does not end well, some are and some are not."""
    try:
        yield
    except BaseException:
        state.mark_broken()
        raise


def _tokens_of(feature: Row) -> Iterator[tuple[str, NDArray[np.int64]]]:
    yield "input_ids", feature.input_ids
    for one in feature.features if isinstance(feature, PackedFeature) else (feature,):
        if one.targets is not None:
            yield "targets", one.targets


def _compute(loss: Loss, batch: Batch, outputs: TokenOutputs, metrics: Sequence[Callable[[LossInput], Mapping[str, AnyMetric]]]) -> LossOutput:
    output = loss(loss_input_from_batch(batch, outputs.logprobs_BT, outputs.entropy_BT))
    if not isinstance(output, LossOutput):
        raise InputError(f"the loss returned a {type(output).__name__}; it must return LossOutput(sum, weight, metrics)")
    if outputs.logprobs_BT.requires_grad and not output.sum.requires_grad:
        raise InputError("the loss returned a sum without a graph, so nothing would be trained: compute it from logprobs_BT, without detach()")
    for metric in metrics:
        with torch.no_grad():
            measured = metric(loss_input_from_batch(batch, outputs.logprobs_BT.detach(), outputs.entropy_BT))
        if twice := sorted(measured.keys() & output.metrics.keys()):
            raise ConfigError(f"{', '.join(twice)} is measured twice, by the loss and a metric or by two metrics: give it another name")
        output = replace(output, metrics={**output.metrics, **measured})
    return output


def _model_output(
    batches: Sequence[Batch], outputs: Sequence[TokenOutputs] | None, order: Sequence[int], num_rows: int, totals: Totals | None = None
) -> ModelOutput:
    def values(name: str) -> list[Tensor]:
        return [value for each in outputs or () if (value := getattr(each, name)) is not None]

    def split(name: str) -> list[NDArray[np.float32]] | None:
        return split_rows(batches, present, num_rows, order) if (present := values(name)) else None

    with torch.no_grad():
        entropies, top_tokens = values("entropy_BT"), split("top_tokens_BTK")
        return ModelOutput(
            loss=None if totals is None else totals.loss,
            loss_weight=0.0 if totals is None else totals.weight,
            logprobs=None if outputs is None else unshift_rows(batches, values("logprobs_BT"), num_rows, order),
            entropy=unshift_rows(batches, entropies, num_rows, order) if entropies else None,
            router_logits=split("router_logits_BTLE"),
            top_tokens=None if top_tokens is None else [row.astype(np.int32) for row in top_tokens],
            top_logprobs=split("top_logprobs_BTK"),
            logits=split("logits_BTV"),
            metrics={} if totals is None else totals.metric_values(),
        )


def _state_config(state: TrainState[PendingForward]) -> dict[str, Any]:
    return {
        "lora": None if state.lora is None else asdict(state.lora),
        "loss": None if state.loss is None else repr(state.loss),
        "optimizer": None if state.optimizer is None else asdict(state.optimizer),
        "lr_scheduler": asdict(state.schedule),
        "learning_rate": state.learning_rate,
        "step": state.step,
    }
