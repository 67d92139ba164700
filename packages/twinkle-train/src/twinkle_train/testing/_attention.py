"""Attention written out, one sequence of a packed row at a time.

Shape suffixes: B rows, T columns of each, N = B * T tokens, L tokens of one sequence, H query heads, K key-value heads, D size of a head.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

PER_SEQUENCE = "twinkle_per_sequence"
"""The name under which transformers knows `attend_per_sequence`."""


def register_per_sequence() -> None:
    """Makes `attn_implementation=PER_SEQUENCE` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(PER_SEQUENCE, attend_per_sequence)


def attend_per_sequence(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each segment of the flattened batch, as plain matrix products; [B, T, H, D].

    cu_seq_lens_q: where each segment begins, and the end (`Batch.cu_seq_lens`). No mask is looked at.
    """
    rows, num_heads, columns, head_size = query_BHTD.shape
    flat = [tensor.transpose(0, 1).flatten(1, 2) for tensor in (query_BHTD, key_BKTD, value_BKTD)]
    query_HND, key_HND, value_HND = (tensor.repeat_interleave(num_heads // len(tensor), dim=0) for tensor in flat)
    parts: list[torch.Tensor] = []
    for begin, end in itertools.pairwise(cu_seq_lens_q.tolist()):
        scores_HLL = query_HND[:, begin:end] @ key_HND[:, begin:end].transpose(1, 2) * scaling
        later_LL = torch.ones(end - begin, end - begin, dtype=torch.bool, device=scores_HLL.device).triu(1)
        parts.append(scores_HLL.masked_fill(later_LL, float("-inf")).softmax(-1) @ value_HND[:, begin:end])
    return torch.cat(parts, dim=1).view(num_heads, rows, columns, head_size).permute(1, 2, 0, 3).contiguous(), None
