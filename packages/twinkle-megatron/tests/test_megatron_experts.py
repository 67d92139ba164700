"""The CPU platform runs megatron-core's mixture of experts: grouped as one by one, and spread over ranks as in one process."""

import zlib
from typing import Any

import pytest
import torch

NUM_EXPERTS = 4
VOCAB = 50


def run_moe(ep_size: int, rank: int, rows: list[int], *, grouped: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of these rows, and the gradients of this rank's experts by their global names, of a one-layer model with weights from its names."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from twinkle_megatron import _parallel

    _parallel._destroy_groups()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep_size, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=2,
        moe_ffn_hidden_size=16,
        moe_grouped_gemm=grouped,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=ep_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    model = GPTModel(config, spec, VOCAB, 64, position_embedding_type="rope")
    local = NUM_EXPERTS // ep_size
    names = {name: global_name(name, rank * local) for name, _ in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(names[name].encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    tokens = torch.stack([torch.randint(0, VOCAB, (6,), generator=torch.Generator().manual_seed(row)) for row in rows])
    logits = model(tokens, torch.arange(6).expand_as(tokens), None)
    logits.square().sum().backward()
    gradients = {names[name]: parameter.grad for name, parameter in model.named_parameters() if ".experts." in name and parameter.grad is not None}
    _parallel._destroy_groups()
    return logits.detach(), gradients


def global_name(name: str, first_expert: int) -> str:
    """One name an expert, whether experts are grouped (linear_fc1.weight3) or modules (local_experts.3.linear_fc1.weight)."""
    if ".experts.local_experts." in name:
        before, _, after = name.partition(".local_experts.")
        expert, _, layer = after.partition(".")
        return f"{before}.{layer}{int(expert) + first_expert}"
    if ".experts." in name:
        before, _, expert = name.rpartition(".weight")
        return f"{before}.weight{int(expert) + first_expert}"
    return name


@pytest.fixture(scope="module")
def one_process() -> None:
    from twinkle_megatron import cpu
    from twinkle_train import init_process_group

    cpu.enable()
    init_process_group("cpu", 60)


@pytest.mark.usefixtures("one_process")
def test_grouped_experts_equal_experts_one_by_one() -> None:
    grouped, gradients = run_moe(1, 0, [1, 2])
    single, expected = run_moe(1, 0, [1, 2], grouped=False)
    torch.testing.assert_close(grouped, single, rtol=0, atol=1e-5)
    assert gradients.keys() == expected.keys()
    assert len(gradients) == 2 * NUM_EXPERTS
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-4)


def run_moe_on_rank() -> tuple[Any, dict[str, Any]]:
    import torch.distributed as dist

    from twinkle_megatron import cpu

    cpu.enable()
    return run_moe(2, dist.get_rank(), [1 + dist.get_rank()])


@pytest.mark.usefixtures("one_process")
def test_experts_spread_over_ranks_equal_one_process(two_ranks: Any) -> None:
    # Each rank has its own row and half of the experts: tokens travel by uneven all-to-all.
    logits, expected = run_moe(1, 0, [1, 2])
    answers = two_ranks.run(run_moe_on_rank)
    torch.testing.assert_close(torch.cat([each for each, _ in answers]), logits, rtol=0, atol=1e-5)
    gradients = answers[0][1] | answers[1][1]
    assert gradients.keys() == expected.keys()
    assert not answers[0][1].keys() & answers[1][1].keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-4)
