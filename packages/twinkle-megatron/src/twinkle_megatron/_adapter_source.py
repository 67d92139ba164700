"""An adapter as a source of weights for samplers."""

from collections.abc import Iterator
from typing import Any

import torch

from ._trainer import MegatronTrainer


class AdapterSource:
    """One adapter of a trainer as a `twinkle_sync.WeightSource`: its matrices, whole, under peft's names.

    Args:
        trainer: the trainer itself, on each of its ranks (not the handle of a remote one).
        adapter_name: an adapter that was added to it.

    Raises:
        UnknownAdapterError: there is none of that name.
    """

    def __init__(self, trainer: MegatronTrainer, adapter_name: str) -> None:
        self._trainer = trainer
        self._adapter_name = adapter_name
        self.config: dict[str, Any] = trainer.adapter_config(adapter_name)

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every matrix as it is now. Collective: every rank iterates to the end."""
        return self._trainer.iter_adapter(self._adapter_name)
