"""The megatron-core side of the trainer: builds the model, runs it, owns its optimizer. Imported only once the platform is chosen."""

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.transformer_config import TransformerConfig

from twinkle_mesh import DeviceMesh
from twinkle_train import CallOrderError, ComputeLoss, ConfigError, OptimizerConfig, ReduceGroups, TokenOutputs

from . import _parallel
from ._batches import MicroBatch
from ._bridge import Bridge, MBridge
from ._logprobs import vocab_parallel_logprobs
from ._optimizer import Optimizer, gather_sharded_gradients, reduce_gradients
from ._schedule import run_schedule


class Engine:
    """A model on this rank's part of a mesh, with gradients and an optimizer.

    Args:
        hf_config: the checked Hugging Face configuration.
        path: the checkpoint folder.
        mesh: of all ranks; its device type is that of the machine.
        dtype: of the parameters.
        options: more fields of megatron-core's TransformerConfig.
        distributed_optimizer: shard optimizer states over data ranks (reduce-scatter and all-gather instead of all-reduce).
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
        distributed_optimizer: bool,
        seed: int,
        timeout_s: float,
    ) -> None:
        self._mesh = mesh
        self._dtype = dtype
        self._distributed_optimizer = distributed_optimizer
        self._optimizer: Optimizer | None = None
        self.device = torch.device("cpu") if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
        # A model that is forgotten instead of closed lets the layout go, too.
        self._release = weakref.finalize(self, _parallel.release, _parallel.acquire(mesh, seed=seed, timeout_s=timeout_s))
        try:
            bridge: Bridge = MBridge(hf_config, dtype, mesh.tp_size)
            bare = bridge.build(_base_options(mesh) | checked_options(options))
            bridge.load(bare, path)
        except BaseException:
            self._release()
            raise
        self._bridge = bridge
        self._bare: list[Any] = bare
        self._wrapped: list[Any] | None = None
        self._tp_group: Any = parallel_state.get_tensor_model_parallel_group()

    @property
    def _chunks(self) -> list[Any]:
        """This rank's model chunks: bare until something needs gradients, since their buffers are as large as the model."""
        return self._bare if self._wrapped is None else self._wrapped

    @property
    def _trained_chunks(self) -> list[Any]:
        """The same with gradient buffers (fp32, one value a weight)."""
        if self._wrapped is None:
            config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=self._distributed_optimizer)
            self._wrapped = [DistributedDataParallel(chunk.config, config, chunk) for chunk in self._bare]
        return self._wrapped

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

    # Running.

    def forward(self, micro_batch: MicroBatch) -> TokenOutputs:
        """One micro-batch with a graph; only without a pipeline."""
        (chunk,) = self._trained_chunks
        chunk.train()
        return self._outputs(micro_batch, chunk(micro_batch.input_ids_RC, micro_batch.position_ids_RC, None))

    def run(self, micro_batches: Sequence[MicroBatch], compute_loss: ComputeLoss | None) -> list[TokenOutputs] | None:
        """All micro-batches through the schedule, backward of the losses included; outputs (no graph) on the last stage only.

        An exception of the loss is raised when the schedule is through: the other stages, which wait for gradients, are not left hanging.
        """
        outputs: list[TokenOutputs] = []
        failure: Exception | None = None

        def on_last_stage(micro_batch: MicroBatch, logits_RCV: torch.Tensor) -> torch.Tensor:
            nonlocal failure
            if micro_batch.is_filler:
                return logits_RCV.sum() * 0.0
            token_outputs = self._outputs(micro_batch, logits_RCV)
            outputs.append(TokenOutputs(token_outputs.logprobs_BT.detach(), token_outputs.entropy_BT))
            if compute_loss is not None and failure is None:
                try:
                    return compute_loss(micro_batch.index, token_outputs).sum
                except Exception as error:  # raised below
                    failure = error
            return token_outputs.logprobs_BT.sum() * 0.0

        chunks = self._chunks if compute_loss is None else self._trained_chunks
        for chunk in chunks:
            chunk.train(compute_loss is not None)
        run_schedule(chunks, micro_batches, on_last_stage, forward_only=compute_loss is None)
        if failure is not None:
            raise failure
        return outputs if parallel_state.is_pipeline_last_stage() else None

    def _outputs(self, micro_batch: MicroBatch, logits_RCV: torch.Tensor) -> TokenOutputs:
        batch = micro_batch.batch
        logprobs_BT, entropy_BT = vocab_parallel_logprobs(
            micro_batch.cut(logits_RCV),
            micro_batch.tensor(batch.targets),
            temperature_BT=micro_batch.tensor(batch.temperature),
            vocab_size=self._bridge.vocab_size,
            group=self._tp_group,
        )
        return TokenOutputs(logprobs_BT, entropy_BT)

    # Gradients and the optimizer.

    def reduce_gradients(self) -> None:
        """Sums gradients over the ranks that hold other data, and weights that several ranks share."""
        reduce_gradients(self._trained_chunks)

    def scale_gradients(self, factor: float) -> None:
        """Multiplies all gradients."""
        for chunk in self._trained_chunks:
            chunk.scale_gradients(factor)

    def gradient_norm(self) -> float:
        """The 2-norm of the whole gradient, each weight counted once. Collective."""
        if self._distributed_optimizer:
            if self._optimizer is None:
                raise CallOrderError(
                    "the gradient norm of sharded gradients (use_distributed_optimizer) needs the optimizer: call set_optimizer first"
                )
            return self._optimizer.grad_norm()
        gradients = [
            parameter.main_grad
            for chunk in self._trained_chunks
            for parameter in chunk.parameters()
            if parameter.requires_grad and param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
        ]
        group: Any = parallel_state.get_model_parallel_group()
        return float(get_grad_norm_fp32(gradients, grad_stats_parallel_group=group))

    def make_optimizer(self, config: OptimizerConfig) -> None:
        """Replaces the optimizer by a fresh one.

        Raises:
            ConfigError: SGD with sharded states, which megatron-core does not have.
        """
        if self._distributed_optimizer and config.name == "sgd":
            raise ConfigError("use_distributed_optimizer works with 'adam' and 'adamw' only: leave it off for 'sgd', which has no states to shard")
        self._optimizer = Optimizer(self._trained_chunks, config, self._dtype, distributed=self._distributed_optimizer)

    def step(self, learning_rate: float) -> None:
        """One optimizer step with the gradients as they are."""
        assert self._optimizer is not None, "the trainer checks that there is an optimizer"
        self._optimizer.step(learning_rate)

    def zero_gradients(self) -> None:
        """Drops all gradients."""
        for chunk in self._wrapped or ():
            chunk.zero_grad_buffer()

    # Weights.

    def load(self, path: Path) -> None:
        """Reads the weights of a checkpoint into the model and the optimizer's main copies."""
        self._bridge.load(self._chunks, path)
        if self._optimizer is not None:
            self._optimizer.reload_parameters()

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights under their Hugging Face names. Collective: all ranks iterate to the end."""
        return self._bridge.export_weights(self._chunks)

    def export_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole gradients under their Hugging Face names. Collective: all ranks iterate to the end."""
        if self._distributed_optimizer:
            gather_sharded_gradients(self._trained_chunks)
        return self._bridge.export_gradients(self._trained_chunks)


