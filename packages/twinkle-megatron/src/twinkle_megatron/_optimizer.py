"""megatron-core's optimizers. Imported only once the platform is chosen."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.muon import HAVE_EMERGING_OPTIMIZERS, get_megatron_muon_optimizer

from twinkle_train import OptimizerConfig

from ._gradients import sum_of_squares


class Optimizer:
    """An optimizer over this rank's model chunks (wrapped in megatron-core's DistributedDataParallel).

    Args:
        chunks: the wrapped chunks. Whether optimizer states are sharded over data ranks follows from their configuration.
        config: which optimizer.
        dtype: of the parameters; other than float32 they get float32 main copies.

    Raises:
        ImportError: Muon without the package emerging-optimizers.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], config: OptimizerConfig, dtype: torch.dtype, *, distributed: bool) -> None:
        if config.name == "muon" and not HAVE_EMERGING_OPTIMIZERS:
            raise ImportError(
                "megatron-core's Muon needs the package emerging-optimizers, which is not installed: install it from NVIDIA's repository "
                "Emerging-Optimizers, or use set_optimizer('adamw')",
                name="emerging_optimizers",
            )
        self._chunks: Any = list(chunks)
        self._config = config
        self._has_main_copies = dtype is not torch.float32
        options = MegatronOptimizerConfig(
            optimizer="sgd" if config.name == "sgd" else "adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            sgd_momentum=config.momentum,
            muon_momentum=config.momentum,
            clip_grad=0.0,
            use_distributed_optimizer=distributed,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            # The gradients that come here are no longer scaled.
            loss_scale=1.0 if dtype is torch.float16 else None,
            params_dtype=dtype,
        )
        make = get_megatron_muon_optimizer if config.name == "muon" else get_megatron_optimizer
        self._optimizer: Any = make(options, self._chunks, use_gloo_process_groups=False)
        for group in self._groups():
            # megatron-core leaves wd_mult (0 for biases and norms) to its own scheduler, which is not used here.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]

    def grad_norm(self) -> float:
        """The global norm of the reduced gradients. Collective."""
        self._optimizer.prepare_grads()
        parts = self._optimizer.chained_optimizers
        return sum(sum_of_squares(part.get_main_grads_for_grad_norm(), part.get_grad_stats_parallel_group()) for part in parts) ** 0.5

    def adjust(self, config: OptimizerConfig) -> None:
        """Other betas, eps and weight decay, with the states as they are."""
        for group in self._groups():
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
            if config.name != "sgd" and "betas" in group:
                group["betas"], group["eps"] = config.betas, config.eps

    def step(self, learning_rate: float) -> None:
        """Updates the parameters with the reduced gradients as they are; sharded states make it collective."""
        for group in self._groups():
            group["lr"] = learning_rate * group["lr_mult"]
        self._optimizer.prepare_grads()
        self._optimizer.step_with_ready_grads()
        # In float32 parameter.grad is main_grad itself, which the next backward must find detached.
        self._optimizer.zero_grad()

    def states(self, parameter: Any) -> Iterator[tuple[str, torch.Tensor, int]]:
        """The float32 tensors that the optimizer keeps for a parameter on this rank: name, flattened stretch, and where the stretch begins in it.

        Names: 'exp_avg' and 'exp_avg_sq' of Adam, 'momentum_buffer' of SGD, and 'fp32_param', the main copy of a parameter in another format. None
        before the first step (or :meth:`make_states`), and none for a parameter that other data ranks have.
        """
        for part in self._optimizer.chained_optimizers:
            if isinstance(part, DistributedOptimizer):
                if parameter not in part.model_param_group_index_map:
                    continue
                group, order = part.model_param_group_index_map[parameter]
                main = part.optimizer.param_groups[group]["params"][order]
                start = part._get_model_param_range_map(parameter)["param"].start  # pyright: ignore[reportPrivateUsage]
            else:
                main, start = getattr(parameter, "main_param", parameter), 0
            if main not in part.optimizer.state:
                continue
            if self._has_main_copies:
                yield "fp32_param", main.detach().view(-1), start
            for name, value in part.optimizer.state[main].items():
                if torch.is_tensor(value) and value.numel() == main.numel() and name != "step":
                    yield name, value.view(-1), start

    def make_states(self, num_steps: int) -> None:
        """States as after that many steps, with all moments zero: to be filled."""
        rates = [group["lr"] for group in self._groups()]
        for part in self._optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                # A step of learning rate 0 with zero gradients changes no parameter, and makes the states, whatever they are.
                group["lr"] = 0.0
                for main in group["params"]:
                    if main.numel():
                        main.grad = torch.zeros_like(main)
            part.optimizer.step()
            part.optimizer.zero_grad()
            for group in part.optimizer.param_groups:
                if "step" in group:
                    group["step"] = num_steps
                for main in group["params"]:
                    state = part.optimizer.state.get(main, {})
                    if "step" in state:
                        state["step"] = torch.full_like(state["step"], num_steps) if torch.is_tensor(state["step"]) else num_steps
        for group, rate in zip(self._groups(), rates, strict=True):
            group["lr"] = rate

    def reload_parameters(self) -> None:
        """Copies parameters that changed outside, by loading, into the float32 main copies."""
        self._optimizer.reload_model_params()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self._optimizer.chained_optimizers for group in part.param_groups]
