"""Parameters that are trained together, on one rank: sums and norms of their gradients over ranks, whatever meshes they are sharded over."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from twinkle_train import Piece

from ._groups import Groups

Kind = Literal["dense", "expert", "whole"]

_BUCKET_BYTES = 64 << 20
_KINDS: tuple[Kind, ...] = ("dense", "expert", "whole")


@dataclass(frozen=True)
class Weight:
    """One parameter on this rank.

    name: among those that are trained together. parameter: the module's own, a DTensor where it is sharded. local: this rank's shard as a plain
    parameter, for optimizers. kind: 'dense', of the model, sharded over fsdp; 'expert': the same, and axis 0 is this rank's share of the experts;
    'whole': every rank has all of it.
    """

    name: str
    parameter: nn.Parameter
    local: nn.Parameter
    kind: Kind

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, kind: Kind) -> "Weight":
        """With a plain parameter over the same memory."""
        return cls(name, parameter, nn.Parameter(local_part(parameter), requires_grad=parameter.is_floating_point()), kind)


class Parameters:
    """Parameters that share gradients' accumulation, norm and optimizer: the base model's, or an adapter's.

    Args:
        trained: those that have gradients.
        groups: of the mesh.
    """

    def __init__(self, trained: Iterable[Weight], groups: Groups) -> None:
        self.trained = list(trained)
        self._groups = groups

    # Gradients: sums of this rank's rows until they are reduced.

    def reduce_gradients(self) -> None:
        """Sums gradients over the ranks that hold the same shards; what fully_shard reduces is summed already. A weight without one gets zeros."""
        for kind in _KINDS:
            gradients: list[torch.Tensor] = []
            for weight in self._of(kind):
                if weight.parameter.grad is None:  # on every rank the same list of tensors is summed
                    weight.parameter.grad = torch.zeros_like(weight.parameter)
                gradients.append(local_part(weight.parameter.grad))
            group = self._same_shards(kind)
            if group is not None:
                _all_reduce(gradients, group)

    def scale_gradients(self, factor: float) -> None:
        """Multiplies all gradients."""
        gradients = [local_part(weight.parameter.grad) for weight in self.trained if weight.parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def gradient_norm(self) -> float:
        """The 2-norm of the whole gradient, each weight counted once, whatever meshes weights are sharded over. Collective.

        torch.nn.utils.clip_grad_norm_ refuses gradients of several meshes (torch 2.13).
        """
        total = 0.0
        for kind in _KINDS:
            gradients = [local_part(weight.parameter.grad) for weight in self._of(kind) if weight.parameter.grad is not None]
            square = torch.zeros((), dtype=torch.float64, device=self._groups.device)
            if gradients:
                square = torch.stack(torch._foreach_norm(gradients, dtype=torch.float64)).square().sum()
            group = self._other_shards(kind)
            if group is not None:
                dist.all_reduce(square, group=group)
            total += square.item()
        return total**0.5

    def zero_gradients(self) -> None:
        """Drops all gradients."""
        self.settle()
        for weight in self.trained:
            weight.parameter.grad = weight.local.grad = None

    def before_step(self) -> None:
        """Gives the plain parameters their gradients."""
        self.settle()
        for weight in self.trained:
            weight.local.data = local_part(weight.parameter)
            weight.local.grad = None if weight.parameter.grad is None else local_part(weight.parameter.grad)

    def settle(self) -> None:
        """Called before somebody reads or changes the parameters outside of the model's forward and backward."""

    # Training checkpoints.

    def pieces(self) -> Iterator[Piece]:
        """Rectangles of whole parameters that this rank has; views, not copies."""
        for weight in self.trained:
            yield from self.pieces_of(weight, weight.name, local_part(weight.parameter))

    def pieces_of(self, weight: Weight, key: str, local: torch.Tensor) -> Iterator[Piece]:
        """The piece, if any, of a tensor that is divided as a weight is."""
        replicas = self._same_shards(weight.kind)
        shape, first = weight.parameter.shape, 0
        if isinstance(weight.parameter, DTensor):
            mesh = weight.parameter.device_mesh
            first = min(-(-shape[0] // mesh.size()) * mesh.get_local_rank(), shape[0])
        if weight.kind == "expert" and self._groups.experts is not None:
            first += self._groups.experts.rank() * shape[0]
        if local.numel():
            offset = (first, *[0] * (len(shape) - 1))
            yield Piece(key=key, shape=self.whole_shape(weight), offset=offset, tensor=local, is_copy=replicas is not None and replicas.rank() > 0)

    def whole_shape(self, weight: Weight) -> tuple[int, ...]:
        """The shape of a weight of all ranks."""
        shape = tuple(weight.parameter.shape)
        if weight.kind == "expert" and self._groups.experts is not None:
            return (shape[0] * self._groups.experts.size(), *shape[1:])
        return shape

    def _of(self, kind: Kind) -> list[Weight]:
        return [weight for weight in self.trained if weight.kind == kind]

    def _same_shards(self, kind: Kind) -> Any:
        return {"dense": self._groups.replicas, "expert": self._groups.expert_replicas, "whole": self._groups.everyone}[kind]

    def _other_shards(self, kind: Kind) -> Any:
        return {"dense": self._groups.shard, "expert": self._groups.expert_whole, "whole": None}[kind]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
