"""Packed and padded batches give one result in every layout: that of plain torch on each sequence alone. Leaking attention is noticed."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

LOSS, LOGPROBS, GRADIENTS = 1e-6, 1e-5, 2e-6

# How rows are given and collated: which rows go into one PackedFeature, options of the processor, rows of a micro-batch.
FORMS: dict[str, tuple[list[int], dict[str, Any], int | None]] = {
    "padded on the right": ([1] * 7, {}, 2),
    "padded on the left": ([1] * 7, {"padding_side": "left"}, 2),
    "padding-free": ([1] * 7, {"padding_free": True}, 4),
    "packed": ([2, 3, 1, 1], {}, 1),
    "packed rows, two a micro-batch": ([2, 3, 1, 1], {"alignment": 8}, 2),
    "packed and padding-free": ([2, 3, 1, 1], {"padding_free": True, "sequence_alignment": 4}, 2),
}


def measure_on_rank(
    path: Path, rows: Sequence[Any], sizes: dict[str, Any], forms: dict[str, Any], options: dict[str, Any], leak: bool = False
) -> dict[str, dict[str, Any]]:
    """Runs on every rank: log-probabilities of each sequence, the loss and gradients, for each form of the same rows."""
    from twinkle_data import InputProcessor, PackedFeature
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    rank = int(os.environ["RANK"])
    trainer = MegatronTrainer(path, mesh, **options)
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        stack.callback(trainer.close)
        if leak:
            import torch

            together = "twinkle_megatron.cpu._attention.packed_sequence_index"
            stack.enter_context(mock.patch(together, lambda bounds: torch.zeros(int(bounds[-1]), dtype=torch.long)))
        trainer.set_loss("cross_entropy")
        for name, (counts, processing, micro_batch_size) in forms.items():
            ends = np.cumsum(counts)
            packs = [list(rows[end - count : end]) for count, end in zip(counts, ends, strict=True)]
            given = [pack[0] if len(pack) == 1 else PackedFeature(features=pack) for pack in packs]
            share = given[mesh.get_slice(len(given), rank)]
            trainer.set_processor(InputProcessor(pad_token_id=0, **processing))
            logprobs = trainer.forward_only(share, micro_batch_size).logprobs
            loss = trainer.forward_backward(share, micro_batch_size).loss
            gradients = trainer.export_gradients()
            trainer.zero_grad()
            results[name] = {"logprobs": logprobs, "loss": loss, "gradients": gradients if rank == 0 else None}
        results["mesh"] = {"representatives": mesh.representatives()}
    return results


def differences(results: list[dict[str, dict[str, Any]]], name: str, expected: dict[str, Any]) -> dict[str, float]:
    ranks = results[0]["mesh"]["representatives"]
    have = np.concatenate([row for rank in ranks for row in results[rank][name]["logprobs"]])
    gradients = {k: v for k, v in expected["gradients"].items() if k in results[0][name]["gradients"]}
    assert len(gradients) >= len(expected["gradients"]) - 8  # the head of tied embeddings, routing biases
    return {
        "logprobs": float(np.abs(have - np.concatenate(expected["logprobs"])).max()),
        "loss": max(abs(result[name]["loss"] - expected["loss"]) for result in results),
        "gradients": max(float(np.abs(results[0][name]["gradients"][k] - v).max()) for k, v in gradients.items()),
    }


SP = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], bool]] = {
    "single": (1, "qwen3", {}, {}, True),
    "TP2+SP": (2, "qwen3", {"tp_size": 2, **SP}, {}, True),
    "CP2": (2, "qwen3", {"cp_size": 2}, {}, True),
    "PP2": (2, "qwen3", {"pp_size": 2}, {}, True),
    "DP2": (2, "qwen3", {"dp_size": 2}, {}, False),
    "CP2 qwen2": (2, "qwen2", {"cp_size": 2}, {}, False),
    "PP2+VPP2 full recompute": (2, "qwen3", {"pp_size": 2, "vpp_size": 2}, {"recompute": "full"}, False),
    "CP2+TP2+SP": (4, "qwen3", {"cp_size": 2, "tp_size": 2, **SP}, {}, False),
    "CP2+PP2": (4, "qwen3", {"cp_size": 2, "pp_size": 2}, {}, False),
    "TP2+PP2+SP+VPP2": (4, "qwen3", {"tp_size": 2, "pp_size": 2, "vpp_size": 2, **SP}, {}, False),
    "EP2 allgather": (2, "qwen3_moe", {"dp_size": 2, "ep_size": 2}, {"transformer_options": {"moe_token_dispatcher_type": "allgather"}}, False),
    "EP2+CP2 latent attention": (2, "deepseek_v3", {"cp_size": 2, "ep_size": 2}, {}, True),
    "EP2+TP2 ETP1 latent attention": (2, "deepseek_v3", {"tp_size": 2, "ep_size": 2, "etp_size": 1, **SP}, {}, False),
}


@pytest.fixture(scope="session")
def sequences(checkpoint: Any, plain: Any, features: list[Any]) -> Any:
    """A function from a family to its checkpoint and what plain torch makes of each sequence."""
    known: dict[str, Any] = {}

    def of(family: str) -> tuple[Path, dict[str, Any]]:
        if family not in known:
            path = checkpoint(family, num_hidden_layers=4, vocab_size=301, hidden_size=64, intermediate_size=96)
            known[family] = path, plain.plain(path, features)
        return known[family]

    return of


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if row[4] else (pytest.mark.full,), id=n) for n, row in LAYOUTS.items()])
def test_every_form_of_a_batch_equals_its_sequences_alone(name: str, pools: Any, sequences: Any, features: list[Any]) -> None:
    ranks, family, sizes, options, _ = LAYOUTS[name]
    path, expected = sequences(family)
    results = pools(ranks).run(measure_on_rank, path, features, sizes, FORMS, options, timeout_s=200)
    for form in FORMS:
        found = differences(results, form, expected)
        print(form, found)
        assert found["logprobs"] <= LOGPROBS, (form, found)
        assert found["loss"] <= LOSS, (form, found)
        assert found["gradients"] <= GRADIENTS, (form, found)


@pytest.mark.parametrize("name", ["single", "CP2"])
def test_attention_across_packed_sequences_is_noticed(name: str, pools: Any, sequences: Any, features: list[Any]) -> None:
    ranks, family, sizes, options, _ = LAYOUTS[name]
    path, expected = sequences(family)
    packed = {"padding-free": FORMS["padding-free"], "packed": FORMS["packed"]}
    results = pools(ranks).run(measure_on_rank, path, features, sizes, packed, options, leak=True)
    for form in packed:
        found = differences(results, form, expected)
        assert found["logprobs"] > 100 * LOGPROBS, found
        assert found["gradients"] > 100 * GRADIENTS, found


def test_packs_of_a_packing_dataset_train_as_their_sequences_do(checkpoint: Any, plain: Any, features: list[Any]) -> None:
    from twinkle_data import PackingDataset
    from twinkle_megatron import MegatronModel

    path = checkpoint("qwen3", vocab_size=301)
    packs = list(PackingDataset(features, 32))
    assert len(packs) < len(features)
    model = MegatronModel(path)
    try:
        model.set_loss("cross_entropy")
        assert abs(model.forward_backward(packs, 1).loss - plain.plain(path, features)["loss"]) <= LOSS
    finally:
        model.close()


def test_positions_that_the_rotary_embedding_would_ignore_are_refused(checkpoint: Any) -> None:
    from twinkle_data import InputFeature
    from twinkle_megatron import MegatronModel
    from twinkle_train import InputError

    model = MegatronModel(checkpoint("qwen3"))
    try:
        with pytest.raises(InputError, match="position_ids are not 0, 1, 2"):
            model.forward_only([InputFeature(input_ids=[5, 6, 7], position_ids=[3, 4, 5])])
    finally:
        model.close()
