"""TransformersModel: the trainer as a remote class."""

import os

import numpy as np
from numpy.typing import NDArray

from twinkle_data import ModelOutput
from twinkle_mesh import DeviceMesh
from twinkle_remote import remote_class, remote_function
from twinkle_sync import WeightSender
from twinkle_train import Inputs, OnNonFinite, collect_model_output, remote_train_methods

from ._embedding_trainer import EmbeddingTrainer
from ._embeddings import Pooling
from ._expert_parallel import ExpertParallelConfig
from ._sequence_parallel import SequenceParallelConfig
from ._trainer import MixedPrecision


@remote_class(execute="all")
@remote_train_methods
class TransformersModel(EmbeddingTrainer, WeightSender):
    """Trains any causal language model of transformers, on GPUs and on CPUs, data parallel, sharded (FSDP2), with sequences (Ulysses,
    ring) and experts divided over ranks.

    It follows the trainer contract (`twinkle_train.TrainModel`, where every method is described): every layout gives the loss, gradients and
    updated weights of one process, to rounding. Rows may be padded, packed, or padding-free; a model whose code would let the sequences of a row see
    one another is found out when it is made, and refuses such rows.

    Args:
        model_id: a local folder with a Hugging Face checkpoint (config.json, weights).
        device_mesh: dp_size, fsdp_size (weights are sharded over it, replicated over the rest), ulysses_size and cp_size (sequences are divided),
            ep_size (experts are divided over ranks of the others) and ep_fsdp_size (each expert is sharded).
            Default: data parallel over the group's workers.
        mixed_precision: 'no' (float32), 'bf16' (forward and backward in bfloat16; weights, reduced gradients and the optimizer in float32), or 'fp16'
            (the same in float16, with loss scaling: steps that overflow are skipped and counted, whatever on_non_finite says).
        remote_group: the device group whose workers hold the model, in mode 'ray'.
        seed: of dropout's generators. Weights come from the checkpoint, so all layouts start alike.
        activation_checkpointing: compute each layer again in backward instead of keeping its activations.
        attn_implementation: 'eager', 'sdpa', 'flex_attention' or 'flash_attention_2' ...; None: what transformers takes for the model.
        sequence_parallel: how rows are divided over the mesh's ulysses_size x cp_size ranks; None: Ulysses as far as heads divide, ring for the rest,
            and the loss from gathered log-probabilities.
        expert_parallel: how experts are divided over the mesh's ep_size ranks, and how routers compute, also where they are not divided; with
            keep_router_logits outputs have `router_logits`. None: divided experts have routers in float32, and nothing is kept.
        router_aux_loss_coef: by how much the load-balancing loss that transformers has for the model is added; of all rows of a
            call, whatever the layout and micro-batches. None: what the checkpoint's config says where it has output_router_logits, else 0.
        router_z_loss_coef: by how much the router z-loss is added.
        initial_loss_scale: of 'fp16'; halved by each step that overflows, doubled after a thousand that do not.
        on_non_finite: 'error' (NonFiniteError) or 'skip': what a loss or gradient is that is NaN or infinite. Skipped steps are counted by
            `skipped_steps` of calculate_metric.
        trust_remote_code: run code that is in the checkpoint's folder.
        timeout_s: how long ranks wait for one another, at start and in every collective; where weights are divided also for rank 0 to read the
            checkpoint.

    Raises:
        ModelNotFoundError: no checkpoint at model_id. UnsupportedModelError: transformers does not know it, or it cannot be sharded.
        LayoutError: the mesh has an axis that this trainer does not have, or is not that of the processes. ConfigError: a wrong option.
    """

    every_rank_has_weights = True

    def __init__(
        self,
        model_id: str | os.PathLike[str],
        device_mesh: DeviceMesh | None = None,
        mixed_precision: MixedPrecision = "no",
        remote_group: str | None = None,
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
        del remote_group  # remote_class has read it
        super().__init__(
            model_id,
            device_mesh,
            mixed_precision,
            seed=seed,
            activation_checkpointing=activation_checkpointing,
            attn_implementation=attn_implementation,
            sequence_parallel=sequence_parallel,
            expert_parallel=expert_parallel,
            router_aux_loss_coef=router_aux_loss_coef,
            router_z_loss_coef=router_z_loss_coef,
            initial_loss_scale=initial_loss_scale,
            on_non_finite=on_non_finite,
            trust_remote_code=trust_remote_code,
            timeout_s=timeout_s,
        )

    @classmethod
    def __worker_env__(cls, device_type: str) -> dict[str, str]:
        """The environment that the workers of a group need."""
        return {} if device_type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}

    @remote_function(dispatch="slice_dp", collect="flatten", lazy_collect=False)
    def embed(
        self, inputs: Inputs, micro_batch_size: int | None = None, adapter_name: str = "", *, pooling: Pooling = "last", normalize: bool = True
    ) -> list[NDArray[np.float32]]:
        return super().embed(inputs, micro_batch_size, adapter_name, pooling=pooling, normalize=normalize)

    @remote_function(dispatch="slice_dp", collect=collect_model_output, lazy_collect=False)
    def contrastive_forward_backward(
        self, inputs: Inputs, micro_batch_size: int | None = None, adapter_name: str = "", *, pooling: Pooling = "last", temperature: float = 0.05
    ) -> ModelOutput:
        return super().contrastive_forward_backward(inputs, micro_batch_size, adapter_name, pooling=pooling, temperature=temperature)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def close(self) -> None:
        """Takes this model's attention out of transformers' registries. The model must not be used afterwards."""
        super().close()
