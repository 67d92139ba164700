"""Core attention on a CPU: torch's scaled dot product, under context parallelism and for packed batches.

megatron-core's own ``DotProductAttention`` refuses both; on GPUs TransformerEngine does this.

Under context parallelism (cp ranks) every sequence is cut into 2*cp chunks, and rank r holds chunks r and 2*cp-1-r ("zigzag", so that causal
work is even). Here K and V are gathered over the cp group by a differentiable gather, and every rank masks by global positions.

Shape suffixes: S local tokens, B rows, N heads, D head size, K gathered tokens.
"""

import itertools
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class _GatherSequence(torch.autograd.Function):
    """All ranks' tokens, in rank order, along dim 0. Backward sums what every rank made of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = [torch.empty_like(local) for _ in range(group.size())]
        torch.distributed.all_gather(gathered, local.contiguous(), group=group)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = grads[0].contiguous().clone()
        torch.distributed.all_reduce(summed, group=ctx.group)
        return summed.chunk(ctx.group.size())[ctx.group.rank()], None


def zigzag_positions(num_local_tokens: int, cp_size: int, cp_rank: int, offset: int = 0) -> torch.Tensor:
    """Positions in the whole sequence of the tokens that a context-parallel rank holds, in local order."""
    chunk = num_local_tokens // 2
    first = torch.arange(cp_rank * chunk, (cp_rank + 1) * chunk)
    second = torch.arange((2 * cp_size - 1 - cp_rank) * chunk, (2 * cp_size - cp_rank) * chunk)
    return torch.cat([first, second]) + offset


def packed_positions(cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """As :func:`zigzag_positions`, for a packed row: every sequence in it is cut by itself."""
    bounds = cu_seqlens.tolist()
    if cp_size == 1:
        return torch.arange(bounds[-1])
    return torch.cat([zigzag_positions((end - start) // cp_size, cp_size, cp_rank, start) for start, end in itertools.pairwise(bounds)])


def packed_sequence_index(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """For every token of a packed row, the number of the sequence that it belongs to."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())


class CpuCoreAttention(MegatronModule):
    """Causal attention: one SDPA call; K and V gathered over the cp group; block-diagonal for packed (``thd``) batches."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        del layer_number, attn_mask_type, attention_type, cp_comm_type, k_channels, v_channels
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp_size = config.context_parallel_size
        self.cp_group = pg_collection.cp if self.cp_size > 1 else None

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBND: torch.Tensor,
        value_SBND: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attention of ``[S, B, N, D]`` (or ``[S, N, D]``, packed); returns ``[S, B, N*D]``."""
        del attention_mask, attn_mask_type
        if attention_bias is not None:
            raise NotImplementedError("attention_bias is not supported by the CPU platform's core attention")
        cu_seqlens = None
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            padded = packed_seq_params.cu_seqlens_q_padded
            cu_seqlens = packed_seq_params.cu_seqlens_q if padded is None else padded
            if query_SBND.dim() == 3:
                query_SBND, key_SBND, value_SBND = (x.unsqueeze(1) for x in (query_SBND, key_SBND, value_SBND))
        allowed_SK = self._allowed(query_SBND.shape[0], cu_seqlens)
        if self.cp_group is not None:
            key_SBND = _GatherSequence.apply(key_SBND, self.cp_group)
            value_SBND = _GatherSequence.apply(value_SBND, self.cp_group)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBND, key_SBND, value_SBND))
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=allowed_SK,
            is_causal=allowed_SK is None,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _allowed(self, num_local_tokens: int, cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
        """Which key each query may see, ``[S, K]``; None: plain causal order."""
        if self.cp_group is None and cu_seqlens is None:
            return None
        rank = 0 if self.cp_group is None else self.cp_group.rank()
        if cu_seqlens is None:
            positions = [zigzag_positions(num_local_tokens, self.cp_size, r) for r in range(self.cp_size)]
        else:
            positions = [packed_positions(cu_seqlens, self.cp_size, r) for r in range(self.cp_size)]
        keys, queries = torch.cat(positions), positions[rank]
        allowed = queries[:, None] >= keys[None, :]
        if cu_seqlens is not None:
            sequence = packed_sequence_index(cu_seqlens)
            allowed &= sequence[queries][:, None] == sequence[keys][None, :]
        return allowed

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """Nothing: core attention has no parameters."""
        del prefix, sharded_offsets, metadata
        return {}
