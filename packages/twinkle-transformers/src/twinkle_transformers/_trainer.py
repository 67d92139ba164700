"""The trainer contract over a model of transformers, without remoting."""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from twinkle_data import Batch, InputProcessor
from twinkle_mesh import DeviceMesh, launcher_world_size
from twinkle_train import (
    CheckpointInfo,
    CheckpointWriter,
    ComputeLoss,
    ConfigError,
    InputError,
    Inputs,
    LoraConfig,
    LossOutput,
    LossScale,
    OnNonFinite,
    OptimizerConfig,
    Piece,
    ReduceGroups,
    Row,
    TokenOutputs,
    TrainerBase,
    check_files,
    check_same_trainer,
    init_process_group,
    read_adapter,
    read_checkpoint,
    read_checkpoint_pieces,
    read_generators,
    save_adapter,
    write_hf_checkpoint,
)

from ._adapters import Adapter, Adapters
from ._errors import CheckpointError, LayoutError, UnsupportedModelError
from ._examine import attention_of, examine
from ._expert_parallel import ExpertParallelConfig, divide_experts
from ._gated_delta import RUNS, GatedDeltaNetPaddingFreePatch
from ._groups import Groups, check_mesh
from ._inputs import ModelInputs, model_inputs
from ._loading import check_same_model, empty_model, find_checkpoint, form_of, give_memory, load_model, take_tensors
from ._logprobs import token_logprobs
from ._optimizer import Optimizer
from ._packing import stretch_modules, takes_positions
from ._parameters import Parameters
from ._router import RouterLosses, Routers, Routing
from ._sequence_parallel import SequenceParallel, SequenceParallelConfig, SequenceParallelStrategy
from ._sharding import shard_model
from ._weights import Weights

logger = logging.getLogger(__name__)

MixedPrecision = Literal["no", "bf16", "fp16"]

