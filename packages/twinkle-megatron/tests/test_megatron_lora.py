"""Adapters in every layout against plain peft on the Hugging Face model: loss, log-probabilities, norm, gradients of A and B, both after steps."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# As in test_megatron_parity.
LOSS, LOGPROBS, GRADIENTS, NORM, WEIGHTS = 1e-6, 1e-5, 2e-6, 1e-5, 2e-6
SGD_LR, ADAM_LR, ADAM_EPS = 0.1, 1e-3, 1e-3
ADAMW = {"name": "adamw", "lr": ADAM_LR, "eps": ADAM_EPS}
LORA = {"r": 4, "lora_alpha": 6, "use_rslora": True}


def _trainer(path: Path, sizes: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    return MegatronTrainer(path, mesh, **options), mesh


def measure_on_rank(
    path: Path, adapter: Path, rows: Sequence[Any], sizes: dict[str, Any], options: dict[str, Any], control: str | None
) -> dict[str, Any]:
    """All that `peft_results` has, and the loss and gradients after this rank's part of one matrix was moved on the last rank.

    control: 'marks' leaves out the sum of gradients over ranks that see other tokens.
    """
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    sharded = options.get("use_distributed_optimizer", False)
    trainer, mesh = _trainer(path, sizes, options)
    share = list(rows)[mesh.get_slice(len(rows), rank)]
    a: dict[str, Any] = {"adapter_name": "a"}
    try:
        base = trainer.export_weights()
        for name in ("a", "ab"):
            trainer.add_adapter_to_model(name, LORA)
            trainer.set_loss("cross_entropy", adapter_name=name)
            trainer.load(adapter, adapter_name=name)
        if control == "marks":
            for parameter in (p for chunk in trainer._engine.adapter("a")._chunks for p in chunk.parameters()):
                parameter.sequence_parallel = False
        result: dict[str, Any] = {"representatives": mesh.representatives()}
        result["logprobs"] = trainer.forward_only(share, 2, **a).logprobs
        trainer.set_optimizer(**ADAMW if sharded else {"name": "sgd", "lr": SGD_LR}, **a)
        result["loss"] = trainer.forward_backward(share, 2, **a).loss
        result["gradients"] = trainer.export_gradients(**a)
        result["norm"] = trainer.clip_grad_norm(float("inf"), **a)
        trainer.step(**a)
        trainer.zero_grad(**a)
        if not sharded:
            result["sgd"] = trainer.export_weights(**a)
            trainer.load(adapter, **a)
            trainer.set_optimizer(**ADAMW, **a)
            trainer.forward_backward(share, 2, **a)
            trainer.clip_grad_and_step(float("inf"), **a)
        trainer.forward_backward(share, 2, **a)
        trainer.clip_grad_and_step(float("inf"), **a)
        result["adam"] = trainer.export_weights(**a)
        trainer.load(adapter, **a)
        if rank == dist.get_world_size() - 1:
            with torch.no_grad():
                next(iter(trainer._engine.adapter("a")._chunks[-1].parameters())).add_(0.05)
        result["moved_loss"] = trainer.forward_backward(share, 2, **a).loss
        result["moved_gradients"] = trainer.export_gradients(**a)
        # Nothing of the base was there to be trained, and neither it nor the other adapter changed.
        assert trainer._engine._base._gradients is None
        assert all(p.grad is None and not hasattr(p, "main_grad") for chunk in trainer._engine._bare for p in chunk.parameters())
        for before, after in ((base, trainer.export_weights()), (trainer.get_state_dict(adapter_name="ab"), _matrices(adapter))):
            if not rank:
                assert before.keys() == after.keys()
                assert all(np.array_equal(before[name], after[name]) for name in before)
    finally:
        trainer.close()
    if rank:
        for name in ("gradients", "sgd", "adam", "moved_gradients"):
            result.pop(name, None)
    return result


def _matrices(adapter: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(adapter / "adapter_model.safetensors")


def largest_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    assert mine.keys() == theirs.keys(), sorted(mine.keys() ^ theirs.keys())[:4]
    return max(float(np.abs(mine[name].astype(np.float64) - theirs[name]).max()) for name in theirs)


def differences(results: list[dict[str, Any]], expected: dict[str, Any]) -> dict[str, float]:
    first = results[0]
    have = [row for rank in first["representatives"] for row in results[rank]["logprobs"]]
    assert len(have) == len(expected["logprobs"])
    found = {
        "loss": max(abs(result["loss"] - expected["loss"]) for result in results),
        "logprobs": max(float(np.abs(mine - theirs).max()) for mine, theirs in zip(have, expected["logprobs"], strict=True)),
        "norm": max(abs(result["norm"] / expected["norm"] - 1) for result in results),
        "gradients": largest_difference(first["gradients"], expected["gradients"]),
        "adam": largest_difference(first["adam"], expected["adam"]),
        "moved_loss": max(abs(result["moved_loss"] - expected["loss"]) for result in results),
        "moved_gradients": largest_difference(first["moved_gradients"], expected["gradients"]),
    }
    return found if "sgd" not in first else found | {"sgd": largest_difference(first["sgd"], expected["sgd"])}


def check(found: dict[str, float]) -> None:
    assert found["loss"] <= LOSS, found
    assert found["logprobs"] <= LOGPROBS, found
    assert found["gradients"] <= GRADIENTS, found
    assert found["norm"] <= NORM, found
    assert found.get("sgd", 0.0) <= WEIGHTS, found
    assert found["adam"] <= WEIGHTS, found
    # The negative control.
    assert found["moved_gradients"] > 100 * GRADIENTS, found
    assert found["moved_loss"] > 10 * LOSS, found


def _layouts() -> dict[str, tuple[int, dict[str, Any], dict[str, Any], str]]:
    """The table of test_megatron_parity."""
    spec = importlib.util.spec_from_file_location("megatron_layouts_of_parity", Path(__file__).with_name("test_megatron_parity.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ROWS


LAYOUTS = _layouts()
QUICK = {
    "dense": ("single", "TP2", "TP2+SP", "PP2+VPP2", "CP2", "DP2 distopt"),
    "moe": ("EP2", "TP2+SP", "EP2+TP2 ETP1"),
    "deepseek_v3": ("TP2+SP",),
    "llama": (),
    "glm4_moe": (),
}
FULL = {
    "deepseek_v3": ("single", "PP2+VPP2", "EP2+CP2", "EP2+TP2 ETP2", "EP2+TP2+CP2"),
    "llama": ("TP2", "PP2"),
    "glm4_moe": ("TP2+SP", "EP2+TP2 ETP2", "EP2+DP2+PP2+VPP2 distopt"),
}


def cases() -> list[Any]:
    found: list[Any] = []
    for kind, quick in QUICK.items():
        dense = kind in ("dense", "llama")
        for name, (_, sizes, _, _) in LAYOUTS.items():
            impossible = sizes.get("ep_size", 1) > 1 if dense else sizes.get("tp_size", 1) > 1 and not sizes.get("sequence_parallel")
            if not impossible and (name in quick or name in FULL.get(kind, LAYOUTS)):
                found.append(pytest.param(name, kind, marks=() if name in quick else (pytest.mark.full,), id=f"{name} {kind}"))
    return found


@pytest.fixture(scope="session")
def expected(
    checkpoint: Callable[..., Path], features: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path, dict[str, Any]]]:
    """A function from a kind of model to its checkpoint, an adapter on it, and what plain peft makes of them."""
    from twinkle_train.testing import plain_peft

    known: dict[str, tuple[Path, Path, dict[str, Any]]] = {}
    large = {"num_hidden_layers": 8, "vocab_size": 301, "tie_word_embeddings": True}
    small = {"num_hidden_layers": 4, "vocab_size": 301, "tie_word_embeddings": False, "hidden_size": 64, "intermediate_size": 96}

    def of(kind: str) -> tuple[Path, Path, dict[str, Any]]:
        if kind not in known:
            match kind:
                case "dense":
                    path = checkpoint("qwen3", **large, hidden_size=64, intermediate_size=96, head_dim=16)
                case "moe":
                    path = checkpoint("qwen3_moe", **large)
                case _:
                    path = checkpoint(kind, **small)
            adapter = plain_peft.write_adapter(path, tmp_path_factory.mktemp("adapter"))
            known[kind] = path, adapter, plain_peft.peft_results(path, adapter, features)
        return known[kind]

    return of


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "kind"), cases())
def test_an_adapter_equals_plain_peft(
    name: str, kind: str, pools: Callable[[int], Any], expected: Any, features: list[Any], record_property: Any
) -> None:
    path, adapter, reference = expected(kind)
    ranks, sizes, options, _ = LAYOUTS[name]
    results = pools(ranks).run(measure_on_rank, path, adapter, features, sizes, options, None, timeout_s=200)
    found = differences(results, reference)
    record_property("differences", found)
    check(found)


def test_a_sum_over_ranks_that_is_left_out_is_noticed(two_ranks: Any, expected: Any, features: list[Any]) -> None:
    path, adapter, reference = expected("dense")
    _, sizes, options, _ = LAYOUTS["TP2+SP"]
    found = differences(two_ranks.run(measure_on_rank, path, adapter, features, sizes, options, "marks", timeout_s=200), reference)
    assert found["loss"] <= LOSS
    assert found["gradients"] > 100 * GRADIENTS
