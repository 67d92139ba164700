"""What is trained by itself: the base model, or one adapter. Imported only once the platform is chosen."""

from collections.abc import Sequence
from typing import Any

import torch

from twinkle_train import CallOrderError, ConfigError, LossScale, OptimizerConfig

from ._gradients import Gradients
from ._optimizer import Optimizer


class Trainable:
    """Parameters with their gradient buffers and their optimizer; both are made when they are first needed.

    Args:
        chunks: the modules whose parameters these are, one a model chunk of this rank.
        dtype: of the parameters.
        sharded: shard optimizer states over data ranks (reduce-scatter and all-gather instead of all-reduce).
        overlap: reduce gradients during backward, and gather sharded parameters during forward.
        loss_scale: the first one, of float16.
    """

    def __init__(self, chunks: Sequence[Any], dtype: torch.dtype, *, sharded: bool, overlap: bool, loss_scale: float) -> None:
        self._bare = list(chunks)
        self._dtype = dtype
        self._sharded = sharded
        self._overlap = overlap
        self._gradients: Gradients | None = None
        self.optimizer: Optimizer | None = None
        self.loss_scale: LossScale | None = LossScale(loss_scale) if dtype is torch.float16 else None

    @property
    def chunks(self) -> list[Any]:
        """The modules: bare until something needs gradients, since their buffers (fp32, one value a weight) are as large as the model."""
        return self._bare if self._gradients is None else self._gradients.chunks

    @property
    def gradients(self) -> Gradients:
        """The gradient buffers."""
        if self._gradients is None:
            self._gradients = Gradients(self._bare, sharded=self._sharded, overlap=self._overlap)
        return self._gradients

    def freeze(self, frozen: bool) -> None:
        """Whether the parameters want no gradients from now on. Collective."""
        if frozen and self._gradients is not None:
            self._gradients.gather_in_forward(False)
        for chunk in self._bare:
            for parameter in chunk.parameters():
                parameter.requires_grad_(not frozen)
        if not frozen and self._gradients is not None:
            self._gradients.gather_in_forward(True)

    def zero_gradients(self) -> None:
        """Drops all gradients."""
        if self._gradients is not None:
            self._gradients.zero()

    def reduce_gradients(self) -> None:
        """Sums gradients over the ranks that hold other data, and weights that several ranks share; the loss scale is divided out. Collective."""
        self.gradients.reduce()
        if self.loss_scale is not None:
            self.gradients.scale(1 / self.loss_scale.value)

    def gradient_norm(self) -> float:
        """The 2-norm of the whole gradient, each weight counted once. Collective."""
        if not self._sharded:
            return self.gradients.norm()
        if self.optimizer is None:
            raise CallOrderError("the gradient norm of sharded gradients (use_distributed_optimizer) needs the optimizer: call set_optimizer first")
        return self.optimizer.grad_norm()

    def make_optimizer(self, config: OptimizerConfig) -> None:
        """Replaces the optimizer by a fresh one.

        Raises:
            ConfigError: an optimizer that megatron-core does not have, or not with sharded states.
            ImportError: Muon without the package emerging-optimizers.
        """
        if config.name not in ("adam", "adamw", "sgd", "muon"):
            raise ConfigError(f"megatron-core has no optimizer {config.name!r}: use 'adamw', 'adam', 'sgd' or 'muon', or TransformersModel")
        if self._sharded and config.name == "muon":
            raise ConfigError("use_distributed_optimizer works with 'adam' and 'adamw' only: leave it off for 'muon'")
        if self._sharded and config.name == "sgd":
            raise ConfigError("use_distributed_optimizer works with 'adam' and 'adamw' only: leave it off for 'sgd', which has no states to shard")
        self.gradients.settle_parameters()
        self.optimizer = Optimizer(self.gradients.chunks, config, self._dtype, distributed=self._sharded)

    def adjust_optimizer(self, config: OptimizerConfig) -> None:
        """Other settings for the optimizer that is there."""
        assert self.optimizer is not None, "the trainer checks that there is an optimizer"
        self.optimizer.adjust(config)

    def make_optimizer_states(self, num_steps: int) -> None:
        """Makes the states that the optimizer has after so many steps, for a checkpoint to fill."""
        if self.optimizer is not None and num_steps:
            self.optimizer.make_states(num_steps)

    def step(self, learning_rate: float) -> None:
        """One optimizer step with the gradients as they are."""
        assert self.optimizer is not None, "the trainer checks that there is an optimizer"
        self.optimizer.step(learning_rate)
        self.gradients.parameters_changed()
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=False)

    def settle_parameters(self) -> None:
        """Waits for parameters that are still being gathered, before somebody reads or replaces them. Collective."""
        if self._gradients is not None:
            self._gradients.settle_parameters()

    def parameters_replaced(self) -> None:
        """Called when parameters were loaded: the optimizer's main copies follow."""
        if self.optimizer is not None:
            self.optimizer.reload_parameters()

    def pieces_filled(self) -> None:
        """Called when parameters and optimizer states were filled from a checkpoint."""
        if self._gradients is not None:
            self._gradients.parameters_changed()
