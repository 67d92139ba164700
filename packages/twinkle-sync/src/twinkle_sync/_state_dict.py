"""Tensors at hand as a source of weights: a state dict, or a module of any layout."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from twinkle_remote import remote_class

from ._sender import WeightSender
from ._spec import TensorSpec


def whole_tensors(source: torch.nn.Module | Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a module's state dict or of a mapping, in its order, for an `iter_weights` of one's own.

    Parts of a DTensor (FSDP2, tensor parallel) are gathered, one tensor at a time, which is collective. What a module holds under several names (a
    tied head) comes once, under the first.
    """
    for name, tensor in _named(source):
        part: Any = tensor.detach()
        yield name, part.full_tensor() if hasattr(part, "full_tensor") else part


@remote_class()
class StateDict(WeightSender):
    """A state dict, or the present weights of a module, ready to be sent: `CheckpointEngineManager(model=StateDict(module), sampler=sampler)`.

    Names must be those that the sampler knows (Hugging Face's, for vLLM).
    """

    def __init__(self, source: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        self._tensors = source

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """Names, dtypes and whole shapes, without gathering anything."""
        return tuple(TensorSpec.of(name, tensor) for name, tensor in _named(self._tensors))

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `whole_tensors`."""
        return whole_tensors(self._tensors)


def _named(source: torch.nn.Module | Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    if not isinstance(source, torch.nn.Module):
        return list(source.items())
    # keep_vars: the same object under each name of a shared parameter.
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in source.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), (name, tensor))
    return list(first.values())
