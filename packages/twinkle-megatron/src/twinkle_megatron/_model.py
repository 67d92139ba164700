"""MegatronModel: the trainer as a remote class."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle_mesh import DeviceMesh
from twinkle_remote import remote_class, remote_function
from twinkle_sync import WeightSender
from twinkle_train import Inputs, OnNonFinite, remote_train_methods

from ._trainer import MegatronTrainer, MixedPrecision, Recompute


@remote_class(execute="all")
@remote_train_methods
class MegatronModel(MegatronTrainer, WeightSender):
    """Trains Llama, Qwen2, Qwen3, Qwen3-MoE, Mixtral, DeepSeek-V3 and GLM4-MoE models with megatron-core, in all of its layouts, on GPUs and on CPUs.

    It follows the trainer contract (`twinkle_train.TrainModel`, where every method is described): every layout gives the loss,
    gradients and updated weights of one process, to rounding. On a CPU, megatron-core runs through `twinkle_megatron.cpu`; on GPUs
    unmodified, with TransformerEngine (`pip install 'twinkle-megatron[te]'`). Two models in one process share a layout. Any number of low-rank
    adapters (`add_adapter_to_model`) share one base model, which has no gradients while they are trained.

    Args:
        model_id: a local folder with a Hugging Face checkpoint (config.json, *.safetensors).
        device_mesh: dp_size, tp_size (with sequence_parallel), pp_size, vpp_size, cp_size, ep_size and etp_size. Default: data parallel over the
            group's workers.
        mixed_precision: 'no' (float32), 'bf16' (parameters in bfloat16; gradients and the optimizer in float32), or 'fp16' (with loss scaling:
            a step whose gradients overflow is skipped, and counted by `skipped_steps` of calculate_metric).
        remote_group: the device group whose workers hold the model, in mode 'ray'.
        seed: of dropout's generators. Weights come from the checkpoint, so all layouts start alike.
        recompute: None, 'selective' (attention only) or 'full': activations are computed again in backward to save memory.
        use_distributed_optimizer: shard optimizer states over the data ranks (ZeRO-1, arXiv:1910.02054).
        overlap_communication: reduce gradients while backward still runs, and, with use_distributed_optimizer, gather parameters while the next
            forward runs. Pays off where one forward_backward call makes one step; further calls that accumulate are right, but do not overlap.
        initial_loss_scale: of 'fp16'; halved by each step that overflows, doubled after a thousand that do not.
        on_non_finite: 'error' (NonFiniteError) or 'skip': what a loss or gradient is that is NaN or infinite. Skipped steps are counted by
            `skipped_steps` of calculate_metric.
        layers_per_stage: how many layers each pipeline stage (or virtual stage, in the order of the layers) has; None: equally many.
        transformer_options: more fields of megatron-core's TransformerConfig, by name.
        timeout_s: how long ranks wait for one another, at start and in every collective.

    Raises:
        ModelNotFoundError: no checkpoint at model_id. UnsupportedModelError: an architecture or an option in its config.json.
        LayoutError: the mesh does not divide the model, or is not that of the processes. ConfigError: a wrong option.
    """

    def __init__(
        self,
        model_id: str | os.PathLike[str],
        device_mesh: DeviceMesh | None = None,
        mixed_precision: MixedPrecision = "no",
        remote_group: str | None = None,
        *,
        seed: int = 0,
        recompute: Recompute | None = None,
        use_distributed_optimizer: bool = False,
        overlap_communication: bool = False,
        initial_loss_scale: float = 4096.0,
        on_non_finite: OnNonFinite = "error",
        layers_per_stage: Sequence[int] | None = None,
        transformer_options: Mapping[str, Any] | None = None,
        timeout_s: float = 600,
    ) -> None:
        del remote_group  # remote_class has read it
        super().__init__(
            model_id,
            device_mesh,
            mixed_precision,
            seed=seed,
            recompute=recompute,
            use_distributed_optimizer=use_distributed_optimizer,
            overlap_communication=overlap_communication,
            initial_loss_scale=initial_loss_scale,
            on_non_finite=on_non_finite,
            layers_per_stage=layers_per_stage,
            transformer_options=transformer_options,
            timeout_s=timeout_s,
        )

    @classmethod
    def __worker_env__(cls, device_type: str) -> dict[str, str]:
        """The environment that the workers of a group need."""
        if device_type == "cuda":
            # megatron-core overlaps communication of tensor and sequence parallelism by the order of launches.
            return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        # Nothing of megatron-core is to be compiled on a CPU.
        return {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}

    @remote_function(dispatch="slice_dp", collect="flatten", lazy_collect=False)
    def record_routing(self, inputs: Inputs, micro_batch_size: int | None = None) -> list[NDArray[np.int16]]:
        """Which experts each token goes to: int16 ``[T, expert layers, k]`` a row; to be replayed as ``user_data["routed_experts"]``."""
        return super().record_routing(inputs, micro_batch_size)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def set_router_replay(self, enabled: bool = True) -> None:
        """From now on tokens go to the experts that their rows' ``user_data["routed_experts"]`` name (False: to those that the router chooses)."""
        super().set_router_replay(enabled)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def close(self) -> None:
        """Frees the workers for a model with another layout. The model must not be used afterwards."""
        super().close()
