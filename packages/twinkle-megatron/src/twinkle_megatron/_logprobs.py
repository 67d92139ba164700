"""Log-probabilities and entropy from logits whose vocabulary is split over the tensor-parallel group.

Nothing of the vocabulary's size travels: two all-reduces of a few numbers a token, as in Megatron-LM's vocabulary-parallel cross-entropy
(arXiv:1909.08053, section 3).

Shape suffixes: B rows, T tokens, V this rank's part of the vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist


class _GatherContext(torch.autograd.Function):
    """All context-parallel ranks' values, in rank order. Every rank then computes the same loss, so each keeps its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.rank = group.rank()
        gathered = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(gathered, values.contiguous(), group=group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0][ctx.rank], None


def gather_context(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The values of every context-parallel rank, stacked in rank order along a new first axis; differentiable.

    What is made of the result must be the same on every rank, as a loss of whole sequences is.
    """
    return values[None] if group.size() == 1 else _GatherContext.apply(values, group)  # pyright: ignore[reportReturnType]


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_BTV: torch.Tensor, targets_BT: torch.Tensor, temperature_BT: torch.Tensor, vocab_size: int, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = logits_BTV.shape[-1]
        first = group.rank() * width
        scaled_BTV = logits_BTV.float() / temperature_BT[..., None]
        # Columns beyond the real vocabulary exist only to make it divisible.
        scaled_BTV[..., max(0, min(width, vocab_size - first)) :] = float("-inf")
        max_BT = scaled_BTV.amax(-1)
        if group.size() > 1:
            dist.all_reduce(max_BT, dist.ReduceOp.MAX, group=group)
        scaled_BTV -= max_BT[..., None]
        index_BT = targets_BT - first
        mine_BT = (index_BT >= 0) & (index_BT < width)
        index_BT = torch.where(mine_BT, index_BT, 0)
        target_BT = torch.where(mine_BT, scaled_BTV.gather(-1, index_BT[..., None])[..., 0], 0.0)
        exp_BTV = scaled_BTV.exp()
        # In place, for these are the largest tensors of a step. At padded columns exp(-inf) * -inf is NaN; the limit is 0. A NaN that is
        # in the logits is still seen in the other sums.
        weighted_BT = scaled_BTV.mul_(exp_BTV).nansum(-1)
        sums = torch.stack([target_BT, exp_BTV.sum(-1), weighted_BT])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        target_BT, total_BT, weighted_BT = sums.unbind()
        log_total_BT = total_BT.log()
        entropy_BT = log_total_BT - weighted_BT / total_BT
        ctx.save_for_backward(exp_BTV.div_(total_BT[..., None]), index_BT, mine_BT, temperature_BT)
        ctx.dtype = logits_BTV.dtype
        ctx.mark_non_differentiable(entropy_BT)
        return target_BT - log_total_BT, entropy_BT

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probs_BTV, index_BT, mine_BT, temperature_BT = ctx.saved_tensors
        # d logp(target) / dz_v = [v is the target] - p_v, and z = logits / temperature.
        grad_BT = grads[0] / temperature_BT
        grad_BTV = probs_BTV * -grad_BT[..., None]
        grad_BTV.scatter_add_(-1, index_BT[..., None], torch.where(mine_BT, grad_BT, 0.0)[..., None])
        return grad_BTV.to(ctx.dtype), None, None, None, None


def vocab_parallel_logprobs(
    logits_BTV: torch.Tensor, targets_BT: torch.Tensor, *, temperature_BT: torch.Tensor, vocab_size: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each target, differentiable, and the entropy (nats) of its distribution, without a graph; float32 ``[B, T]``.

    Args:
        logits_BTV: this rank's columns of the logits.
        targets_BT: token ids in the whole vocabulary.
        temperature_BT: logits are divided by it first.
        vocab_size: the real size; columns beyond it have probability zero.
        group: the tensor-parallel group. Every rank of it gets the same result.
    """
    return _VocabParallelLogprobs.apply(logits_BTV, targets_BT, temperature_BT, vocab_size, group)  # pyright: ignore[reportReturnType]
