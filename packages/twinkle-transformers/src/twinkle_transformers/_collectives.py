"""Collectives with gradients, of ranks that run the same model on other parts of its input: gradients are of the sum over ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, receive: list[int], send: list[int], group: Any) -> torch.Tensor:
        ctx.arguments = receive, send, group
        return _exchange(tensor, receive, send, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        receive, send, group = ctx.arguments
        return _exchange(grads[0], send, receive, group), None, None, None


def _exchange(tensor: torch.Tensor, receive: list[int], send: list[int], group: Any) -> torch.Tensor:
    out = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    dist.all_to_all_single(out, tensor.contiguous(), receive, send, group=group)
    return out


def all_to_all(tensor: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: Any) -> torch.Tensor:
    """Sends rows of a tensor to the ranks of a group, the first `send[0]` to the first and so on; what comes is stacked in order of rank.

    receive: how many rows come from each rank. Backward sends the gradients back.
    """
    return _AllToAll.apply(tensor, list(receive), list(send), group)  # pyright: ignore[reportReturnType]


class _GatherSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        ctx.arguments = dim, group
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        dim, group = ctx.arguments
        return grads[0].chunk(group.size(), dim)[group.rank()], None, None


def gather_for_same_loss(tensor: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """All ranks' tensors along an axis, in order of rank. Every rank must make the same of it: each keeps its own part of the gradient."""
    return _GatherSame.apply(tensor, dim, group)  # pyright: ignore[reportReturnType]
