"""A model's weights on one rank: shards, their gradients, and the way to and from whole tensors."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from twinkle_train import Piece

from ._groups import Groups

_BUCKET_BYTES = 64 << 20
_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class Weight:
    """One parameter of the model on this rank.

    name: in the model. parameter: the model's own, a DTensor where it is sharded. local: this rank's shard as a plain parameter, for optimizers.
    is_expert: axis 0 is this rank's share of the experts.
    """

    name: str
    parameter: nn.Parameter
    local: nn.Parameter
    is_expert: bool


class Weights:
    """All of a model's weights on this rank.

    Args:
        model: sharded, on its device.
        groups: of the mesh.
        experts: modules of the model whose parameters are this rank's share of the experts.
    """

    def __init__(self, model: Any, groups: Groups, experts: Iterable[nn.Module] = ()) -> None:
        self._model = model
        self._groups = groups
        expert_ids = {id(parameter) for module in experts for parameter in module.parameters()}
        self._all = [
            Weight(name, parameter, nn.Parameter(_local(parameter), requires_grad=parameter.requires_grad), id(parameter) in expert_ids)
            for name, parameter in model.named_parameters()
        ]

    @property
    def trained(self) -> list[Weight]:
        """Those that have gradients."""
        return [weight for weight in self._all if weight.parameter.requires_grad]

    # Gradients: sums of this rank's rows until they are reduced.

    def reduce_gradients(self) -> None:
        """Sums gradients over the ranks that hold the same shards; what fully_shard reduces is summed already. A weight without one gets zeros."""
        for is_expert, group in ((False, self._groups.replicas), (True, self._groups.expert_replicas)):
            gradients: list[torch.Tensor] = []
            for weight in self.trained:
                if weight.is_expert == is_expert:
                    if weight.parameter.grad is None:  # on every rank the same list of tensors is summed
                        weight.parameter.grad = torch.zeros_like(weight.parameter)
                    gradients.append(_local(weight.parameter.grad))
            if group is not None:
                _all_reduce(gradients, group)

    def scale_gradients(self, factor: float) -> None:
        """Multiplies all gradients."""
        gradients = [_local(weight.parameter.grad) for weight in self.trained if weight.parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def gradient_norm(self) -> float:
        """The 2-norm of the whole gradient, each weight counted once, whatever meshes weights are sharded over. Collective.

        torch.nn.utils.clip_grad_norm_ refuses gradients of several meshes (torch 2.13).
        """
        total = 0.0
        for is_expert, group in ((False, self._groups.shard), (True, self._groups.expert_whole)):
            gradients = [weight.parameter.grad for weight in self.trained if weight.is_expert == is_expert and weight.parameter.grad is not None]
            square = torch.zeros((), dtype=torch.float64, device=self._groups.device)
            for gradient in gradients:
                square += _local(gradient).double().square().sum()
            if group is not None:
                dist.all_reduce(square, group=group)
            total += square.item()
        return total**0.5

    def zero_gradients(self) -> None:
        """Drops all gradients."""
        self._settle()
        for weight in self._all:
            weight.parameter.grad = weight.local.grad = None

    def before_step(self) -> None:
        """Gives the plain parameters their gradients."""
        self._settle()
        for weight in self.trained:
            weight.local.data = _local(weight.parameter)
            weight.local.grad = None if weight.parameter.grad is None else _local(weight.parameter.grad)

    # Training checkpoints.

    def pieces(self) -> Iterator[Piece]:
        """Rectangles of whole weights and buffers that this rank has; views, not copies."""
        for weight in self._all:
            yield from self.pieces_of(weight, f"model.{weight.name}", _local(weight.parameter))
        for name, tensor in self._buffers():
            yield Piece(key=f"model.{name}", shape=tuple(tensor.shape), offset=(0,) * tensor.dim(), tensor=tensor, is_copy=self._groups.rank > 0)

    def pieces_of(self, weight: Weight, key: str, local: torch.Tensor) -> Iterator[Piece]:
        """The piece, if any, of a tensor that is divided as a weight is."""
        replicas = self._groups.expert_replicas if weight.is_expert else self._groups.replicas
        shape, first = list(weight.parameter.shape), 0
        if isinstance(weight.parameter, DTensor):
            mesh = weight.parameter.device_mesh
            first = min(-(-shape[0] // mesh.size()) * mesh.get_local_rank(), shape[0])
        if weight.is_expert and self._groups.experts is not None:
            first += self._groups.experts.rank() * shape[0]
            shape[0] *= self._groups.experts.size()
        if local.numel():
            offset = (first, *[0] * (len(shape) - 1))
            yield Piece(key=key, shape=tuple(shape), offset=offset, tensor=local, is_copy=replicas is not None and replicas.rank() > 0)

    # Whole tensors. All methods are collective.

    def whole_weights(self, *, dtype: torch.dtype | None = None, buffers: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight, whole, under the name and in the form that it has in a checkpoint; a layer at a time is held in memory.

        dtype: of the parameters; None: as they are trained. buffers: those that checkpoints have, too (the routing bias of DeepSeek-V3).
        """
        tensors: Iterator[tuple[str, torch.Tensor]] = (
            (weight.name, self._whole(weight, weight.parameter.detach()).to(dtype or weight.parameter.dtype)) for weight in self._all
        )
        if buffers:
            tensors = itertools.chain(tensors, self._buffers())
        return in_checkpoint_form(self._model, tensors)

    def whole_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every gradient, whole, as `whole_weights` gives the weights; zeros where there is none."""
        return in_checkpoint_form(self._model, ((weight.name, self._whole_gradient(weight)) for weight in self._all))

    def copy_from(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes this rank's part of whole tensors, by their names in the model, parameters and buffers."""
        self._settle()
        with torch.no_grad():
            for weight in self._all:
                whole = tensors[weight.name]
                if weight.is_expert and self._groups.experts is not None:
                    whole = whole.chunk(self._groups.experts.size())[self._groups.experts.rank()]
                _local(weight.parameter).copy_(_shard_like(whole.to(self._groups.device), weight.parameter))
            for name, buffer in self._model.named_buffers():
                if name in tensors:
                    buffer.copy_(tensors[name])

    def _settle(self) -> None:
        """Frees gathered copies of sharded weights: fully_shard (torch 2.13) keeps the root's after a forward without backward, and the next forward
        would run on it, whatever a step has made of the shards."""
        if isinstance(self._model, FSDPModule):
            self._model.reshard()

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that checkpoints have."""
        for prefix, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}".lstrip("."), buffer

    def _whole_gradient(self, weight: Weight) -> torch.Tensor:
        gradient = weight.parameter.grad
        return self._whole(weight, torch.zeros_like(weight.parameter) if gradient is None else gradient)

    def _whole(self, weight: Weight, tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not weight.is_expert or self._groups.experts is None:
            return whole
        parts = [torch.empty_like(whole) for _ in range(self._groups.experts.size())]
        dist.all_gather(parts, whole.contiguous(), group=self._groups.experts)
        return torch.cat(parts)


def in_checkpoint_form(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a model under the names and in the form that they have in its checkpoints (experts one by one, for example), a layer at a time."""
    from transformers.core_model_loading import revert_weight_conversion

    for _, part in itertools.groupby(tensors, key=lambda item: _layer_of(item[0])):
        converted: Mapping[str, torch.Tensor] = revert_weight_conversion(model, dict(part))
        yield from converted.items()


def _layer_of(name: str) -> str:
    match = _LAYER.match(name)
    return match.group(1) if match else name


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def _all_reduce(tensors: list[torch.Tensor], group: Any) -> None:
    """Sums each tensor over the ranks, many in one message."""
    for bucket in _buckets(tensors, lambda tensor: tensor.nbytes):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat, group=group)
        for tensor, summed in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def _buckets(tensors: list[torch.Tensor], size: Callable[[torch.Tensor], int]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    total = 0
    for tensor in tensors:
        if bucket and total + size(tensor) > _BUCKET_BYTES:
            yield bucket
            bucket, total = [], 0
        bucket.append(tensor)
        total += size(tensor)
    if bucket:
        yield bucket
