"""Sequences as vectors, and the contrastive loss, against plain transformers on each sequence alone."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinkle_data import InputProcessor, PackedFeature
from twinkle_train import ConfigError, InputError

# The first test starts the ranks.
pytestmark = pytest.mark.timeout(300)

TEMPERATURE = 0.1
GROUPS = (4, 7, 4, 4, 7, 9, 7)  # one of three, one of three, and one alone, whose sequence is a negative only


def plain(path: Path, rows: list[Any], pooling: str) -> tuple[list[Any], float, dict[str, Any]]:
    """Vectors, loss and its gradients."""
    import torch
    from transformers import AutoModelForCausalLM

    from twinkle_transformers._weights import in_checkpoint_form

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    hidden = [model.base_model(input_ids=torch.as_tensor(row.input_ids)[None], use_cache=False).last_hidden_state[0] for row in rows]
    vectors = torch.stack([each[-1] if pooling == "last" else each.mean(0) for each in hidden])
    vectors = vectors / vectors.norm(dim=-1, keepdim=True)
    total, count = torch.zeros(()), 0
    for i, mine in enumerate(GROUPS):
        positives = [j for j, other in enumerate(GROUPS) if other == mine and j != i]
        if not positives:
            continue
        others = torch.stack([vectors[i] @ vectors[j] / TEMPERATURE for j in range(len(rows)) if j != i])
        for j in positives:
            total = total - (vectors[i] @ vectors[j] / TEMPERATURE - others.logsumexp(0)) / len(positives)
        count += 1
    (total / count).backward()
    # Experts one by one, as they are exported.
    named = in_checkpoint_form(model, ((name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None))
    gradients = {name: gradient.numpy() for name, gradient in named}
    return list(vectors.detach().numpy()), total.item() / count, gradients


def grouped(features: list[Any]) -> list[Any]:
    return [replace(row, user_data={"group": group}) for row, group in zip(features, GROUPS, strict=True)]


def measured_on_rank(path: Path, rows: list[Any], sizes: dict[str, Any], options: dict[str, Any], free: bool, pooling: Any, size: int | None) -> Any:
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers._embedding_trainer import EmbeddingTrainer

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    trainer = EmbeddingTrainer(path, mesh, **options)
    try:
        trainer.set_processor(InputProcessor(padding_free=free))
        share = rows[mesh.get_slice(len(rows), int(os.environ["RANK"]))]
        vectors = trainer.embed(share, size, pooling=pooling)
        out = trainer.contrastive_forward_backward(share, size, pooling=pooling, temperature=TEMPERATURE)
        gradients = trainer.export_gradients()
        # The negative control: rows of the other rank are no negatives, or some rows are left out.
        trainer.zero_grad()
        trainer._groups_of_mesh.data = None
        trainer.contrastive_forward_backward(
            share if "dp_size" in sizes or "fsdp_size" in sizes else share[:4], size, pooling=pooling, temperature=TEMPERATURE
        )
        return mesh.representatives(), vectors, (out.loss, out.loss_weight, out.metrics), gradients, trainer.export_gradients()
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("family", "sizes", "options", "free", "pooling", "size"),
    [
        ("qwen3", {"dp_size": 2}, {}, True, "last", 2),
        pytest.param("llama", {"fsdp_size": 2}, {"activation_checkpointing": True}, False, "mean", None, marks=pytest.mark.full),
        pytest.param("qwen3", {"fsdp_size": 2}, {}, True, "mean", 2, marks=pytest.mark.full),
        pytest.param("qwen3", {"ulysses_size": 2}, {}, True, "mean", None, marks=pytest.mark.full),
        pytest.param("llama", {"cp_size": 2}, {}, False, "last", 3, marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"dp_size": 2, "ep_size": 2}, {}, True, "last", None, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_vectors_loss_and_gradients_are_those_of_plain_transformers(
    family: str, sizes: Any, options: Any, free: bool, pooling: str, size: Any, two_ranks: Any, checkpoint: Any, features: Any
) -> None:
    path, rows = checkpoint(family), grouped(features)
    vectors, loss, gradients = plain(path, rows, pooling)
    results = two_ranks.run(measured_on_rank, path, rows, sizes, options, free, pooling, size, timeout_s=200)
    representatives, _, (have_loss, weight, metrics), have, other = results[0]
    mine = [vector for rank in representatives for vector in results[rank][1]]
    assert max(float(np.abs(one - two).max()) for one, two in zip(mine, vectors, strict=True)) < 1e-6
    assert abs(have_loss - loss) < 2e-6
    assert weight == 6
    assert 0 <= metrics["nearest_is_positive"] <= 1
    largest = max(float(np.abs(each).max()) for each in gradients.values())
    assert max(float(np.abs(have[name] - want).max()) for name, want in gradients.items()) < 1e-5 * largest
    assert max(float(np.abs(other[name] - want).max()) for name, want in gradients.items()) > 1e-2 * largest


def test_packed_rows_have_a_vector_for_each_sequence_and_what_is_wrong_is_refused(checkpoint: Any, features: Any) -> None:
    from twinkle_transformers import TransformersModel

    path, rows = checkpoint("qwen3"), grouped(features)
    model = TransformersModel(path)
    alone, packed = model.embed(rows, 3), model.embed([PackedFeature(features=rows[:4]), *rows[4:]])
    assert packed[0].shape == (4, 64)
    np.testing.assert_allclose(np.stack([*packed[0], *packed[1:]]), np.stack(alone), rtol=0, atol=1e-6)
    assert np.abs(model.embed(rows, normalize=False)[0]).max() > 1
    model.set_optimizer("adamw", lr=1e-3)
    losses: list[Any] = []
    for _ in range(4):
        losses.append(model.contrastive_forward_backward(rows, 2, temperature=TEMPERATURE).loss)
        model.clip_grad_and_step(1.0)
    assert losses[-1] < 0.7 * losses[0]
    with pytest.raises(InputError, match=r"inputs\[0\].user_data\['group'\] is None: give each sequence the whole number"):
        model.contrastive_forward_backward(features)
    model.zero_grad()
    with pytest.raises(ConfigError, match="pooling is 'last' or 'mean', not 'first'"):
        model.embed(rows, pooling="first")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="temperature must be > 0"):
        model.contrastive_forward_backward(rows, temperature=0.0)
    model.close()
