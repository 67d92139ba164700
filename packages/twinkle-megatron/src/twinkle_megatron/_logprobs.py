"""Log-probabilities and entropy from logits whose vocabulary is split over the tensor-parallel group.

Nothing of the vocabulary's size travels: two all-reduces of a few numbers a token, as in Megatron-LM's vocabulary-parallel cross-entropy
(arXiv:1909.08053, section 3).

Shape suffixes: B rows, T tokens, N all tokens of all rows, V this rank's part of the vocabulary.
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


# Rows are worked on so many entries at a time: what is made in between stays in a CPU's cache, and is little beside the logits on a GPU.
_ENTRIES_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 26}


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_BTV: torch.Tensor, targets_BT: torch.Tensor, temperature_BT: torch.Tensor, vocab_size: int, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = logits_BTV.shape[-1]
        first = group.rank() * width
        # The largest tensor of a step: it becomes the probabilities in place.
        probs_NV = logits_BTV.detach().float().reshape(-1, width)
        temperature_N1, index_N1 = temperature_BT.reshape(-1, 1), targets_BT.reshape(-1, 1) - first
        mine_N1 = (index_N1 >= 0) & (index_N1 < width)
        index_N1 = torch.where(mine_N1, index_N1, 0)
        step = max(1, _ENTRIES_AT_ONCE[logits_BTV.device.type] // width)
        chunks = [slice(start, start + step) for start in range(0, len(probs_NV), step)]
        max_N1 = torch.empty_like(temperature_N1)
        for rows in chunks:
            scaled = probs_NV[rows].div_(temperature_N1[rows])
            # Columns beyond the real vocabulary exist only to make it divisible.
            scaled[:, max(0, min(width, vocab_size - first)) :] = float("-inf")
            torch.amax(scaled, -1, keepdim=True, out=max_N1[rows])
        if group.size() > 1:
            dist.all_reduce(max_N1, dist.ReduceOp.MAX, group=group)
        sums = max_N1.new_empty(3, len(probs_NV))
        for rows in chunks:
            scaled = probs_NV[rows].sub_(max_N1[rows])
            sums[0, rows] = torch.where(mine_N1[rows], scaled.gather(-1, index_N1[rows]), 0.0)[:, 0]
            exp = scaled.exp()
            sums[1, rows] = exp.sum(-1)
            # At padded columns exp(-inf) * -inf is NaN; the limit is 0. A NaN that is in the logits is still seen in the other sums.
            sums[2, rows] = scaled.mul_(exp).nansum(-1)
            scaled.copy_(exp)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        target_N, total_N, weighted_N = sums.unbind()
        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N
        ctx.save_for_backward(probs_NV.div_(total_N[:, None]), index_N1, mine_N1, temperature_N1)
        ctx.dtype = logits_BTV.dtype
        ctx.shape = logits_BTV.shape
        entropy_BT = entropy_N.view_as(targets_BT)
        ctx.mark_non_differentiable(entropy_BT)
        return (target_N - log_total_N).view_as(targets_BT), entropy_BT

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probs_NV, index_N1, mine_N1, temperature_N1 = ctx.saved_tensors
        # d logp(target) / dz_v = [v is the target] - p_v, and z = logits / temperature. In place again: a second backward is an error of torch.
        grad_N1 = grads[0].reshape(-1, 1) / temperature_N1
        grad_NV = probs_NV.mul_(-grad_N1)
        grad_NV.scatter_add_(-1, index_N1, torch.where(mine_N1, grad_N1, 0.0))
        return grad_NV.view(ctx.shape).to(ctx.dtype), None, None, None, None


def vocab_parallel_logprobs(
    logits_BTV: torch.Tensor, targets_BT: torch.Tensor, *, temperature_BT: torch.Tensor, vocab_size: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each target, differentiable, and the entropy (nats) of its distribution, without a graph; float32 ``[B, T]``.

    Args:
        logits_BTV: this rank's columns of the logits, a temporary: float32 ones are overwritten.
        targets_BT: token ids in the whole vocabulary.
        temperature_BT: logits are divided by it first.
        vocab_size: the real size; columns beyond it have probability zero.
        group: the tensor-parallel group. Every rank of it gets the same result.
    """
    return _VocabParallelLogprobs.apply(logits_BTV, targets_BT, temperature_BT, vocab_size, group)  # pyright: ignore[reportReturnType]


def vocab_parallel_top_k(
    logits_BTV: torch.Tensor, top_k: int, *, temperature_BT: torch.Tensor, vocab_size: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each distribution, likeliest first, and their log-probabilities (float32), ``[B, T, K]``; without a graph.

    Of each rank its own likeliest are sent, and one number. Arguments as of `vocab_parallel_logprobs`; the logits are left as they are.
    """
    scaled = logits_BTV.float() / temperature_BT[..., None]
    first, width = group.rank() * scaled.shape[-1], scaled.shape[-1]
    scaled[..., max(0, min(width, vocab_size - first)) :] = float("-inf")
    values, tokens = scaled.topk(min(top_k, width))
    log_totals = _gather_last(scaled.logsumexp(-1, keepdim=True), group)
    values, tokens = _gather_last(values, group), _gather_last(tokens + first, group)
    best, places = values.topk(top_k)
    return tokens.gather(-1, places), best - log_totals.logsumexp(-1, keepdim=True)


def gather_vocabulary(logits_BTV: torch.Tensor, *, vocab_size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The logits of the whole vocabulary, float32, on every rank of the tensor-parallel group; without a graph."""
    return _gather_last(logits_BTV.float(), group)[..., :vocab_size]


def _gather_last(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The ranks' values one after another along the last axis."""
    if group.size() == 1:
        return values
    parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, -1)
