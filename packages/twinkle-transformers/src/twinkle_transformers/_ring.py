"""Zigzag ring attention: keys and values travel from rank to rank, partial results are put together by their log-sum-exp.

Ring attention is arXiv:2310.01889; the zigzag order (each rank has an early and a late chunk of every sequence) is that of
https://github.com/zhuzilin/ring-flash-attention. Blocks are the online softmax of FlashAttention-2 (arXiv:2307.08691).

Shape suffixes: H query heads, K key-value heads, N tokens of this rank, Q and S queries and keys of one block, D size of a head, V size of a value.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def ring_attention(
    query_HND: torch.Tensor, key_KND: torch.Tensor, value_KNV: torch.Tensor, *, segments: Sequence[int], scale: float, group: Any
) -> torch.Tensor:
    """Causal attention within each sequence over all ranks of a group, ``[H, N, V]``.

    segments: where each sequence's tokens begin among this rank's, and the end. Of each sequence divided into 2 x ranks equal chunks, this
    rank has the chunk of its own number, and behind it the chunk that is as far from the end.
    """
    return _Ring.apply(query_HND, key_KND, value_KNV, tuple(segments), scale, group)  # pyright: ignore[reportReturnType]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: tuple[int, ...], scale: float, group: Any
    ) -> torch.Tensor:
        out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=torch.float32, device=query.device)
        lse = torch.full(query.shape[:2], float("-inf"), dtype=torch.float32, device=query.device)
        for step, (keys, values) in _travelling((key, value), group):
            for queries, others, causal in _blocks(segments, step, group.rank()):
                part, part_lse = _forward(query[:, queries], keys[:, others], values[:, others], causal, scale)
                _merge(out[:, queries], lse[:, queries], part, part_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.arguments = segments, scale, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        segments, scale, group = ctx.arguments
        grad_out = grads[0].contiguous()
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        # These travel with the keys and values that they are of, and come home after the last step.
        grad_kv: tuple[torch.Tensor, ...] = (torch.zeros_like(key, dtype=torch.float32), torch.zeros_like(value, dtype=torch.float32))
        for step, (keys, values) in _travelling((key, value), group):
            for queries, others, causal in _blocks(segments, step, group.rank()):
                saved = out[:, queries], lse[:, queries]
                parts = _backward(grad_out[:, queries], query[:, queries], keys[:, others], values[:, others], *saved, causal, scale)
                grad_query[:, queries] += parts[0]
                grad_kv[0][:, others] += parts[1]
                grad_kv[1][:, others] += parts[2]
            grad_kv = _Message(grad_kv, group).wait()
        return grad_query.to(query.dtype), grad_kv[0].to(key.dtype), grad_kv[1].to(value.dtype), None, None, None


@dataclass
class _Message:
    """Tensors on their way to the next rank, and others on theirs from the one before."""

    tensors: tuple[torch.Tensor, ...]
    group: Any

    def __post_init__(self) -> None:
        if self.group.size() == 1:
            self._received, self._work = self.tensors, []
            return
        ranks = dist.get_process_group_ranks(self.group)
        following, before = (ranks[(self.group.rank() + shift) % len(ranks)] for shift in (1, -1))
        self._sent = [tensor.contiguous() for tensor in self.tensors]
        self._received = tuple(torch.empty_like(tensor) for tensor in self._sent)
        operations = [dist.P2POp(dist.isend, tensor, following, self.group) for tensor in self._sent]
        operations += [dist.P2POp(dist.irecv, tensor, before, self.group) for tensor in self._received]
        self._work = dist.batch_isend_irecv(operations)

    def wait(self) -> tuple[torch.Tensor, ...]:
        """What came."""
        for work in self._work:
            work.wait()
        return self._received


def _travelling(tensors: tuple[torch.Tensor, ...], group: Any) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Step by step this rank's tensors, then those of the rank before, and so on; the next ones travel while a step is worked on."""
    for step in range(group.size()):
        message = _Message(tensors, group) if step < group.size() - 1 else None
        yield step, tensors
        if message is not None:
            tensors = message.wait()


def _blocks(segments: Sequence[int], step: int, rank: int) -> Iterator[tuple[slice, slice, bool]]:
    """What this rank's queries see of the keys that are there at a step: slices of each sequence, and whether they are causal to one another."""
    for begin, end in itertools.pairwise(segments):
        middle = (begin + end) // 2
        if step == 0:
            yield slice(begin, end), slice(begin, end), True
        elif step <= rank:  # keys of a rank before: its early chunk is before both of ours, its late one behind
            yield slice(begin, end), slice(begin, middle), False
        else:  # of a rank behind: both its chunks are between ours
            yield slice(middle, end), slice(begin, end), False


def _merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Puts a block's result to what is there, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_()[..., None]).add_(part.float() * (part_lse - total).exp_()[..., None])
    lse.copy_(total)


def _forward(
    query_HQD: torch.Tensor, key_KSD: torch.Tensor, value_KSV: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's attention ``[H, Q, V]`` and its log-sum-exp ``[H, Q]``."""
    groups = len(query_HQD) // len(key_KSD)
    key_HSD, value_HSV = key_KSD.repeat_interleave(groups, 0), value_KSV.repeat_interleave(groups, 0)
    if _on_cpu(query_HQD, value_HSV):
        out, lse = _CPU_FORWARD(query_HQD[None], key_HSD[None], value_HSV[None], 0.0, causal, scale=scale)
        return out[0], lse[0]
    scores_HQS = _scores(query_HQD, key_HSD, causal, scale)
    lse_HQ = scores_HQS.logsumexp(-1)
    return (scores_HQS - lse_HQ[..., None]).exp_() @ value_HSV.float(), lse_HQ


def _backward(
    grad_HQV: torch.Tensor,
    query_HQD: torch.Tensor,
    key_KSD: torch.Tensor,
    value_KSV: torch.Tensor,
    out_HQV: torch.Tensor,
    lse_HQ: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block's gradients of queries, keys and values, given the results of all blocks together."""
    groups = len(query_HQD) // len(key_KSD)
    key_HSD, value_HSV = key_KSD.repeat_interleave(groups, 0), value_KSV.repeat_interleave(groups, 0)
    if _on_cpu(query_HQD, value_HSV):
        tensors = (each[None].contiguous() for each in (grad_HQV, query_HQD, key_HSD, value_HSV, out_HQV, lse_HQ))
        grads = [each[0] for each in _CPU_BACKWARD(*tensors, 0.0, causal, scale=scale)]
    else:
        grad = grad_HQV.float()
        weights_HQS = (_scores(query_HQD, key_HSD, causal, scale) - lse_HQ[..., None]).exp_()
        own_HQ = (grad * out_HQV.float()).sum(-1, keepdim=True)
        grad_scores = weights_HQS * (grad @ value_HSV.float().mT - own_HQ) * scale
        grads = [grad_scores @ key_HSD.float(), grad_scores.mT @ query_HQD.float(), weights_HQS.mT @ grad]
    return grads[0], *(each.unflatten(0, (-1, groups)).sum(1) for each in grads[1:])  # pyright: ignore[reportReturnType]


def _on_cpu(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch has a kernel that takes and gives the log-sum-exp."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _scores(query_HQD: torch.Tensor, key_HSD: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    scores_HQS = query_HQD.float() @ key_HSD.float().mT * scale
    if causal:
        later = torch.ones(scores_HQS.shape[1:], dtype=torch.bool, device=scores_HQS.device).triu(1)
        scores_HQS = scores_HQS.masked_fill(later, float("-inf"))
    return scores_HQS
