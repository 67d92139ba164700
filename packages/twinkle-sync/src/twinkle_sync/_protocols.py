"""The two ends of a transfer, as protocols."""

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class WeightSource(Protocol):
    """Anything that can say its weights: a trainer, a folder, a state dict."""

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, whole tensor), each name once.

        Collective in a trainer: every rank iterates to the end, and what rank 0 yields is sent. A tensor must stay unchanged
        until the next one is asked for.
        """
        ...


@runtime_checkable
class WeightSink(Protocol):
    """Anything that can take a complete set of weights: a sampler."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights by `tensors` (CPU tensors under Hugging Face names) and answer no request in between.

        It must consume the iterable to its end: the digest is checked there, and the iterable raises when it is wrong.
        """
        ...
