"""torch's optimizers over this rank's shards, and their states as pieces of a training checkpoint."""

from collections.abc import Iterator

import torch

from twinkle_train import OptimizerConfig, Piece, adjust_torch_optimizer, build_torch_optimizer

from ._parameters import Parameters


class Optimizer:
    """One of torch's optimizers over parameters on this rank.

    Raises:
        ConfigError: an optimizer that torch does not have, or nothing to train.
    """

    def __init__(self, weights: Parameters, config: OptimizerConfig) -> None:
        self._weights = weights
        self._optimizer = build_torch_optimizer(config, [weight.local for weight in weights.trained])

    def adjust(self, config: OptimizerConfig) -> None:
        """Other settings, with the states as they are."""
        adjust_torch_optimizer(self._optimizer, config)

    def step(self, learning_rate: float) -> None:
        """One step with the gradients as they are."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._weights.before_step()
        self._optimizer.step()

    def make_states(self, steps: int) -> None:
        """Makes the states that there are after so many steps, for `pieces` to name and a checkpoint to fill."""
        if not steps:
            return
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        for weight in self._weights.trained:
            weight.local.grad = torch.zeros_like(weight.local)
        # A step of rate 0 changes nothing, and makes the states, whatever they are.
        self._optimizer.step()
        for weight in self._weights.trained:
            weight.local.grad = None
            if "step" in (state := self._optimizer.state[weight.local]):
                state["step"] = torch.full_like(state["step"], steps)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def pieces(self) -> Iterator[Piece]:
        """The states that are as large as their weights."""
        for weight in self._weights.trained:
            state = self._optimizer.state.get(weight.local, {})
            for name, value in state.items():
                if name != "step" and torch.is_tensor(value):
                    yield from self._weights.pieces_of(weight, f"optimizer.{name}.{weight.name}", value)
