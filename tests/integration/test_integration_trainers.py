"""TransformersModel and MegatronModel agree from one checkpoint, each in a layout of its own, on padded and on padding-free rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(400)

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj"]}
EXPERTS: dict[str, Any] = LORA | {"target_modules": ["q_proj", "gate_proj", "down_proj"]}
# What makes the checkpoint, and the mesh of each trainer.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("tiny_llama", {"fsdp_size": 2}, {"tp_size": 2}),
    "qwen3": ("tiny_qwen3", {"ulysses_size": 2}, {"pp_size": 2}),
    "qwen3_moe": ("tiny_qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, {"world_size": 2, "ep_size": 2}),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from twinkle_train.testing import RankPool

    pool = RankPool(2, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.stop()


def measured_on_rank(path: Path, kind: str, sizes: dict[str, Any], padding_free: bool, rate: float, lora: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities, loss, gradients, their norm, and weights after two steps of SGD; and an adapter's, from its first values on."""
    from twinkle_data import InputProcessor
    from twinkle_mesh import DeviceMesh
    from twinkle_train.testing import random_features

    if kind == "megatron":
        from twinkle_megatron._trainer import MegatronTrainer as Trainer
    else:
        from twinkle_transformers._trainer import TransformersTrainer as Trainer
    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    trainer = Trainer(path, mesh)
    try:
        trainer.set_processor(InputProcessor(pad_token_id=0, padding_free=padding_free))
        rows = random_features(vocab_size=50, temperature=0.8)
        share = rows[mesh.get_slice(len(rows), int(os.environ["RANK"]))]
        result: dict[str, Any] = {"representatives": mesh.representatives()}
        trainer.add_adapter_to_model("a", lora)
        for name in ("", "a"):
            at: dict[str, Any] = {"adapter_name": name}
            result[f"first {name}"] = trainer.export_weights(**at)
            trainer.set_loss("cross_entropy", **at)
            trainer.set_optimizer("sgd", lr=rate, **at)
            for step in ("1", "2"):
                result[f"logprobs {name}{step}"] = trainer.forward_only(share, 2, adapter_name=name).logprobs
                result[f"loss {name}{step}"] = trainer.forward_backward(share, 2, adapter_name=name).loss
                result[f"gradients {name}{step}"] = trainer.export_gradients(**at)
                result[f"norm {name}{step}"] = trainer.clip_grad_norm(1.0, **at)
                trainer.step(**at)
                trainer.zero_grad(**at)
            result[f"last {name}"] = trainer.export_weights(**at)
        return result
    finally:
        trainer.close()


def _differences(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key in mine[0]:
        if key.startswith("logprobs"):
            rows = [[row for rank in each[0]["representatives"] for row in each[rank][key] or ()] for each in (mine, theirs)]
            found[key] = max(float(np.abs(one - other).max()) for one, other in zip(*rows, strict=True))
        elif key.startswith(("loss", "norm")):
            found[key] = max(abs(one[key] / theirs[0][key] - 1) for one in [*mine, *theirs])
        elif key != "representatives":
            one, other = mine[0][key], theirs[0][key]
            # A head that is tied to the embedding is exported under one name, or both.
            assert one.keys() - {"lm_head.weight"} == other.keys() - {"lm_head.weight"}, sorted(one.keys() ^ other.keys())[:4]
            found[key] = max(float(np.abs(one[name] - other[name]).max()) for name in one.keys() & other.keys())
    return found


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3", "qwen3_moe"))])
def test_both_trainers_agree_on_the_model_and_on_an_adapter(family: str, two_ranks: Any, tmp_path: Path) -> None:
    from twinkle_train import testing

    maker, sizes, megatron_sizes = FAMILIES[family]
    path, lora = getattr(testing, maker)(tmp_path / family), EXPERTS if family == "qwen3_moe" else LORA
    mine = two_ranks.run(measured_on_rank, path, "transformers", sizes, True, 0.2, lora, timeout_s=120)
    theirs = two_ranks.run(measured_on_rank, path, "megatron", megatron_sizes, False, 0.2, lora, timeout_s=120)
    found = _differences(mine, theirs)
    print(family, found)
    assert found["first "] == found["first a"] == 0, "they begin alike, adapters too"
    for key, value in found.items():
        # fp32: a few roundings, of numbers as in test_transformers_parity and test_megatron_parity.
        assert value <= (1e-5 if key.startswith(("logprobs", "norm")) else 2e-6), (key, found)
    # The negative control: a tenth more of the learning rate is noticed in the second step.
    other = two_ranks.run(measured_on_rank, path, "transformers", sizes, True, 0.22, lora, timeout_s=120)
    off = _differences(other, theirs)
    assert off["last "] > 2e-5
    assert off["last a"] > 2e-5