_OWNED = (
    "bf16",
    "calculate_per_token_loss",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "fp16",
    "params_dtype",
    "perform_initialization",
    "pipeline_dtype",
    "pipeline_model_parallel_size",
    "sequence_parallel",
    "tensor_model_parallel_size",
    "variable_seq_lengths",
    "virtual_pipeline_model_parallel_size",
)


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's fields of megatron-core's TransformerConfig.

    Raises:
        ConfigError: a name that it does not have, or one that follows from the mesh, the precision or the trainer contract.
    """
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    if unknown := sorted(set(options) - known):
        raise ConfigError(f"transformer_options: megatron-core's TransformerConfig has no {', '.join(unknown)}")
    if owned := sorted(set(options) & set(_OWNED)):
        raise ConfigError(f"transformer_options: {', '.join(owned)} follow from device_mesh, mixed_precision and the trainer contract; set those")
    return dict(options)


def _base_options(mesh: DeviceMesh) -> dict[str, Any]:
    on_cpu = mesh.device_type == "cpu"
    options: dict[str, Any] = {
        "sequence_parallel": mesh.sequence_parallel,
        # Loss functions return sums, which megatron-core then leaves alone, and gradients are summed over data ranks, not averaged.
        "calculate_per_token_loss": True,
        # Every weight comes from the checkpoint, but megatron-core 0.16.1 marks tensor-parallel weights as such only while initializing them.
        "perform_initialization": True,
        # All micro-batches of a call have one shape; see MicroBatch.
        "variable_seq_lengths": False,
        # Needs apex or TransformerEngine's fused kernels.
        "gradient_accumulation_fusion": False,
    }
    if on_cpu:
        options |= {
            "use_cpu_initialization": True,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
            "persist_layer_norm": False,
            "cross_entropy_loss_fusion": False,
        }
    if mesh.pp_size > 1:
        # batch_p2p_comm with virtual stages gives wrong gradients on gloo, silently: two messages to one peer are told apart by order alone.
        options |= {"batch_p2p_comm": False, "overlap_p2p_comm": mesh.vpp_size is not None}
    return options