# What a checkpoint has beside its weights: configuration, tokenizer, generation defaults, and code of its own.
_CARRIED_OVER = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_DTYPES: dict[str, torch.dtype] = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TransformersTrainer(TrainerBase):
    """What TransformersModel is on each of its ranks; see there."""

    def __init__(
        self,
        model_id: str | os.PathLike[str],
        device_mesh: DeviceMesh | None = None,
        mixed_precision: MixedPrecision = "no",
        *,
        seed: int = 0,
        activation_checkpointing: bool = False,
        attn_implementation: str | None = None,
        sequence_parallel: SequenceParallelConfig | None = None,
        expert_parallel: ExpertParallelConfig | None = None,
        router_aux_loss_coef: float | None = None,
        router_z_loss_coef: float = 0.0,
        initial_loss_scale: float = 4096.0,
        on_non_finite: OnNonFinite = "error",
        trust_remote_code: bool = False,
        timeout_s: float = 600,
    ) -> None:
        if mixed_precision not in _DTYPES:
            raise ConfigError(f"mixed_precision is 'no', 'bf16' or 'fp16', not {mixed_precision!r}")
        given = ("sequence_parallel", sequence_parallel, SequenceParallelConfig), ("expert_parallel", expert_parallel, ExpertParallelConfig)
        for option, config, kind in given:
            if not isinstance(config, kind | None):
                raise ConfigError(f"{option} is {kind.__name__}(...), not {config!r}")
        self._loss_scales = {"": LossScale(initial_loss_scale)}
        mesh = _on_this_machine(device_mesh or DeviceMesh.from_sizes(dp_size=launcher_world_size()))
        check_mesh(mesh)
        if sequence_parallel is not None and (sequence_parallel.ulysses_size or 1) > 1 == mesh.ulysses_size * mesh.cp_size:
            raise LayoutError("the mesh divides no sequences: give it ulysses_size or cp_size")
        self._path = find_checkpoint(model_id)
        self._mesh = mesh
        self._dtype = _DTYPES[mixed_precision]
        self._settings = {
            "model": os.fspath(model_id),
            "mixed_precision": mixed_precision,
            "seed": seed,
            "activation_checkpointing": activation_checkpointing,
            "attn_implementation": attn_implementation,
            "expert_parallel": expert_parallel and dataclasses.asdict(expert_parallel),
            "router_aux_loss_coef": router_aux_loss_coef,
            "router_z_loss_coef": router_z_loss_coef,
            "initial_loss_scale": initial_loss_scale,
            "on_non_finite": on_non_finite,
            "sequence_parallel": sequence_parallel and dataclasses.asdict(sequence_parallel),
            "trust_remote_code": trust_remote_code,
        }
        init_process_group(mesh.device_type, timeout_s)
        self._groups_of_mesh = groups = Groups(mesh, timeout_s)
        torch.manual_seed(seed + groups.rank)
        divides_experts = mesh.ep_size * mesh.ep_fsdp_size > 1
        # On one rank, too, a configuration says how routers compute.
        divided = divides_experts or (expert_parallel is not None and expert_parallel.enabled)
        load = partial(load_model, self._path, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code)
        whole: Any = groups.on_readers(load)
        form, found = groups.from_readers(lambda: (form_of(whole), examine(whole, experts=divided)))
        self._model = model = (
            empty_model(self._path, form, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code)
            if groups.divides_weights
            else whole
        )
        vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._attention, _ = attention_of(model)
        if self._attention is not None:
            self._attention.special |= found.special
        delta = GatedDeltaNetPaddingFreePatch().put_on(model) if found.begins_anew else None
        self._has_runs = delta is not None
        self._packing_fault = found.packing_fault
        self._takes_positions = takes_positions(model)
        self._from_column_0 = (
            "takes no position_ids" if not self._takes_positions else "counts from the first column" if stretch_modules(model) else ""
        )
        self._sequence: SequenceParallel | None = None
        self._gathers_logits = False
        if mesh.ulysses_size * mesh.cp_size > 1:
            strategy = SequenceParallelStrategy(mesh, sequence_parallel, timeout_s=timeout_s)
            if self._attention is None or self._packing_fault is not None:
                raise UnsupportedModelError(f"sequences cannot be divided over ranks: {self._packing_fault}")
            if delta is not None:
                delta.remove()  # replaced by that of divided rows
            self._sequence = strategy.install(model, self._attention)
            self._gathers_logits = strategy.config.gather_logits
        experts = divide_experts(model, groups.experts, expert_parallel, found.blocks, stack=True) if divided else []
        reduce_groups = ReduceGroups(data=groups.data, device=groups.device)
        everyone = torch.distributed.group.WORLD if mesh.world_size > 1 else None
        self._routers = Routers(model, aux_loss_coef=router_aux_loss_coef, z_loss_coef=router_z_loss_coef, groups=reduce_groups, everyone=everyone)
        self._returns_router_logits = divided and expert_parallel is not None and expert_parallel.keep_router_logits
        self._pending_losses: dict[str, tuple[RouterLosses, torch.Tensor, Batch]] = {}
        if activation_checkpointing:
            _checkpoint_activations(model)
        if not groups.divides_weights:
            model.to(groups.device)
        if mesh.fsdp_size * mesh.ep_fsdp_size > 1 or self._dtype != torch.float32:
            shard_model(model, groups.shard_mesh, experts=experts, expert_mesh=groups.expert_shard_mesh, compute_dtype=self._dtype)
        if groups.divides_weights:
            give_memory(model, groups.device)
        self._weights = Weights(model, groups, experts)
        if groups.divides_weights:
            tensors = None if whole is None else take_tensors(whole, all_buffers=True)
            self._weights.take(tensors, self._weights.check(tensors, os.fspath(self._path)))
        self._adapters: Adapters | None = None
        self._optimizers: dict[str, Optimizer] = {}
        self._checkpoints = CheckpointWriter(timeout_s, error_type=CheckpointError)
        super().__init__(
            groups=reduce_groups,
            processor=InputProcessor(pad_token_id=_pad_token_id(model.config, vocab_size)),
            # Shards of weights are gathered inside the model, tokens exchanged, and loads of experts summed.
            equal_micro_batches=mesh.fsdp_size > 1 or divides_experts or self._routers.has_losses,
            packed_rows=True,
            on_non_finite=on_non_finite,
            skips_overflow=self._dtype is torch.float16,
            vocab_size=vocab_size,
        )

    # What the contract leaves to an engine.

    def _forward(self, adapter_name: str, batch: Batch) -> TokenOutputs:
        self._select(adapter_name, trains=True)
        self._model.train()
        with self._weights.passing():
            outputs, routing = self._outputs(batch)
        self._pending_losses.pop(adapter_name, None)
        self._routers.note(routing)
        if self._routers.has_losses:
            losses = self._routers.plan([batch])
            losses.count(routing)
            losses.reduce()
            self._pending_losses[adapter_name] = (losses, losses.share(routing), batch)
        return outputs

    def _backward(self, adapter_name: str, output: LossOutput) -> None:
        # A forward of another one may have come between, and what is recomputed must be what was computed.
        self._select(adapter_name, trains=True)
        total = output.sum
        if adapter_name in self._pending_losses:
            losses, share, batch = self._pending_losses.pop(adapter_name)
            losses.check(output, batch)
            total = total + share
        with self._weights.passing():
            self._scaled(adapter_name, total).backward()

    def _loss_scale(self, adapter_name: str) -> LossScale | None:
        """By what losses of the base model or of an adapter are multiplied; None where nothing overflows."""
        return self._loss_scales[adapter_name] if self._dtype is torch.float16 else None

    def _scaled(self, adapter_name: str, loss: torch.Tensor) -> torch.Tensor:
        scale = self._loss_scale(adapter_name)
        return loss if scale is None else scale.scaled(loss)

    def _select(self, adapter_name: str, *, trains: bool) -> None:
        """Makes the model that of an adapter, or the base model. trains: for gradients; a frozen base has none."""
        if self._adapters is not None:
            self._adapters.activate(adapter_name)
        if trains:
            self._weights.freeze(bool(adapter_name))

    def _parameters(self, adapter_name: str) -> Parameters:
        """The base model's weights, or an adapter's matrices."""
        return self._adapter(adapter_name) if adapter_name else self._weights

    def _adapter(self, adapter_name: str) -> Adapter:
        assert self._adapters is not None, "the trainer checks names"
        return self._adapters[adapter_name]

    def _add_adapter(self, adapter_name: str, config: LoraConfig) -> None:
        if self._adapters is None:
            self._adapters = Adapters(self._model, self._groups_of_mesh, int(self._settings["seed"]))
        self._adapters.add(adapter_name, config)
        self._loss_scales[adapter_name] = LossScale(float(self._settings["initial_loss_scale"]))

    def _remove_adapter(self, adapter_name: str) -> None:
        assert self._adapters is not None, "the trainer checks names"
        self._adapters.remove(adapter_name)
        self._loss_scales.pop(adapter_name)
        self._optimizers.pop(adapter_name, None)
        self._pending_losses.pop(adapter_name, None)

    def _run(self, adapter_name: str, batches: Sequence[Batch], compute_loss: ComputeLoss | None) -> list[TokenOutputs]:
        with self._weights.passing():
            return self._run_batches(adapter_name, batches, compute_loss)

    def _run_batches(self, adapter_name: str, batches: Sequence[Batch], compute_loss: ComputeLoss | None) -> list[TokenOutputs]:
        self._select(adapter_name, trains=compute_loss is not None)
        self._model.train(compute_loss is not None)
        losses = self._routers.plan(batches) if compute_loss is not None and self._routers.has_losses else None
        if losses is not None and len(batches) > 1:  # what one micro-batch adds depends on where the tokens of all of them go
            for batch in batches:
                with torch.no_grad():
                    losses.count(self._outputs(batch)[1])
            losses.reduce()
        kept: list[TokenOutputs] = []
        failure: Exception | None = None
        for index, batch in enumerate(batches):
            with nullcontext() if compute_loss is not None else torch.no_grad():
                outputs, routing = self._outputs(batch)
            if compute_loss is not None:
                self._routers.note(routing)
                total = outputs.logprobs_BT.sum() * 0.0
                if failure is None:
                    try:
                        loss = compute_loss(index, outputs)
                        if losses is not None:
                            losses.check(loss, batch)
                        total = loss.sum
                    except Exception as error:  # raised below: peers that run the same model must not be left alone in it
                        failure = error
                if losses is not None:
                    if len(batches) == 1:
                        losses.count(routing)
                        losses.reduce()
                    total = total + losses.share(routing)
                self._scaled(adapter_name, total).backward()
            kept.append(replace(outputs, logprobs_BT=outputs.logprobs_BT.detach()))
        if failure is not None:
            raise failure
        return kept

    def _features(self, inputs: Inputs) -> list[Row]:
        if self._sequence is None:
            return super()._features(inputs)
        features: list[Row] = []
        error: Exception | None = None
        try:
            features = super()._features(inputs)
        except Exception as raised:  # raised below, once the ranks that share rows know
            error = raised
        same = self._sequence.same_on_all_ranks([row.input_ids for row in features])
        if error is not None:
            raise error
        if not same:
            raise InputError(
                "ranks that share rows (ulysses_size, cp_size) were given different ones: give each the rows of its mesh.get_slice(len(rows)), "
                "which is the same on all of them"
            )
        return features

    def _collate(self, rows: list[Row]) -> Batch:
        batch = super()._collate(rows)
        if batch.is_packed and self._packing_fault is not None:
            raise InputError(f"rows of several sequences would be wrong: {self._packing_fault}. Give one sequence a row")
        if self._from_column_0 and not batch.valid[:, 0].all():
            raise InputError(f"{type(self._model).__name__} {self._from_column_0}: pad on the right")
        return batch

    def _outputs(self, batch: Batch) -> tuple[TokenOutputs, Routing]:
        sequence = self._sequence
        if sequence is None:
            inputs = model_inputs(batch, self._groups_of_mesh.device)
            gather: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
        else:
            inputs, columns = sequence.split(batch)
            gather = partial(sequence.gather, columns=columns)
        with self._routers.watch(inputs.counted_BT) as routing:
            logits_BLV = self._logits(inputs)
        router_logits_BTLE = None
        if self._returns_router_logits:
            router_logits_BTLE = gather(routing.all_logits(len(logits_BLV)))
        if sequence is not None and self._gathers_logits:
            logits_BLV, gather = gather(logits_BLV), _as_it_is
            inputs = model_inputs(batch, self._groups_of_mesh.device)
        logprobs, entropy = token_logprobs(logits_BLV, inputs.targets_BT, inputs.temperature_BT)
        outputs = TokenOutputs(gather(logprobs), gather(entropy), router_logits_BTLE)
        # In host memory: they are as large as many micro-batches.
        if self._wanted.top_k:
            top_logprobs, tokens = (logits_BLV.float() / inputs.temperature_BT[..., None]).log_softmax(-1).topk(self._wanted.top_k)
            # float32 holds every token id (below 2 ** 24) exactly.
            outputs = replace(outputs, top_tokens_BTK=gather(tokens.float()).cpu(), top_logprobs_BTK=gather(top_logprobs).cpu())
        if self._wanted.logits:
            outputs = replace(outputs, logits_BTV=gather(logits_BLV).float().cpu())
        return outputs, routing

    def _logits(self, inputs: ModelInputs, **named: Any) -> torch.Tensor:
        if self._takes_positions:
            named["position_ids"] = inputs.position_ids_BT
        if self._has_runs:
            named[RUNS] = inputs.runs
        with nullcontext() if self._attention is None else self._attention.of(inputs.rows):
            # Our attention does not look at the mask, but a mask keeps transformers from looking for sequences in position_ids: it is ours to say
            # which there are. use_cache: transformers 5.19 attends across packed sequences when a cache is made.
            return self._model(input_ids=inputs.input_ids_BT, attention_mask=inputs.padding_mask_BT, use_cache=False, **named).logits

    def _reduce_gradients(self, adapter_name: str) -> None:
        self._parameters(adapter_name).reduce_gradients()
        if (scale := self._loss_scale(adapter_name)) is not None:
            self._parameters(adapter_name).scale_gradients(1 / scale.value)

    def _scale_gradients(self, adapter_name: str, factor: float) -> None:
        self._parameters(adapter_name).scale_gradients(factor)

    def _gradient_norm(self, adapter_name: str) -> float:
        return self._parameters(adapter_name).gradient_norm()

    def _make_optimizer(self, adapter_name: str, config: OptimizerConfig) -> None:
        self._optimizers[adapter_name] = Optimizer(self._parameters(adapter_name), config)

    def _adjust_optimizer(self, adapter_name: str, config: OptimizerConfig) -> None:
        self._optimizers[adapter_name].adjust(config)

    def _optimizer_step(self, adapter_name: str, learning_rate: float) -> None:
        self._checkpoints.check(self._groups_of_mesh.device)
        self._optimizers[adapter_name].step(learning_rate)
        if (scale := self._loss_scale(adapter_name)) is not None:
            scale.update(overflowed=False)

    def _step_skipped(self, adapter_name: str) -> None:
        if (scale := self._loss_scale(adapter_name)) is not None:
            scale.update(overflowed=True)

    def _zero_gradients(self, adapter_name: str) -> None:
        self._parameters(adapter_name).zero_gradients()

    def _export_gradients(self, adapter_name: str) -> dict[str, NDArray[np.float32]]:
        return _on_rank_zero(self._adapter(adapter_name).export_gradients() if adapter_name else self._weights.whole_gradients())

    def _engine_config(self) -> dict[str, Any]:
        return {"trainer": type(self).__name__, **self._settings, "mesh": dataclasses.asdict(self._mesh)}

    # Training checkpoints.

    def _checkpoint_entries(self) -> dict[str, Any]:
        return {
            "trainer": "TransformersModel",
            "model_type": self._model.config.model_type,
            "mixed_precision": self._settings["mixed_precision"],
            "mesh": dataclasses.asdict(self._mesh),
            "loss_scales": {name: scale.state() for name in self._states if (scale := self._loss_scale(name)) is not None},
        }

    def _pieces(self, info: CheckpointInfo) -> list[Piece]:
        pieces: list[Piece] = []
        for name in info.adapters:
            pieces += self._parameters(name).pieces()
            if name in self._optimizers:
                pieces += self._optimizers[name].pieces()
        return pieces

    def _write_checkpoint(self, target: Path, info: CheckpointInfo, *, background: bool) -> None:
        self._checkpoints.save(target, info, self._pieces(info), generator_states(self._groups_of_mesh.device), background=background)

    def wait_for_checkpoint(self) -> None:
        self._checkpoints.wait()

    def resume_from_checkpoint(self, path: str | os.PathLike[str], *, adapter_name: str | None = None, saved_as: str | None = None) -> dict[str, Any]:
        self._checkpoints.wait()
        return super().resume_from_checkpoint(path, adapter_name=adapter_name, saved_as=saved_as)

    def _check_checkpoint(self, path: Path, info: CheckpointInfo) -> None:
        check_same_trainer(path, info, self._checkpoint_entries(), error_type=CheckpointError)
        check_files(path, info, error_type=CheckpointError)

    def _read_checkpoint(self, path: Path, info: CheckpointInfo) -> None:
        # Of one adapter among others none: dropout of the others must not jump back.
        everything = info.adapters.keys() == read_checkpoint(path).adapters.keys()
        same_mesh = info.engine["mesh"] == self._checkpoint_entries()["mesh"]
        states = read_generators(path, error_type=CheckpointError) if everything and same_mesh else None
        for name, progress in info.adapters.items():
            if progress.optimizer is not None:
                self._optimizers[name].make_states(progress.step)
        read_checkpoint_pieces(path, self._pieces(info), renamed=info.renamed, error_type=CheckpointError)
        for name in info.adapters:
            if (scale := self._loss_scale(name)) is not None:
                scale.load(info.engine["loss_scales"][info.renamed.get(name, name)])
        if states is not None:
            set_generator_states(states, self._groups_of_mesh.device)
        elif everything:
            logger.info("%s was written by another layout: dropout's generators start anew", path)

    # What the contract leaves to a trainer.

    def calculate_metric(self, *, adapter_name: str = "") -> dict[str, float]:
        metrics = super().calculate_metric(adapter_name=adapter_name)
        if (scale := self._loss_scale(adapter_name)) is not None:
            metrics["loss_scale"] = scale.value
        return metrics | self._routers.take_statistics()

    def set_processor(self, processor: InputProcessor, *, adapter_name: str = "") -> None:
        if processor.padding_free and self._packing_fault is not None:
            raise ConfigError(f"padding_free rows would be wrong: {self._packing_fault}. Set padding_free=False")
        super().set_processor(processor, adapter_name=adapter_name)

    def save(self, path: str | os.PathLike[str], *, adapter_name: str = "", merge: bool = False) -> None:
        self._whole_state(adapter_name)
        if adapter_name and not merge:
            save_adapter(self.iter_adapter(adapter_name), Path(path), self.adapter_config(adapter_name), error_type=CheckpointError)
            return
        weights = self.iter_merged(adapter_name) if adapter_name else self.iter_weights()
        write_hf_checkpoint(weights, self._path, Path(path), self._dtype, carried_over=_CARRIED_OVER, error_type=CheckpointError)

    def load(self, path: str | os.PathLike[str], *, adapter_name: str = "") -> None:
        self._state(adapter_name)
        if adapter_name:
            adapter = self._adapter(adapter_name)
            matrices = read_adapter(Path(path), adapter.lora, error_type=CheckpointError)
            adapter.check(matrices, os.fspath(path))
            with self._loading([adapter_name]):
                adapter.fill(matrices)
            return
        folder = find_checkpoint(path)
        trust = bool(self._settings["trust_remote_code"])
        check_same_model(folder, self._model.config, trust_remote_code=trust)
        tensors = self._groups_of_mesh.on_readers(
            lambda: take_tensors(load_model(folder, attn_implementation=None, trust_remote_code=trust), all_buffers=False)
        )
        buffers = self._weights.check(tensors, os.fspath(folder))
        with self._loading([""]):
            self._weights.take(tensors, buffers)

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight, whole, under its Hugging Face name, in the type that forward computes with. Collective: all ranks iterate to the end."""
        self._whole_state("")
        return self._weights.whole_weights(dtype=self._dtype, buffers=True)

    def iter_merged(self, adapter_name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight as by `iter_weights`, with an adapter merged into them. Collective: all ranks iterate to the end."""
        self._whole_state(adapter_name)
        return self._weights.whole_weights(dtype=self._dtype, buffers=True, change=self._adapter(adapter_name).merge)

    def export_weights(self, *, adapter_name: str = "") -> dict[str, NDArray[np.float32]]:
        self._whole_state(adapter_name)
        return _on_rank_zero(self._adapter(adapter_name).export() if adapter_name else self._weights.whole_weights())

    def iter_adapter(self, adapter_name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Every matrix of an adapter, whole, under peft's name, on every rank.

        Raises:
            UnknownAdapterError: there is none of that name.
        """
        self._whole_state(adapter_name)
        return self._adapter(adapter_name).export()

    def adapter_config(self, adapter_name: str) -> dict[str, Any]:
        """The content of an adapter's adapter_config.json in peft's format.

        Raises:
            UnknownAdapterError: there is none of that name.
        """
        self._state(adapter_name)
        adapter = self._adapter(adapter_name)
        return adapter.lora.to_dict() | {"target_modules": adapter.target_names, "base_model_name_or_path": self._settings["model"]}

    def _whole_state(self, adapter_name: str) -> None:
        """UnknownAdapterError where there is no such adapter, CallOrderError where its weights are a mixture."""
        self._state(adapter_name)
        self._check_whole(adapter_name)

    def close(self) -> None:
        """Takes this model's attention out of transformers' registries. The model must not be used afterwards.

        Raises:
            CheckpointError: a checkpoint that was still written in the background failed.
        """
        self._closed = True
        try:
            self._checkpoints.close()
        finally:
            if self._attention is not None:
                self._attention.remove()
                self._attention = None


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Of dropout."""
    states = {"cpu": torch.get_rng_state()}
    return states if device.type == "cpu" else states | {"cuda": torch.cuda.get_rng_state(device)}


def set_generator_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """As `generator_states` gave them."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _on_rank_zero(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, NDArray[np.float32]]:
    keep = torch.distributed.get_rank() == 0
    return {name: tensor.to("cpu", torch.float32, copy=True).numpy() for name, tensor in tensors if keep}


def _on_this_machine(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.device_type == "cuda" and not torch.cuda.is_available():
        logger.info("the mesh's device type is 'cuda' and this machine has no GPU: training on the CPU")
        return mesh.with_device_type("cpu")
    return mesh


def _as_it_is(values: torch.Tensor) -> torch.Tensor:
    return values


def _checkpoint_activations(model: Any) -> None:
    if not model.supports_gradient_checkpointing:
        raise ConfigError(f"{type(model).__name__} does not support activation_checkpointing")
    # Reentrant checkpoints lose gradients of inputs that need none, and recompute in a backward of their own.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _pad_token_id(config: Any, vocab_size: int) -> int:
    pad = getattr(config, "pad_token_id", None)
    return pad if pad is not None and 0 <= pad < vocab_size else 0
