"""torch's optimizers over this rank's shards, and their states as pieces of a training checkpoint."""

from collections.abc import Iterator

import torch

from twinkle_train import OptimizerConfig, Piece, adjust_torch_optimizer, build_torch_optimizer

from ._weights import Weights


class Optimizer:
    """One of torch's optimizers over a model's weights on this rank.

    Raises:
        ConfigError: an optimizer that torch does not have, or nothing to train.
    """

    def __init__(self, weights: Weights, config: OptimizerConfig) -> None:
        self._weights = weights
        self._config = config
        self._optimizer = build_torch_optimizer(config, [weight.local for weight in weights.trained])

    def adjust(self, config: OptimizerConfig) -> None:
        """Other settings, with the states as they are."""
        self._config = config
        adjust_torch_optimizer(self._optimizer, config)

    def step(self, learning_rate: float) -> None:
        """One step with the gradients as they are."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._weights.before_step()
        self._optimizer.step()

    def make_states(self, steps: int) -> None:
        """Makes the states that there are after so many steps, for `pieces` to name and a checkpoint to fill."""
        for weight in self._weights.trained if steps else ():
            state = self._optimizer.state[weight.local]
            for name in self._state_names():
                state[name] = torch.zeros_like(weight.local)
            if self._config.name != "sgd":
                state["step"] = torch.tensor(float(steps))

    def pieces(self) -> Iterator[Piece]:
        """The states that are as large as their weights."""
        for weight in self._weights.trained:
            state = self._optimizer.state.get(weight.local, {})
            for name in self._state_names():
                if state.get(name) is not None:
                    yield from self._weights.pieces_of(weight, f"optimizer.{name}.{weight.name}", state[name])

    def _state_names(self) -> tuple[str, ...]:
        if self._config.name == "sgd":
            return ("momentum_buffer",) if self._config.momentum else ()
        return ("exp_avg", "exp_avg_sq")
