"""MegatronModel: the trainer as a remote class."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from twinkle_data import InputProcessor, ModelOutput, Template
from twinkle_mesh import DeviceMesh
from twinkle_remote import remote_class, remote_function
from twinkle_sync import WeightSender
from twinkle_train import Inputs, LossInput, LossOutput, collect_model_output

from ._trainer import MegatronTrainer, MixedPrecision, Recompute

# A batch is split over the data ranks; its outputs are joined in the order of the data.
_batch = remote_function(dispatch="slice_dp", collect=collect_model_output)
# The same on all ranks, and the same result from all of them: it is waited for, so that errors show where the call is.
_all = remote_function(dispatch="all", collect="first", lazy_collect=False)


@remote_class(execute="all")
class MegatronModel(WeightSender, MegatronTrainer):
    """Trains a dense Llama, Qwen2 or Qwen3 model with megatron-core: data, tensor, sequence and pipeline parallel, on GPUs and on CPUs.

    It follows the trainer contract (`twinkle_train.TrainModel`, where every method is described): every layout gives the loss,
    gradients and updated weights of one process, to rounding. On a CPU, megatron-core runs through `twinkle_megatron.cpu`; on GPUs
    unmodified, with TransformerEngine (`pip install 'twinkle-megatron[te]'`). Two models in one process share a layout.

    Args:
        model_id: a local folder with a Hugging Face checkpoint (config.json, *.safetensors).
        device_mesh: dp_size, tp_size (with sequence_parallel), pp_size and vpp_size. Default: data parallel over the group's workers.
        mixed_precision: 'no' (float32) or 'bf16' (parameters in bfloat16; gradients and the optimizer in float32).
        remote_group: the device group whose workers hold the model, in mode 'ray'.
        seed: of dropout's generators. Weights come from the checkpoint, so all layouts start alike.
        recompute: None, 'selective' (attention only) or 'full': activations are computed again in backward to save memory.
        use_distributed_optimizer: shard optimizer states over the data ranks (ZeRO-1, arXiv:1910.02054).
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
        *,
        seed: int = 0,
        recompute: Recompute | None = None,
        use_distributed_optimizer: bool = False,
        transformer_options: Mapping[str, Any] | None = None,
        timeout_s: float = 600,
    ) -> None:
        super().__init__(
            model_id,
            device_mesh,
            mixed_precision,
            seed=seed,
            recompute=recompute,
            use_distributed_optimizer=use_distributed_optimizer,
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

    @_batch
    def forward(self, inputs: Inputs, *, adapter_name: str = "") -> ModelOutput:
        return super().forward(inputs, adapter_name=adapter_name)

    @_all
    def calculate_loss(self, *, adapter_name: str = "") -> float:
        return super().calculate_loss(adapter_name=adapter_name)

    @_all
    def backward(self, *, adapter_name: str = "") -> None:
        super().backward(adapter_name=adapter_name)

    @_batch
    def forward_only(self, inputs: Inputs, micro_batch_size: int | None = None, adapter_name: str = "") -> ModelOutput:
        return super().forward_only(inputs, micro_batch_size, adapter_name)

    @_batch
    def forward_backward(self, inputs: Inputs, micro_batch_size: int | None = None, adapter_name: str = "") -> ModelOutput:
        return super().forward_backward(inputs, micro_batch_size, adapter_name)

    @_all
    def clip_grad_norm(self, max_grad_norm: float = 1.0, *, adapter_name: str = "") -> float:
        return super().clip_grad_norm(max_grad_norm, adapter_name=adapter_name)

    @_all
    def step(self, *, adapter_name: str = "") -> None:
        super().step(adapter_name=adapter_name)

    @_all
    def zero_grad(self, *, adapter_name: str = "") -> None:
        super().zero_grad(adapter_name=adapter_name)

    @_all
    def lr_step(self, *, adapter_name: str = "") -> float:
        return super().lr_step(adapter_name=adapter_name)

    @_all
    def clip_grad_and_step(self, max_grad_norm: float = 1.0, *, adapter_name: str = "") -> float:
        return super().clip_grad_and_step(max_grad_norm, adapter_name=adapter_name)

    @_all
    def set_loss(self, loss: str | type | Callable[[LossInput], LossOutput], *, adapter_name: str = "", **options: Any) -> None:
        super().set_loss(loss, adapter_name=adapter_name, **options)

    @_all
    def set_optimizer(
        self,
        name: str = "adamw",
        lr: float = 1e-5,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        adapter_name: str = "",
    ) -> None:
        super().set_optimizer(name, lr, betas=betas, eps=eps, weight_decay=weight_decay, momentum=momentum, adapter_name=adapter_name)

    @_all
    def set_lr_scheduler(
        self,
        name: str = "constant",
        *,
        warmup_steps: int = 0,
        total_steps: int | None = None,
        min_lr_ratio: float = 0.0,
        adapter_name: str = "",
    ) -> None:
        super().set_lr_scheduler(name, warmup_steps=warmup_steps, total_steps=total_steps, min_lr_ratio=min_lr_ratio, adapter_name=adapter_name)

    @_all
    def set_template(self, template: Template | str, *, adapter_name: str = "") -> None:
        super().set_template(template, adapter_name=adapter_name)

    @_all
    def set_processor(self, processor: InputProcessor, *, adapter_name: str = "") -> None:
        MegatronTrainer.set_processor(self, processor, adapter_name=adapter_name)

    @_all
    def calculate_metric(self, *, adapter_name: str = "") -> dict[str, float]:
        return super().calculate_metric(adapter_name=adapter_name)

    @_all
    def save(self, path: str | os.PathLike[str]) -> None:
        super().save(path)

    @_all
    def load(self, path: str | os.PathLike[str]) -> None:
        super().load(path)

    @_all
    def export_weights(self, *, adapter_name: str = "") -> dict[str, NDArray[np.float32]]:
        return super().export_weights(adapter_name=adapter_name)

    @_all
    def export_gradients(self, *, adapter_name: str = "") -> dict[str, NDArray[np.float32]]:
        return super().export_gradients(adapter_name=adapter_name)

    @_all
    def get_train_configs(self) -> dict[str, Any]:
        return super().get_train_configs()

    @_all
    def close(self) -> None:
        super().close()
