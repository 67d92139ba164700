"""Rows in another order, with gradients that are gathered, not added up one by one as those of indexing are."""

from typing import Any

import torch


class _CopiesInOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, copies: int, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.copies = copies
        ctx.save_for_backward(inverse)
        return rows[order if copies == 1 else order // copies]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        gradient = grads[0][inverse]
        return gradient if ctx.copies == 1 else gradient.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


def copies_in_order(rows: torch.Tensor, copies: int, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Each row so many times, one after another, and then these in an order: ``rows.repeat_interleave(copies, 0)[order]``; differentiable.

    order: a permutation of ``len(rows) * copies``. inverse: its inverse.
    """
    return _CopiesInOrder.apply(rows, copies, order, inverse)  # pyright: ignore[reportReturnType]


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    """Of a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
