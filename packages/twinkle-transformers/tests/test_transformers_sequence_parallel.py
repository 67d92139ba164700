"""Sequence parallelism by itself: on a bare model, what is refused, where columns go, and the ring's kernels."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


def on_a_bare_model(path: Path, rows: list[Any]) -> dict[str, Any]:
    """Runs on two ranks: a model of transformers, nothing of the trainer."""
    from transformers import AutoModelForCausalLM

    from twinkle_data import InputProcessor
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers import SequenceParallelConfig, SequenceParallelStrategy

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = InputProcessor(padding_free=True)(rows)
    ids, positions = torch.as_tensor(batch.input_ids), torch.as_tensor(batch.position_ids)

    def plain() -> Any:
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits.detach().numpy()

    before = plain()
    strategy = SequenceParallelStrategy(DeviceMesh.from_sizes(ulysses_size=2, device_type="cpu"), SequenceParallelConfig())
    core = strategy.install(model)
    divided = strategy.forward(batch).detach().numpy()
    length = core.split(batch)[0].input_ids_BT.shape[1]
    strategy.remove()
    return {"before": before, "divided": divided, "after": plain(), "length": length, "columns": batch.input_ids.shape[1]}


@pytest.mark.timeout(300)
def test_a_bare_model_is_divided_and_put_back(two_ranks: Any, checkpoint: Any, features: list[Any]) -> None:
    for result in two_ranks.run(on_a_bare_model, checkpoint("qwen3"), features):
        assert result["length"] == -(-result["columns"] // 2)
        assert np.abs(result["divided"] - result["before"]).max() < 1e-5
        assert np.array_equal(result["after"], result["before"])


def refusals(cases: list[tuple[Path, dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Runs on two ranks: what each model is refused with."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from twinkle_mesh import DeviceMesh
    from twinkle_transformers import SequenceParallelConfig
    from twinkle_transformers._trainer import TransformersTrainer

    AttentionInterface.register("somebodys", sdpa_attention_forward)
    messages: list[str] = []
    for path, sizes, options in cases:
        given = dict(options)
        if "sequence_parallel" in given:
            given["sequence_parallel"] = SequenceParallelConfig(**given["sequence_parallel"])
        try:
            TransformersTrainer(path, DeviceMesh.from_sizes(device_type="cpu", **sizes), **given)
            messages.append("not refused")
        except ValueError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


@pytest.mark.timeout(300)
def test_what_cannot_be_divided_is_refused_with_the_reason(two_ranks: Any, checkpoint: Any) -> None:
    ulysses, ring = {"ulysses_size": 2}, {"cp_size": 2}
    cases: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("qwen3", ulysses, {"attn_implementation": "somebodys"}, "UnsupportedModelError: .* 'somebodys' of Qwen3ForCausalLM is not known"),
        ("falcon", ulysses, {}, "UnsupportedModelError: .* FalconForCausalLM has attention of its own"),
        ("olmo_hybrid", ulysses, {}, "UnsupportedModelError: sequences cannot be divided over ranks: .* OlmoHybridForCausalLM"),
        ("qwen3_next odd", ulysses, {}, "LayoutError: the 3 value heads of Qwen3NextGatedDeltaNet cannot be divided over 2 ranks"),
        (
            "mistral",
            ring,
            {},
            "UnsupportedModelError: MistralForCausalLM has windows or chunks, which ring attention does not have: set ulysses_size",
        ),
        ("gpt_oss", ring, {}, "UnsupportedModelError: GptOssForCausalLM has sinks, windows or chunks"),
        ("gemma2", ring, {}, "UnsupportedModelError: Gemma2ForCausalLM has capped scores, windows or chunks"),
        ("qwen3", ulysses, {"sequence_parallel": {"ulysses_size": 3}}, "LayoutError: ulysses_size=3 must divide the 2 ranks .* 4 attention heads"),
        ("qwen3", ulysses, {"sequence_parallel": {"enabled": False}}, "ConfigError: sequence parallelism is not enabled, but the mesh divides"),
    ]
    odd = {"linear_num_key_heads": 3, "linear_num_value_heads": 3}
    paths = {family: checkpoint(family.split()[0], **(odd if " " in family else {})) for family, *_ in cases}
    for messages in two_ranks.run(refusals, [(paths[family], sizes, options) for family, sizes, options, _ in cases]):
        for message, (family, _, _, want) in zip(messages, cases, strict=True):
            assert re.match(want, message), (family, message)


def test_every_column_is_somewhere_and_zigzag_gives_each_ring_rank_an_early_and_a_late_chunk(features: list[Any]) -> None:
    from twinkle_data import InputProcessor, PackedFeature
    from twinkle_transformers._columns import divide

    batch = InputProcessor(alignment=8)([PackedFeature(features=features[:3]), features[4]])
    for ulysses, ring in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 4)):
        columns = divide(batch, ulysses=ulysses, ring=ring)
        for row, order in enumerate(columns.order_BP):
            assert sorted(order[order >= 0]) == list(range(batch.input_ids.shape[1]))
            assert np.array_equal(order[columns.place_BT[row]], np.arange(batch.input_ids.shape[1]))
        assert columns.order_BP.shape[1] % (ulysses * ring) == 0
        assert columns.segments[-1] == columns.order_BP.size // ring
    first = divide(batch, ulysses=1, ring=2).of_rank(0, 2)[0]
    # The first sequence has nine tokens, twelve columns with padding, chunks of three.
    assert first[:6].tolist() == [0, 1, 2, -1, -1, -1]


BLOCKS: dict[str, Callable[[Any], Any]] = {"torch's kernel": lambda ring: ring._on_cpu, "matrix products": lambda ring: lambda *tensors: False}


@pytest.mark.parametrize("kernel", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_of_one_is_causal_attention_of_each_sequence(kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from twinkle_transformers import _ring

    class Alone:
        """A group of one rank."""

        def size(self) -> int:
            return 1

        def rank(self) -> int:
            return 0

    monkeypatch.setattr(_ring, "_on_cpu", BLOCKS[kernel](_ring))
    torch.manual_seed(0)
    query, key, value = (torch.randn(heads, 14, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    out = _ring.ring_attention(query, key, value, segments=(0, 6, 14), scale=0.3, group=Alone())
    weights = torch.randn_like(out)
    have = [out, *torch.autograd.grad((out * weights).sum(), (query, key, value))]
    parts: list[torch.Tensor] = []
    for begin, end in ((0, 6), (6, 14)):
        q, k, v = (tensor[None, :, begin:end].double() for tensor in (query, key, value))
        parts.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)[0])
    plain = torch.cat(parts, 1)
    want = [plain, *torch.autograd.grad((plain * weights).sum(), (query, key, value))]
    for mine, theirs in zip(have, want, strict=True):
        assert mine.dtype == dtype
        # A few roundings of numbers up to four.
        assert (mine.double() - theirs.double()).abs().max() < (1e-5 if dtype == torch.float32 else 6e-2)


def different_rows_on_rank(path: Path, rows: list[Any]) -> list[str]:
    """Runs on every rank: what is said when ranks that share rows get different ones, of equal and of other lengths, or one of them none."""
    from twinkle_data import InputFeature
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers._trainer import TransformersTrainer

    rank = int(os.environ["RANK"])
    trainer = TransformersTrainer(path, DeviceMesh.from_sizes(device_type="cpu", ulysses_size=2))
    trainer.set_loss("cross_entropy")
    said: list[str] = []
    for mine in ([InputFeature(input_ids=rows[0].input_ids + rank)], rows[rank::2], rows[:1][rank:]):
        try:
            trainer.forward_backward(mine)
        except Exception as error:  # of whatever type: the test looks at that
            said.append(f"{type(error).__name__} {error}")
        trainer.zero_grad()
    trainer.forward_backward(rows[:2])
    trainer.close()
    return said


@pytest.mark.timeout(180)
def test_different_rows_on_ranks_that_share_rows_are_refused(two_ranks: Any, checkpoint: Any, features: list[Any]) -> None:
    for said in two_ranks.run(different_rows_on_rank, checkpoint("qwen3"), features):
        assert len(said) == 3
        assert all(text.startswith("InputError ranks that share rows (ulysses_size, cp_size) were given different ones") for text in said)
