"""megatron-core's optimizers. Imported only once the platform is chosen."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from twinkle_train import OptimizerConfig


class Optimizer:
    """An optimizer over this rank's model chunks (wrapped in megatron-core's DistributedDataParallel).

    Args:
        chunks: the wrapped chunks. Whether optimizer states are sharded over data ranks follows from their configuration.
        config: which optimizer.
        dtype: of the parameters; other than float32 they get float32 main copies.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], config: OptimizerConfig, dtype: torch.dtype, *, distributed: bool) -> None:
        self._chunks: Any = list(chunks)
        self._config = config
        self._optimizer: Any = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="sgd" if config.name == "sgd" else "adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                sgd_momentum=config.momentum,
                clip_grad=0.0,
                use_distributed_optimizer=distributed,
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
            ),
            self._chunks,
            use_gloo_process_groups=False,
        )
        for group in self._groups():
            # megatron-core leaves wd_mult (0 for biases and norms) to its own scheduler, which is not used here.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]

    def grad_norm(self) -> float:
        """The global norm of the reduced gradients. Collective."""
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def step(self, learning_rate: float) -> None:
        """Updates the parameters with the reduced gradients as they are; sharded states make it collective."""
        for group in self._groups():
            group["lr"] = learning_rate * group["lr_mult"]
        self._optimizer.prepare_grads()
        self._optimizer.step_with_ready_grads()
        # In float32 parameter.grad is main_grad itself, which the next backward must find detached.
        self._optimizer.zero_grad()

    def reload_parameters(self) -> None:
        """Copies parameters that changed outside, by loading, into the float32 main copies."""
        self._optimizer.reload_model_params()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self._optimizer.chained_optimizers for group in part.param_groups]
