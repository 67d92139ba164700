"""The CPU platform's core attention against attention written out, for packed rows and context-parallel orders of tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def attention() -> Any:
    from twinkle_megatron import cpu

    cpu.enable()
    from twinkle_megatron.cpu import _attention

    return _attention


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """[S, B, N, D] attention with a mask, by the formula."""
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    scores = torch.einsum("sbnd,kbnd->bnsk", query, key) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("bnsk,kbnd->sbnd", weights, value).flatten(2)


def qkv(tokens: int, rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(tokens, rows, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


def core(attention: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8, attention_dropout=0.0)
    return attention.CpuCoreAttention(config, 1, None, "self")


def test_plain_rows_are_causal(attention: Any) -> None:
    query, key, value = qkv(7, 3)
    out = core(attention)(query, key, value, None)
    torch.testing.assert_close(out, dense(query, key, value, torch.ones(7, 7).tril().bool()), rtol=0, atol=1e-12)


def test_packed_rows_do_not_see_one_another(attention: Any) -> None:
    query, key, value = qkv(9, 1)
    cu_seqlens = torch.tensor([0, 4, 9])
    packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_q_padded=None)
    out = core(attention)(query, key, value, None, packed_seq_params=packed)
    allowed = torch.zeros(9, 9)
    allowed[:4, :4], allowed[4:, 4:] = 1, 1
    torch.testing.assert_close(out, dense(query, key, value, allowed.tril().bool()), rtol=0, atol=1e-12)
    assert not torch.allclose(out, dense(query, key, value, torch.ones(9, 9).tril().bool()))


def test_zigzag_ranks_hold_every_position_once_and_equal_work(attention: Any) -> None:
    ranks = [attention.zigzag_positions(4, 3, rank) for rank in range(3)]
    assert sorted(torch.cat(ranks).tolist()) == list(range(12))
    assert len({int(positions.sum()) for positions in ranks}) == 1


def test_packed_zigzag_cuts_each_sequence_by_itself(attention: Any) -> None:
    ranks = [attention.packed_positions(torch.tensor([0, 4, 12]), 2, rank).tolist() for rank in range(2)]
    assert ranks == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]


def gathered_attention_on_rank() -> float:
    """Context parallel on two ranks: output and gradients against attention over the whole sequence; the largest difference."""
    import torch.distributed as dist

    from twinkle_megatron import cpu

    cpu.enable()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from twinkle_megatron.cpu import _attention

    rank = dist.get_rank()
    whole = [x.requires_grad_() for x in qkv(8, 2)]
    expected = dense(whole[0], whole[1], whole[2], torch.ones(8, 8).tril().bool())
    expected.square().sum().backward()
    mine = _attention.zigzag_positions(4, 2, rank)
    local = [x.detach()[mine].clone().requires_grad_() for x in whole]
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8, attention_dropout=0.0, context_parallel_size=2
    )
    module: Any = _attention.CpuCoreAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=dist.group.WORLD))
    out = module(*local, None)
    out.square().sum().backward()
    gradients: Any = [x.grad for x in local], [x.grad for x in whole]
    pairs = [(out, expected[mine]), *((x, y[mine]) for x, y in zip(*gradients, strict=True))]
    return max(float((x - y).abs().max()) for x, y in pairs)


def test_context_parallel_ranks_attend_over_the_whole_sequence(two_ranks: Any) -> None:
    assert max(two_ranks.run(gathered_attention_on_rank)) < 1e-12
