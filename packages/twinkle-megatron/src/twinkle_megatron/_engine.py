"""The megatron-core side of the trainer: builds the model, runs it, owns its optimizer. Imported only once the platform is chosen."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mbridge.core.util import unwrap_model
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from numpy.typing import NDArray

from twinkle_data import Batch
from twinkle_mesh import DeviceMesh
from twinkle_train import ComputeLoss, ConfigError, LoraConfig, LossOutput, Piece, ReduceGroups, Row, TokenOutputs, Wanted, merge_adapter

from . import _moe, _parallel, _replay
from ._adapters import Adapter
from ._bridge import Bridge, check_weights, make_bridge
from ._errors import CheckpointError
from ._logprobs import gather_context, gather_vocabulary, vocab_parallel_logprobs, vocab_parallel_top_k
from ._lora import Site, make_sites
from ._lora_plan import LinearLayer
from ._options import base_options, checked_options
from ._pieces import state_pieces, weight_pieces
from ._schedule import packed_parameters, run_schedule
from ._trainable import Trainable
from ._views import Columns, View, ViewShape, common_shape, make_view, view_shape, with_fillers
from ._weights import Placement


class Engine:
    """A model on this rank's part of a mesh, and adapters on it, each with gradients and an optimizer of its own.

    Methods that take an adapter's name mean the base model by ''.

    Args:
        hf_config: the checked Hugging Face configuration.
        path: the checkpoint folder.
        mesh: of all ranks; its device type is that of the machine.
        dtype: of the parameters.
        options: more fields of megatron-core's TransformerConfig.
        layers_per_stage: how many layers each (virtual) stage has; None: equally many.
        distributed_optimizer: shard optimizer states over data ranks (reduce-scatter and all-gather instead of all-reduce).
        overlap: reduce gradients during backward, and gather sharded parameters during forward.
        loss_scale: the first one, of float16.
        seed: of the generators of dropout.
        timeout_s: how long a collective may wait for its peers.
    """

    def __init__(
        self,
        hf_config: Any,
        path: Path,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        *,
        options: Mapping[str, Any],
        layers_per_stage: Sequence[int] | None,
        distributed_optimizer: bool,
        overlap: bool,
        loss_scale: float,
        seed: int,
        timeout_s: float,
    ) -> None:
        self._mesh = mesh
        self._dtype = dtype
        self._distributed_optimizer = distributed_optimizer
        self._seed = seed
        self._loss_scale = loss_scale
        self.device = torch.device("cpu") if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
        checked = checked_options(options)
        # A model that is forgotten instead of closed lets the layout go, too.
        self._release = weakref.finalize(self, _parallel.release, _parallel.acquire(mesh, seed=seed, timeout_s=timeout_s))
        try:
            bridge: Bridge = make_bridge(hf_config, dtype, mesh.tp_size)
            bare = bridge.build(base_options(mesh, layers_per_stage) | checked)
            check_weights(bridge, path)
            bridge.load(bare, path)
        except BaseException:
            self._release()
            raise
        self._bridge = bridge
        self._bare: list[Any] = bare
        self._base = Trainable(bare, dtype, sharded=distributed_optimizer, overlap=overlap, loss_scale=loss_scale)
        self._adapters: dict[str, Adapter] = {}
        self._layers: list[LinearLayer] = []
        self._sites: dict[tuple[int, str], Site] = {}
        self._active = ""
        self._tp_group: Any = parallel_state.get_tensor_model_parallel_group()
        self._cp_group: Any = parallel_state.get_context_parallel_group()
        self._config: Any = bare[0].config
        self._routers = _moe.routers(bare)
        self._columns = Columns(cp_size=mesh.cp_size, cp_rank=self._cp_group.rank(), tp_size=mesh.tp_size if mesh.sequence_parallel else 1)

    def trainable(self, adapter_name: str) -> Trainable:
        """The base model's parameters, or an adapter's, with gradients and optimizer."""
        if adapter_name:
            return self._adapters[adapter_name].trainable
        # megatron-core leaves out whatever is frozen at the moment, in buffers, reductions and norms.
        self._activate("")
        return self._base

    @property
    def has_experts(self) -> bool:
        """Whether the model has expert layers, on whatever stage."""
        return bool(self._config.num_moe_experts)

    @property
    def _has_aux_losses(self) -> bool:
        config = self._config
        return self.has_experts and (config.moe_router_load_balancing_type == "aux_loss" or config.moe_z_loss_coeff is not None)

    @property
    def groups(self) -> ReduceGroups:
        """Over which ranks totals are reduced."""
        # megatron-core's annotations are those of every kind of group at once.
        data: Any = parallel_state.get_data_parallel_group()
        pipeline: Any = parallel_state.get_pipeline_model_parallel_group()
        return ReduceGroups(
            data=data if data.size() > 1 else None,
            pipeline=pipeline if pipeline.size() > 1 else None,
            last_stage=parallel_state.get_pipeline_model_parallel_last_rank(),
            device=self.device,
        )

    def close(self) -> None:
        """Lets another layout be built in this process."""
        self._release()

    # Adapters.

    def add_adapter(self, name: str, lora: LoraConfig) -> None:
        """Puts an adapter on the model, inactive. Collective.

        Raises:
            ConfigError: what this model or layout cannot have an adapter on.
        """
        if self._config.moe_shared_expert_overlap and self._config.moe_shared_expert_intermediate_size:
            raise ConfigError("adapters need transformer_options={'moe_shared_expert_overlap': False}: overlapped shared experts bypass their layers")
        if not self._layers:
            linear_layers: Any = getattr(self._bridge, "linear_layers", None)
            if linear_layers is None:
                raise ConfigError(
                    f"{type(self._bridge).__name__} has no method linear_layers(), which adapters need: derive it from "
                    "twinkle_megatron.bridges.MBridge"
                )
            self._layers = linear_layers()
        chunks = [_bare(chunk) for chunk in self._bare]
        adapter = Adapter(
            name,
            lora,
            self._layers,
            chunks,
            self._dtype,
            seed=self._seed,
            sharded=self._distributed_optimizer,
            loss_scale=self._loss_scale,
        )
        if not self._sites:
            here = parallel_state.get_pipeline_model_parallel_rank()
            self._sites = make_sites(chunks, [layer for layer in self._layers if layer.stage == here])
            for chunk in chunks:
                if chunk.pre_process:
                    chunk.embedding.register_forward_hook(self._let_gradients_reach_adapters)
        self._adapters[name] = adapter

    def remove_adapter(self, name: str) -> None:
        """Forgets an adapter. Collective."""
        if self._active == name:
            self._activate("")
        del self._adapters[name]

    def _let_gradients_reach_adapters(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        # Frozen layers hand gradients on only to inputs that want some: without it recomputed layers, and stages before the first adapter,
        # would have no graph at all.
        if self._active and torch.is_grad_enabled():
            output.requires_grad_(True)

    def _activate(self, name: str) -> list[Any]:
        """Makes the model that of an adapter, or the base model; returns the chunks to run. A frozen base has no gradients."""
        if name != self._active:
            if bool(name) != bool(self._active):
                self._base.freeze(bool(name))
            besides = dict(self._adapters[name].beside()) if name else {}
            for place, site in self._sites.items():
                site.active = besides.get(place)
            self._active = name
        return self._bare if name else self._base.chunks

    def adapter(self, name: str) -> Adapter:
        """The adapter of that name, which must be there."""
        return self._adapters[name]

    # Running.

    def views(self, batches: Sequence[Batch], pad_token_id: int) -> list[View]:
        """The micro-batches as the model sees them. Collective over the data ranks where the model's experts need it."""
        packed = any(batch.is_packed for batch in batches)
        shapes = [view_shape(batch, self._columns, packed=packed) for batch in batches]
        if self.has_experts and self._config.moe_token_dispatcher_type == "allgather" and self._mesh.data_world_size > 1:
            shapes = self._agreed(batches, shapes)
        if self._mesh.pp_size > 1:
            # Stages need not tell each other shapes then.
            shapes = [common_shape(shapes)] * len(shapes)
        made = [
            make_view(index, batch, shape, self._columns, pad_token_id=pad_token_id, device=self.device)
            for index, (batch, shape) in enumerate(zip(batches, shapes, strict=True))
        ]
        # megatron-core's interleaved schedule wants a multiple of the pipeline's size.
        return made if self._mesh.vpp_size is None else with_fillers(made, self._mesh.pp_size)

    def _agreed(self, batches: Sequence[Batch], shapes: Sequence[ViewShape]) -> list[ViewShape]:
        """The all-gather dispatcher gathers equally many tokens from all expert-parallel ranks: each micro-batch gets the largest shape."""
        group: Any = parallel_state.get_data_parallel_group()

        def largest(numbers: list[int]) -> list[int]:
            tensor = torch.tensor(numbers, device=self.device)
            torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group)
            return tensor.tolist()

        (packed,) = largest([int(shapes[0].packed)])
        if packed:
            shapes = [view_shape(batch, self._columns, packed=True) for batch in batches]
        sizes = largest([size for shape in shapes for size in (shape.rows, shape.columns)])
        return [ViewShape(rows=rows, columns=columns, packed=bool(packed)) for rows, columns in zip(sizes[::2], sizes[1::2], strict=True)]

    def replay_routing(self, views: Sequence[View], rows: Sequence[Sequence[Row]]) -> None:
        """Makes the routers replay what the rows of these micro-batches carry, until :meth:`route_as_usual`.

        Raises:
            InputError: a row that carries none.
        """
        if self._routers:
            _replay.replay(self._routers, views, rows, tp_size=self._columns.tp_size, tp_rank=self._tp_group.rank())

    def route_as_usual(self) -> None:
        """The routers choose experts themselves again."""
        for router in self._routers:
            router.replay.clear()

    def record_routing(self, views: Sequence[View]) -> list[NDArray[np.int16]]:
        """The experts that each token of each sequence goes to, ``[T, expert layers, k]``. Collective."""
        for router in self._routers:
            router.replay.recording = True
        try:
            self.run("", views, None, Wanted())
            return _replay.recorded(self._routers, views, tp_size=self._columns.tp_size, tp_rank=self._tp_group.rank(), config=self._config)
        finally:
            self.route_as_usual()

    def forward(self, adapter_name: str, view: View) -> TokenOutputs:
        """One micro-batch with a graph; only without a pipeline."""
        self._weigh_aux_losses([view])
        trainable = self.trainable(adapter_name)
        _ = trainable.gradients
        if self.has_experts:
            # megatron-core's schedules, which are not used here, set it: one for all models of a process.
            scale = 1.0 if trainable.loss_scale is None else trainable.loss_scale.value
            MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([scale], device=self.device))
        (chunk,) = self._activate(adapter_name)
        chunk.train()
        outputs = self._outputs(view, self._call(chunk, view), Wanted())
        self._forget_graphs()
        return outputs

    def backward(self, adapter_name: str, output: LossOutput, batch: Batch) -> None:
        """Backward of a loss of :meth:`forward`'s outputs."""
        self.check_loss_weight(output, batch)
        self._activate(adapter_name)
        trainable = self.trainable(adapter_name)
        trainable.gradients.before_backward()
        (output.sum if trainable.loss_scale is None else trainable.loss_scale.scaled(output.sum)).backward()
        self._forget_graphs()

    def run(self, adapter_name: str, views: Sequence[View], compute_loss: ComputeLoss | None, wanted: Wanted) -> list[TokenOutputs] | None:
        """All micro-batches through the schedule, backward of the losses included; outputs (no graph) on the last stage only.

        An exception of the loss is raised when the schedule is through: the other stages, which wait for gradients, are not left hanging.
        """
        outputs: list[TokenOutputs] = []
        failure: Exception | None = None

        def on_last_stage(view: View, logits_RKV: torch.Tensor) -> torch.Tensor:
            nonlocal failure
            if view.is_filler:
                return logits_RKV.sum() * 0.0
            token_outputs = self._outputs(view, logits_RKV, wanted)
            outputs.append(replace(token_outputs, logprobs_BT=token_outputs.logprobs_BT.detach()))
            if compute_loss is not None and failure is None:
                try:
                    loss = compute_loss(view.index, token_outputs)
                    self.check_loss_weight(loss, view.batch)
                    return loss.sum
                except Exception as error:  # raised below
                    failure = error
            return token_outputs.logprobs_BT.sum() * 0.0

        if compute_loss is not None:
            trainable = self.trainable(adapter_name)
            trainable.gradients.before_backward()
            self._config.grad_scale_func = None if trainable.loss_scale is None else trainable.loss_scale.scaled
            self._weigh_aux_losses(views)
        chunks = self._activate(adapter_name)
        for chunk in chunks:
            chunk.train(compute_loss is not None)
        run_schedule(chunks, views, self._call, on_last_stage, forward_only=compute_loss is None)
        self._forget_graphs()
        if failure is not None:
            raise failure
        return outputs if parallel_state.is_pipeline_last_stage() else None

    def _forget_graphs(self) -> None:
        if self._routers:
            _moe.forget_graphs(self._bare)

    def _call(self, chunk: Any, view: View) -> torch.Tensor:
        options: dict[str, Any] = {"packed_seq_params": packed_parameters(view)}
        if self.has_experts and chunk.training:
            options["padding_mask"] = self._uncounted(chunk, view)
        return chunk(view.input_ids_RK, view.position_ids_RK, None, **options)

    def _uncounted(self, chunk: Any, view: View) -> torch.Tensor | None:
        """Which tokens the router leaves out of counts and losses: padding, and all of a micro-batch that is there for its peers' sake only."""
        mask = view.padding_RK
        if not _counts(view):
            mask = torch.ones_like(view.input_ids_RK, dtype=torch.bool)
        if mask is not None and self._mesh.sequence_parallel and not _bare(chunk).pre_process:
            # megatron-core 0.16.1 divides the mask over the sequence-parallel ranks on the first stage only.
            mask = mask.chunk(self._tp_group.size(), 1)[self._tp_group.rank()]
        return mask

    def _weigh_aux_losses(self, views: Sequence[View]) -> None:
        """Makes the routers' losses weighted means over micro-batches, as the loss is. Collective over the data ranks."""
        if not self._has_aux_losses:
            return
        counted = [view.batch for view in views if _counts(view)]
        weight = sum(float(batch.loss_mask.sum(dtype="float64")) for batch in counted)
        sums = torch.tensor([weight, sum(int(batch.valid.sum()) for batch in counted)], dtype=torch.float64, device=self.device)
        group: Any = parallel_state.get_data_parallel_group()
        if group.size() > 1:
            torch.distributed.all_reduce(sums, group=group)
        weight, num_tokens = sums.tolist()
        for router in self._routers:
            router.aux_weight = weight / max(num_tokens, 1)

    def check_loss_weight(self, loss: LossOutput, batch: Batch) -> None:
        """Refuses a loss that weighs otherwise than by its mask, beside which the routers' losses would be out of proportion.

        Raises:
            ConfigError: a loss that counts sequences, for example.
        """
        if not self._has_aux_losses:
            return
        expected = float(batch.loss_mask.sum(dtype="float64"))
        if abs(float(loss.weight) - expected) > 1e-3 * max(expected, 1.0):
            raise ConfigError(
                f"the loss weighs a micro-batch {float(loss.weight):g}, its tokens weigh {expected:g}: auxiliary and z losses of the routers are "
                "weighed by tokens, so they need a loss that is, too; use one, or leave moe_aux_loss_coeff and moe_z_loss_coeff out."
            )

    def _outputs(self, view: View, logits_RKV: torch.Tensor, wanted: Wanted) -> TokenOutputs:
        def whole(values_RK: torch.Tensor) -> torch.Tensor:
            return view.to_batch(gather_context(values_RK, self._cp_group))

        top_tokens = top_logprobs = logits = None
        options: Any = {"vocab_size": self._bridge.vocab_size, "group": self._tp_group}
        # Before log-probabilities take the logits' place. Kept in host memory: they are as large as many micro-batches.
        if wanted.top_k:
            found = vocab_parallel_top_k(logits_RKV.detach(), wanted.top_k, temperature_BT=view.temperature_RK, **options)
            top_tokens, top_logprobs = (whole(each).cpu() for each in found)
        if wanted.logits:
            logits = whole(gather_vocabulary(logits_RKV.detach(), **options)).cpu()
        logprobs_RK, entropy_RK = vocab_parallel_logprobs(logits_RKV, view.targets_RK, temperature_BT=view.temperature_RK, **options)
        return TokenOutputs(whole(logprobs_RK), whole(entropy_RK), top_tokens_BTK=top_tokens, top_logprobs_BTK=top_logprobs, logits_BTV=logits)

    # Steps.

    def step(self, adapter_name: str, learning_rate: float) -> None:
        """One optimizer step with the gradients as they are."""
        self.trainable(adapter_name).step(learning_rate)
        if self.has_experts and not adapter_name:
            _moe.update_expert_biases(self._routers, self._config.moe_router_bias_update_rate)

    def take_statistics(self) -> dict[str, float]:
        """Load and losses of the routers since the last call. Collective."""
        if not self.has_experts:
            return {}
        pipeline: Any = parallel_state.get_pipeline_model_parallel_group()
        return dict(_moe.take_statistics(self._routers, pipeline if pipeline.size() > 1 else None))

    # Weights.

    def check_weights(self, path: Path) -> None:
        """CheckpointError when a checkpoint's tensors do not fit the model."""
        check_weights(self._bridge, path)

    def load(self, path: Path) -> None:
        """Reads the weights of a checkpoint into the model and the optimizer's main copies."""
        self._base.settle_parameters()
        self._bridge.load(self._bare, path)
        self._base.parameters_replaced()

    def export_weights(self, adapter_name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights under their Hugging Face names, on rank 0, or an adapter's under peft's. Collective: all ranks iterate to the end."""
        if adapter_name:
            return self._adapters[adapter_name].export()
        self._base.settle_parameters()
        return self._bridge.export_weights(self._bare)

    def merged_weights(self, adapter_name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The base model's weights with an adapter's product added: B A times its scaling, in float32. Collective: all ranks iterate to the end."""
        if not adapter_name:
            return self.export_weights()
        adapter = self._adapters[adapter_name]
        return merge_adapter(self.export_weights(), dict(adapter.export()), adapter.lora)

    def export_gradients(self, adapter_name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """Whole gradients under the names of :meth:`export_weights`. Collective: all ranks iterate to the end."""
        if adapter_name:
            return self._adapters[adapter_name].export(gradients=True)
        self._base.gradients.make_whole()
        return self._bridge.export_gradients(self._bare)

    # Training checkpoints.

    def checkpoint_pieces(self, steps: Mapping[str, int]) -> list[Piece]:
        """Rectangles of whole weights, routers' biases and, after the first step, optimizer states that this rank has; views, not copies.

        steps: how many the optimizer has taken, of the adapters that are wanted ('' is the base model).

        Raises:
            CheckpointError: a bridge of one's own that does not say where weights lie.
        """
        pieces: list[Piece] = []
        for name, num_steps in steps.items():
            trainable = self.trainable(name)
            trainable.settle_parameters()
            for placement in self._adapters[name].placements() if name else self._base_placements():
                pieces += weight_pieces(placement)
                if trainable.optimizer is not None and num_steps:
                    for state, flat, start in trainable.optimizer.states(placement.tensor):
                        pieces += state_pieces(placement, f"optimizer.state.{state}", flat, start)
        return pieces

    def _base_placements(self) -> Iterator[Placement]:
        placements: Any = getattr(self._bridge, "placements", None)
        if placements is None:
            raise CheckpointError(
                f"{type(self._bridge).__name__} has no method placements(chunks), which training checkpoints need: derive it from "
                "twinkle_megatron.bridges.MBridge, or use save(path) for the weights alone."
            )
        return placements(self._bare)

    def generator_states(self) -> dict[str, Any]:
        """Of torch's generators and of dropout's, which differ from rank to rank."""
        tracker: Any = get_cuda_rng_tracker()
        states = {"cpu": torch.get_rng_state(), "model_parallel": dict(tracker.get_states())}
        return states if self.device.type == "cpu" else states | {"cuda": torch.cuda.get_rng_state(self.device)}

    def set_generator_states(self, states: Mapping[str, Any]) -> None:
        """As :meth:`generator_states` gave them on this rank of the same layout."""
        torch.set_rng_state(states["cpu"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)
        tracker: Any = get_cuda_rng_tracker()
        tracker.set_states(dict(states["model_parallel"]))


def _bare(chunk: Any) -> Any:
    return unwrap_model(chunk)


def _counts(view: View) -> bool:
    return not view.is_filler and bool(view.batch.loss_mask.any())
