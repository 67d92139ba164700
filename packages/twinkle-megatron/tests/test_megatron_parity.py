"""Every layout against plain PyTorch on the Hugging Face model: loss, log-probabilities, gradient norm, every gradient, weights after steps.

Each row has its negative control in the same job: one rank's part of one weight is moved, and the comparison must notice.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Of float32 (24 bits): losses of size 6 are averages of log-probabilities that round by some 5e-7 each; gradients are sums of some thousand
# products in another order, with partial sums of about 1; what Adam makes of them at eps 1e-3 is lr / eps = 1 times as wrong.
LOSS, LOGPROBS, GRADIENTS, NORM, WEIGHTS = 1e-6, 1e-5, 2e-6, 1e-5, 2e-6
SGD_LR, ADAM_LR, ADAM_EPS, DECAY = 0.1, 1e-3, 1e-3, 0.1

ADAMW = {"name": "adamw", "lr": ADAM_LR, "eps": ADAM_EPS, "weight_decay": DECAY}


def measure_on_rank(path: Path, rows: Sequence[Any], sizes: dict[str, Any], options: dict[str, Any], micro_batch_size: int) -> dict[str, Any]:
    """Runs on every rank: all that `plain` has, and the loss and gradients after this rank's part of one weight was moved on the last rank."""
    import torch
    import torch.distributed as dist

    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh

    rank = int(os.environ["RANK"])
    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    sharded = options.get("use_distributed_optimizer", False)
    trainer = MegatronTrainer(path, mesh, **options)
    share = list(rows)[mesh.get_slice(len(rows), rank)]
    try:
        trainer.set_loss("cross_entropy")
        result: dict[str, Any] = {"representatives": mesh.representatives(), "start": trainer.export_weights()}
        result["logprobs"] = trainer.forward_only(share, micro_batch_size).logprobs
        trainer.set_optimizer(**ADAMW if sharded else {"name": "sgd", "lr": SGD_LR})
        result["loss"] = trainer.forward_backward(share, micro_batch_size).loss
        result["gradients"] = trainer.export_gradients()
        result["norm"] = trainer.clip_grad_norm(float("inf"))
        trainer.step()
        trainer.zero_grad()
        if not sharded:
            result["sgd"] = trainer.export_weights()
            trainer.load(path)
            trainer.set_optimizer(**ADAMW)
            trainer.forward_backward(share, micro_batch_size)
            trainer.clip_grad_and_step(float("inf"))
        trainer.forward_backward(share, micro_batch_size)
        trainer.clip_grad_and_step(float("inf"))
        result["adam"] = trainer.export_weights()
        trainer.load(path)
        if rank == dist.get_world_size() - 1:
            with torch.no_grad():
                next(p for p in trainer._engine._bare[-1].parameters() if p.dim() == 2).add_(0.05)
        result["moved_loss"] = trainer.forward_backward(share, micro_batch_size).loss
        result["moved_gradients"] = trainer.export_gradients()
        result["metrics"] = trainer.calculate_metric()
    finally:
        trainer.close()
    if rank:
        for name in ("start", "gradients", "sgd", "adam", "moved_gradients"):
            result.pop(name, None)
    return result


