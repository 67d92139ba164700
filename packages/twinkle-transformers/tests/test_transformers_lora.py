"""Adapters in every layout against plain peft on the Hugging Face model: loss, log-probabilities, norm, gradients of A and B, both after steps."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# As in test_transformers_parity; after AdamW a weight of size 0.1 is rounded, and gradients by their own size.
LOSS, LOGPROBS, GRADIENTS, NORM, WEIGHTS = 1e-6, 1e-5, 2e-6, 1e-6, 2e-6
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

APART, OFF, LATENT = "no sum over ranks", "the adapter is off", ("q_a_proj", "kv_b_proj", "o_proj", "down_proj")
# name: ranks, family, target modules, sizes of the mesh, options, fault that must be noticed, whether it runs by default.
LAYOUTS: dict[str, tuple[int, str, Any, dict[str, Any], dict[str, Any], str, bool]] = {
    "one": (1, "qwen3", "all-linear", {}, {}, OFF, True),
    "one eager, recomputed": (1, "llama", "all-linear", {}, {"attn_implementation": "eager", "activation_checkpointing": True}, OFF, False),
    "dp2": (2, "qwen3", "all-linear", {"dp_size": 2}, {}, APART, True),
    "fsdp2, recomputed": (2, "qwen3", "all-linear", {"fsdp_size": 2}, {"activation_checkpointing": True}, APART, True),
    "fsdp2, the last layer only": (2, "qwen2", ["layers.1.mlp.down_proj"], {"fsdp_size": 2}, {}, APART, False),
    "ulysses2": (2, "qwen3", "all-linear", {"ulysses_size": 2}, {}, APART, True),
    "ring2": (2, "qwen3", "all-linear", {"cp_size": 2}, {}, APART, False),
    "one, experts": (1, "qwen3_moe", "all-linear", {}, {}, OFF, False),
    "ep2": (2, "qwen3_moe", "all-linear", {"dp_size": 2, "ep_size": 2}, {}, APART, True),
    "ep2 deepseek_v3": (2, "deepseek_v3", LATENT, {"dp_size": 2, "ep_size": 2}, {}, APART, False),
    "ep2 fsdp2, recomputed": (
        2,
        "qwen3_moe",
        ["q_proj", "up_proj", "down_proj"],
        {"fsdp_size": 2, "ep_size": 2},
        {"activation_checkpointing": True},
        APART,
        False,
    ),
    "ep2 ulysses2": (2, "qwen3_moe", ATTENTION, {"ulysses_size": 2, "ep_size": 2}, {}, APART, False),
    "dp2 fsdp2": (4, "qwen3", "all-linear", {"dp_size": 2, "fsdp_size": 2}, {}, APART, False),
    "fsdp2 ulysses2, recomputed": (
        4,
        "qwen3",
        "all-linear",
        {"fsdp_size": 2, "ulysses_size": 2},
        {"activation_checkpointing": True},
        APART,
        False,
    ),
    "ep2 ep_fsdp2": (4, "qwen3_moe", "all-linear", {"world_size": 4, "ep_size": 2, "ep_fsdp_size": 2}, {}, APART, False),
}


def measure_on_rank(
    path: Path, adapter: Path, rows: Sequence[Any], targets: Any, sizes: dict[str, Any], options: dict[str, Any], fault: str
) -> dict[str, Any]:
    """All that `peft_results` has, and the gradients without what the layout stands on."""
    from safetensors.numpy import load_file

    from twinkle_mesh import DeviceMesh
    from twinkle_train.testing import plain_peft
    from twinkle_transformers._trainer import TransformersTrainer

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    rank = int(os.environ["RANK"])
    share = list(rows)[mesh.get_slice(len(rows), rank)]
    adamw = {"name": "adamw", "lr": plain_peft.ADAM_LR, "eps": plain_peft.ADAM_EPS}
    a: dict[str, Any] = {"adapter_name": "a"}
    trainer = TransformersTrainer(path, mesh, **options)
    with ExitStack() as stack:
        stack.callback(trainer.close)
        base = trainer.export_weights()
        for name in ("a", "ab"):
            trainer.add_adapter_to_model(name, plain_peft.CONFIG | {"target_modules": targets})
            trainer.set_loss("cross_entropy", adapter_name=name)
            trainer.load(adapter, adapter_name=name)
        result: dict[str, Any] = {"representatives": mesh.representatives()}
        result["logprobs"] = trainer.forward_only(share, 2, **a).logprobs
        trainer.set_optimizer("sgd", lr=plain_peft.SGD_LR, **a)
        result["loss"] = trainer.forward_backward(share, 2, **a).loss
        result["gradients"] = trainer.export_gradients(**a)
        result["norm"] = trainer.clip_grad_norm(float("inf"), **a)
        trainer.step(**a)
        trainer.zero_grad(**a)
        result["sgd"] = trainer.export_weights(**a)
        trainer.load(adapter, **a)
        trainer.set_optimizer(**adamw, **a)
        for _ in range(2):
            trainer.forward_backward(share, 2, **a)
            trainer.clip_grad_and_step(float("inf"), **a)
        result["adam"] = trainer.export_weights(**a)
        # The base has no gradients, and neither it nor the other adapter has changed.
        assert all(weight.parameter.grad is None and not weight.parameter.requires_grad for weight in trainer._weights.trained)
        for before, after in (
            (base, trainer.export_weights()),
            (load_file(adapter / "adapter_model.safetensors"), trainer.export_weights(adapter_name="ab")),
        ):
            if not rank:
                assert before.keys() == after.keys()
                assert all(np.array_equal(before[name], after[name]) for name in before)
        trainer.load(adapter, **a)
        if fault == APART:
            stack.callback(setattr, trainer._groups_of_mesh, "everyone", trainer._groups_of_mesh.everyone)
            trainer._groups_of_mesh.everyone = None
        else:
            for layer in trainer._adapter("a").layers.values():
                layer.scaling = dict.fromkeys(layer.scaling, 0.0)
        trainer.forward_backward(share, 2, **a)
        result["faulty"] = trainer.export_gradients(**a)
    return result if not rank else {name: result[name] for name in ("logprobs", "loss", "norm")}


def largest(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    assert mine.keys() == theirs.keys(), sorted(mine.keys() ^ theirs.keys())[:4]
    return max(float(np.abs(mine[name].astype(np.float64) - theirs[name]).max()) for name in theirs)


@pytest.fixture(scope="session")
def adapted(
    checkpoint: Callable[..., Path], features: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Any], tuple[Path, Path, dict[str, Any]]]:
    """A function from a family and target modules to its checkpoint, an adapter on it, and what plain peft makes of them."""
    from twinkle_train.testing import plain_peft

    known: dict[tuple[str, str], tuple[Path, Path, dict[str, Any]]] = {}

    def of(family: str, targets: Any) -> tuple[Path, Path, dict[str, Any]]:
        key = (family, str(targets))
        if key not in known:
            path = checkpoint(family)
            adapter = plain_peft.write_adapter(path, tmp_path_factory.mktemp("adapter"), target_modules=targets)
            known[key] = path, adapter, plain_peft.peft_results(path, adapter, features)
        return known[key]

    return of


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if row[6] else (pytest.mark.full,), id=n) for n, row in LAYOUTS.items()])
def test_an_adapter_equals_plain_peft_and_a_fault_is_noticed(name: str, pools: Any, adapted: Any, features: list[Any]) -> None:
    ranks, family, targets, sizes, options, fault, _ = LAYOUTS[name]
    path, adapter, want = adapted(family, targets if isinstance(targets, str) else list(targets))
    results = pools(ranks).run(measure_on_rank, path, adapter, features, targets, sizes, options, fault, timeout_s=120)
    first = results[0]
    have = np.concatenate([row for rank in first["representatives"] for row in results[rank]["logprobs"]])
    found = {
        "logprobs": float(np.abs(have - np.concatenate(want["logprobs"])).max()),
        "loss": max(abs(result["loss"] - want["loss"]) for result in results),
        "norm": max(abs(result["norm"] / want["norm"] - 1) for result in results),
        **{kind: largest(first[kind], want[kind]) for kind in ("gradients", "sgd", "adam")},
        "faulty": largest(first["faulty"], want["gradients"]),
    }
    print(name, found)
    assert found["loss"] <= LOSS, found
    assert found["logprobs"] <= LOGPROBS, found
    assert found["gradients"] <= GRADIENTS, found
    assert found["norm"] <= NORM, found
    assert max(found["sgd"], found["adam"]) <= WEIGHTS, found
    assert found["faulty"] > 100 * GRADIENTS, found