def largest_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Of two sets of tensors by name. A head that is tied to the embedding may be in either."""
    assert set(mine) - {"lm_head.weight"} >= set(theirs) - {"lm_head.weight"}, sorted(set(theirs) ^ set(mine))[:4]
    return max(float(np.abs(mine[name].astype(np.float64) - theirs[name]).max()) for name in theirs if name in mine)


def differences(results: list[dict[str, Any]], expected: dict[str, Any]) -> dict[str, float]:
    """The largest absolute difference of each kind (of the norm: relative); the losses and the norm of all ranks."""
    first = results[0]
    have = [row for rank in first["representatives"] for row in results[rank]["logprobs"]]
    assert len(have) == len(expected["logprobs"])
    # The router's biases are weights of a checkpoint that have no gradient.
    gradients = {name: g for name, g in expected["gradients"].items() if not name.endswith("e_score_correction_bias")}
    found = {
        "loss": max(abs(result["loss"] - expected["loss"]) for result in results),
        "logprobs": max(float(np.abs(mine - theirs).max()) for mine, theirs in zip(have, expected["logprobs"], strict=True)),
        "norm": max(abs(result["norm"] / expected["norm"] - 1) for result in results),
        "gradients": largest_difference(first["gradients"], gradients),
        "adam": largest_difference(first["adam"], expected["adam"]),
        "moved_loss": max(abs(result["moved_loss"] - expected["loss"]) for result in results),
        "moved_gradients": largest_difference(first["moved_gradients"], gradients),
    }
    if "sgd" in first:
        found["sgd"] = largest_difference(first["sgd"], expected["sgd"])
    assert largest_difference(first["start"], expected["start"]) == 0, "import and export must be exact"
    return found


def check(results: list[dict[str, Any]], expected: dict[str, Any], report: Callable[[dict[str, float]], None]) -> None:
    found = differences(results, expected)
    report(found)
    assert found["loss"] <= LOSS, found
    assert found["logprobs"] <= LOGPROBS, found
    assert found["gradients"] <= GRADIENTS, found
    assert found["norm"] <= NORM, found
    assert found.get("sgd", 0.0) <= WEIGHTS, found
    assert found["adam"] <= WEIGHTS, found
    # The negative control. A weight that no token of the rank meets would prove nothing: the embedding of rare tokens is such.
    assert found["moved_gradients"] > 100 * GRADIENTS, found
    assert found["moved_loss"] > 10 * LOSS, found


# name: ranks, mesh, options of MegatronModel, runs in the quick suite for dense models, and for models with experts
SP = {"sequence_parallel": True}
ZERO = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_communication": True}
ROWS: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "single": (1, {}, {}, "dm"),
    "TP2": (2, {"tp_size": 2}, {}, "d"),
    "TP2+SP": (2, {"tp_size": 2, **SP}, {}, "dm"),
    "PP2": (2, {"pp_size": 2}, {}, "d"),
    "PP2+VPP2": (2, {"pp_size": 2, "vpp_size": 2}, {}, "dm"),
    "PP2 uneven": (2, {"pp_size": 2}, {"layers_per_stage": (5, 3)}, "d"),
    "PP2+VPP2 uneven": (2, {"pp_size": 2, "vpp_size": 2}, {"layers_per_stage": (1, 3, 2, 2)}, ""),
    "PP4+VPP2": (4, {"pp_size": 4, "vpp_size": 2}, {}, ""),
    "TP2+PP2+SP+VPP2": (4, {"tp_size": 2, "pp_size": 2, "vpp_size": 2, **SP}, {}, "d"),
    "DP2": (2, {"dp_size": 2}, {}, "d"),
    "DP2 overlap": (2, {"dp_size": 2}, OVERLAP, ""),
    "DP2 distopt": (2, {"dp_size": 2}, ZERO, ""),
    "DP2 distopt overlap": (2, {"dp_size": 2}, ZERO | OVERLAP, "d"),
    "DP2+TP2 distopt": (4, {"dp_size": 2, "tp_size": 2}, ZERO, ""),
    "DP2+PP2+VPP2 distopt overlap": (4, {"dp_size": 2, "pp_size": 2, "vpp_size": 2}, ZERO | OVERLAP, ""),
    "CP2": (2, {"cp_size": 2}, {}, "d"),
    "CP2 distopt": (2, {"cp_size": 2}, ZERO, ""),
    "CP2+TP2+SP": (4, {"cp_size": 2, "tp_size": 2, **SP}, {}, ""),
    "CP2+PP2": (4, {"cp_size": 2, "pp_size": 2}, {}, ""),
    "CP2+PP2+VPP2": (4, {"cp_size": 2, "pp_size": 2, "vpp_size": 2}, {}, ""),
    "CP4": (4, {"cp_size": 4}, {}, ""),
    "recompute full": (2, {"tp_size": 2, **SP}, {"recompute": "full"}, ""),
    "recompute selective": (2, {"pp_size": 2}, {"recompute": "selective"}, ""),
    "EP2": (2, {"dp_size": 2, "ep_size": 2}, {}, "m"),
    "EP2 allgather": (2, {"dp_size": 2, "ep_size": 2}, {"transformer_options": {"moe_token_dispatcher_type": "allgather"}}, ""),
    "EP2 distopt overlap": (2, {"dp_size": 2, "ep_size": 2}, ZERO | OVERLAP, ""),
    "EP2+TP2 ETP1": (2, {"tp_size": 2, "ep_size": 2, "etp_size": 1, **SP}, {}, "m"),
    "EP2+TP2 ETP2": (4, {"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2, **SP}, {}, ""),
    "EP2+CP2": (2, {"cp_size": 2, "ep_size": 2}, {}, "m"),
    "EP2+PP2": (4, {"dp_size": 2, "pp_size": 2, "ep_size": 2}, {}, ""),
    "EP2+DP2+PP2+VPP2 distopt": (4, {"dp_size": 2, "pp_size": 2, "vpp_size": 2, "ep_size": 2}, ZERO, "m"),
    "EP4": (4, {"dp_size": 4, "ep_size": 4}, {}, ""),
    "EP2+TP2+CP2": (4, {"tp_size": 2, "cp_size": 2, "ep_size": 2, "etp_size": 1, **SP}, {}, ""),
}


# The families, each where something of its own is at stake: dense layers before the experts', latents that all ranks hold, shared experts,
# biases of attention and routing.
FAMILY_ROWS: dict[str, tuple[str, ...]] = {
    "qwen2": ("TP2+SP", "PP2+VPP2", "CP2", "DP2 distopt"),
    "llama": ("TP2", "PP2", "CP2"),
    "mixtral": ("EP2", "TP2+SP", "EP2+PP2", "EP2+TP2 ETP2"),
    "deepseek_v3": ("EP2+TP2 ETP1", "single", "TP2+SP", "PP2+VPP2", "EP2", "EP2+CP2", "EP2+TP2+CP2", "EP2+DP2+PP2+VPP2 distopt"),
    "glm4_moe": ("EP2+TP2 ETP1", "TP2+SP", "PP2", "EP2+CP2", "TP2+PP2+SP+VPP2"),
}


def cases() -> list[Any]:
    found: list[Any] = []
    for name, (_, sizes, _, quick) in ROWS.items():
        for kind, letter in (("dense", "d"), ("moe", "m")):
            # Without sequence parallelism, tensor parallelism refuses experts; and dense models have none to spread.
            impossible = sizes.get("ep_size", 1) > 1 if kind == "dense" else sizes.get("tp_size", 1) > 1 and not sizes.get("sequence_parallel")
            if not impossible:
                marks = () if letter in quick else (pytest.mark.full,)
                found.append(pytest.param(name, kind, marks=marks, id=f"{name} {kind}"))
    for family, names in FAMILY_ROWS.items():
        moe = family not in ("qwen2", "llama")
        found += [pytest.param(n, family, marks=() if moe and n is names[0] else (pytest.mark.full,), id=f"{n} {family}") for n in names]
    return found


@pytest.fixture(scope="session")
def expected(checkpoint: Callable[..., Path], plain: Any, features: list[Any]) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """A function from a kind of model to its checkpoint and what plain torch makes of it."""
    known: dict[str, tuple[Path, dict[str, Any]]] = {}
    # An odd vocabulary: tensor parallelism has to pad it. Eight layers: one for each stage of PP4+VPP2.
    large = {"num_hidden_layers": 8, "vocab_size": 301, "tie_word_embeddings": True}
    small = {"num_hidden_layers": 4, "vocab_size": 301, "tie_word_embeddings": False}

    def of(kind: str) -> tuple[Path, dict[str, Any]]:
        if kind not in known:
            match kind:
                case "dense":
                    path = checkpoint("qwen3", **large, hidden_size=64, intermediate_size=96, head_dim=16)
                case "moe":
                    path = checkpoint("qwen3_moe", **large)
                case _:
                    path = checkpoint(kind, **small, hidden_size=64, intermediate_size=96)
            known[kind] = path, plain.plain(path, features)
        return known[kind]

    return of


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "kind"), cases())
def test_a_layout_equals_plain_torch(
    name: str, kind: str, pools: Callable[[int], Any], expected: Any, features: list[Any], record_property: Any
) -> None:
    path, reference = expected(kind)
    ranks, sizes, options, _ = ROWS[name]
    results = pools(ranks).run(measure_on_rank, path, features, sizes, options, 2, timeout_s=200)
    check(results, reference, lambda found: record_property("differences", found))
    assert ("moe_load_max" in results[0]["metrics"]) == (kind not in ("dense", "qwen2", "llama"))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "glm4_moe", "qwen3_moe"])
def test_tied_embeddings_equal_plain_torch(family: str, checkpoint: Any, plain: Any, pools: Any, features: list[Any]) -> None:
    sizes: dict[str, Any] = {"tie_word_embeddings": True, "vocab_size": 301}
    if family == "deepseek_v3":  # and what else may differ: rotary scaling, queries without a latent
        rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7}
        sizes |= {"rope_parameters": rope, "q_lora_rank": None}
    if family == "qwen3_moe":  # a dense layer among those with experts, and weights that are not normalized
        sizes |= {"mlp_only_layers": [1], "norm_topk_prob": False, "num_hidden_layers": 3}
    path = checkpoint(family, **sizes)
    results = pools(1).run(measure_on_rank, path, features, {}, {}, 2)
    check(results, plain.plain(path, features), print)
