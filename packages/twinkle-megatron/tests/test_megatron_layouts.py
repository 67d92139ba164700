"""Every layout gives the loss, gradients and updated weights of the plain-torch reference, to float32 rounding; sabotaged ones do not."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

LOSS_TOLERANCE = 1e-6
# A gradient is a sum of some thousand float32 products, here in another order: a few roundings (6e-8) of the largest partial sums, which
# are about 1. Weights differ by that times the learning rate.
GRADIENT_TOLERANCE = 1e-6
SGD = {"name": "sgd", "lr": 0.1}
# Adam divides by the gradient's size and so amplifies rounding of small ones, up to lr / eps: hence the large eps.
ADAMW = {"name": "adamw", "lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}
NORM_RELATIVE_TOLERANCE = 1e-5

# What each layout must do, and what it is called with when it is left out, to see that the comparison would notice.
SABOTAGE = {
    "norm gradients are not summed over tp": "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads",
    "tied embeddings are not summed over stages": "megatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads",
    "gradients are not summed over dp": "megatron.core.distributed.DistributedDataParallel.finish_grad_sync",
}


def measure(
    trainer: Any, share: Callable[[list[Any]], list[Any]], rows: list[Any], micro_batch_size: int | None, optimizer: dict[str, Any]
) -> dict[str, Any]:
    """Two accumulating calls, gradients, their norm, one step of the optimizer, and the loss after it."""
    trainer.set_loss("cross_entropy")
    trainer.set_optimizer(**optimizer)
    scored = trainer.forward_only(share(rows), micro_batch_size)
    outputs = [trainer.forward_backward(share(part), micro_batch_size) for part in (rows, rows[:4])]
    gradients = trainer.export_gradients()
    norm = trainer.clip_grad_norm(float("inf"))
    trainer.step()
    trainer.zero_grad()
    outputs.append(trainer.forward_backward(share(rows), micro_batch_size))
    return {
        "losses": [output.loss for output in outputs],
        "loss_weights": [output.loss_weight for output in outputs],
        "entropy": outputs[0].metrics["entropy"],
        "logprobs": scored.logprobs,
        "gradients": gradients,
        "norm": norm,
        "weights": trainer.export_weights(),
    }


def train_on_rank(
    path: Path,
    rows: list[Any],
    sizes: dict[str, Any],
    micro_batch_size: int | None = None,
    optimizer: dict[str, Any] = SGD,
    sabotage: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Runs on every rank: `measure` on this rank's share, with one reduction left out when sabotaged."""
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    trainer = MegatronTrainer(path, mesh, **options)
    rank = int(os.environ["RANK"])
    with ExitStack() as stack:
        stack.callback(trainer.close)
        if sabotage is not None:
            stack.enter_context(mock.patch(SABOTAGE[sabotage], return_value=None))
        measured = measure(trainer, lambda part: part[mesh.get_slice(len(part), rank)], rows, micro_batch_size, optimizer)
        return measured | {"representatives": mesh.representatives()}


def differences(results: list[dict[str, Any]], reference: dict[str, Any]) -> dict[str, float]:
    """The largest absolute difference of each kind (of the norm: relative) between all ranks and the reference."""
    ranks = [results[rank] for rank in results[0].get("representatives", (0,))]
    logprobs = [row for result in ranks for row in result["logprobs"]]
    assert [len(row) for row in logprobs] == [len(row) for row in reference["logprobs"]]
    first = results[0]
    assert set(first["gradients"]) == set(first["weights"]) == set(reference["weights"])
    return {
        "loss": max(_max(result["losses"], reference["losses"]) for result in results),
        "loss_weight": max(_max(result["loss_weights"], reference["loss_weights"]) for result in results),
        "entropy": max(abs(result["entropy"] - reference["entropy"]) for result in results),
        "logprobs": max(_max(mine, theirs) for mine, theirs in zip(logprobs, reference["logprobs"], strict=True)),
        "gradients": max(_max(first["gradients"][name], gradient) for name, gradient in reference["gradients"].items()),
        "norm": max(abs(result["norm"] / reference["norm"] - 1) for result in results),
        "weights": max(_max(first["weights"][name], weight) for name, weight in reference["weights"].items()),
    }


def _max(mine: Any, theirs: Any) -> float:
    return float(np.abs(np.asarray(mine, np.float64) - np.asarray(theirs, np.float64)).max())


def check_equal(results: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    found = differences(results, reference)
    print(found)
    assert found["loss"] <= LOSS_TOLERANCE, found
    assert found["loss_weight"] <= 1e-4, found
    assert found["entropy"] <= 1e-5, found
    assert found["logprobs"] <= 5e-6, found
    assert found["gradients"] <= GRADIENT_TOLERANCE, found
    assert found["norm"] <= NORM_RELATIVE_TOLERANCE, found
    assert found["weights"] <= 5e-7, found


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[..., Path], features: list[Any]) -> Callable[..., dict[str, Any]]:
    """What the reference trainer measures on a checkpoint with an optimizer, once."""
    from twinkle_train.testing import ReferenceTrainer

    known: dict[tuple[Path, str], dict[str, Any]] = {}

    def measured(path: Path, optimizer: dict[str, Any] = SGD) -> dict[str, Any]:
        key = (path, optimizer["name"])
        if key not in known:
            known[key] = measure(ReferenceTrainer(path), lambda part: part, features, None, optimizer)
        return known[key]

    return measured


TWO_RANKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp2 qwen3": ("qwen3", {"tp_size": 2}, {}),
    "tp2 sp qwen3": ("qwen3", {"tp_size": 2, "sequence_parallel": True}, {"micro_batch_size": 2}),
    "tp2 qwen2": ("qwen2", {"tp_size": 2}, {"micro_batch_size": 3}),
    "tp2 sp llama": ("llama", {"tp_size": 2, "sequence_parallel": True}, {}),
    "pp2 qwen3": ("qwen3", {"pp_size": 2}, {"micro_batch_size": 2}),
    "pp2 llama": ("llama", {"pp_size": 2}, {}),
    "dp2 qwen3": ("qwen3", {"dp_size": 2}, {"micro_batch_size": 1}),
    "dp2 distributed optimizer": ("qwen3", {"dp_size": 2}, {"use_distributed_optimizer": True, "optimizer": ADAMW}),
    "dp2 distributed optimizer, overlap": (
        "qwen3",
        {"dp_size": 2},
        {"use_distributed_optimizer": True, "overlap_communication": True, "optimizer": ADAMW, "micro_batch_size": 2},
    ),
    "tp2 adamw": ("qwen2", {"tp_size": 2}, {"optimizer": ADAMW}),
    "tp2 sp full recompute": ("qwen3", {"tp_size": 2, "sequence_parallel": True}, {"recompute": "full"}),
}


# The others say little that test_megatron_parity.py does not.
_QUICK = {"tp2 sp llama", "pp2 llama", "dp2 distributed optimizer, overlap"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in _QUICK else (pytest.mark.full,)) for name in TWO_RANKS])
def test_two_ranks_equal_the_reference(name: str, two_ranks: Any, checkpoint: Any, reference: Any, features: list[Any]) -> None:
    family, sizes, options = TWO_RANKS[name]
    # An odd vocabulary: tensor parallelism has to pad it.
    path = checkpoint(family, vocab_size=301)
    check_equal(two_ranks.run(train_on_rank, path, features, sizes, **options), reference(path, options.get("optimizer", SGD)))


@pytest.mark.full
def test_virtual_stages_equal_the_reference(two_ranks: Any, checkpoint: Any, reference: Any, features: list[Any]) -> None:
    path = checkpoint("qwen3", num_hidden_layers=4)
    check_equal(two_ranks.run(train_on_rank, path, features, {"pp_size": 2, "vpp_size": 2}, micro_batch_size=2), reference(path))


@pytest.mark.parametrize(
    ("sizes", "sabotage"),
    [
        ({"tp_size": 2, "sequence_parallel": True}, "norm gradients are not summed over tp"),
        ({"tp_size": 2}, "norm gradients are not summed over tp"),
        ({"pp_size": 2}, "tied embeddings are not summed over stages"),
        ({"dp_size": 2}, "gradients are not summed over dp"),
    ],
)
def test_a_reduction_left_out_is_noticed(
    sizes: dict[str, Any], sabotage: str, two_ranks: Any, checkpoint: Any, reference: Any, features: list[Any]
) -> None:
    path = checkpoint("qwen3", vocab_size=301)
    found = differences(two_ranks.run(train_on_rank, path, features, sizes, sabotage=sabotage), reference(path))
    assert found["gradients"] > 100 * GRADIENT_TOLERANCE, found
    assert found["norm"] > 10 * NORM_RELATIVE_TOLERANCE, found


def test_batched_p2p_still_gives_wrong_gradients_with_virtual_stages_on_gloo(
    two_ranks: Any, checkpoint: Any, reference: Any, features: list[Any]
) -> None:
    # megatron-core 0.16.1. When this fails, _engine._base_options no longer needs to set batch_p2p_comm.
    path = checkpoint("qwen3", num_hidden_layers=4)
    wrong = {"batch_p2p_comm": True, "overlap_p2p_comm": False}
    found = differences(
        two_ranks.run(train_on_rank, path, features, {"pp_size": 2, "vpp_size": 2}, micro_batch_size=2, transformer_options=wrong), reference(path)
    )
    assert found["gradients"] > 100 * GRADIENT_TOLERANCE, found


def fail_on_rank(path: Path, rows: list[Any], sizes: dict[str, Any], failing_length: int) -> tuple[str, float]:
    """A loss that fails on some micro-batches: the error of this rank, and the loss of the next call."""
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh
    from twinkle_train import CrossEntropyLoss, LossInput, LossOutput, TrainError

    def loss(inputs: LossInput) -> LossOutput:
        if inputs.logprobs_BT.shape[1] == failing_length:
            raise ZeroDivisionError("the loss is broken")
        return CrossEntropyLoss()(inputs)

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    trainer = MegatronTrainer(path, mesh)
    share = rows[mesh.get_slice(len(rows), int(os.environ["RANK"]))]
    trainer.set_loss(loss)
    try:
        trainer.forward_backward(share, 1)
    except (TrainError, ZeroDivisionError) as error:
        failure = type(error).__name__
    else:
        failure = "none"
    trainer.zero_grad()
    trainer.set_loss("cross_entropy")
    after = trainer.forward_backward(share, 1).loss
    trainer.close()
    assert after is not None
    return failure, after


@pytest.mark.parametrize(
    ("sizes", "first", "last"), [({"pp_size": 2}, "PeerError", "ZeroDivisionError"), ({"dp_size": 2}, "PeerError", "ZeroDivisionError")]
)
def test_a_loss_that_fails_on_one_rank_hangs_no_other(
    sizes: dict[str, Any], first: str, last: str, two_ranks: Any, checkpoint: Any, reference: Any, features: list[Any]
) -> None:
    # The row of 21 tokens is the fifth of seven: the second data rank has it.
    path = checkpoint("qwen3", vocab_size=301)
    answers = two_ranks.run(fail_on_rank, path, features, sizes, 21)
    assert [failure for failure, _ in answers] == [first, last]
    assert all(abs(loss - reference(path)["losses"][0]) < LOSS_TOLERANCE for _, loss in answers)


FOUR_RANKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp2 pp2": ("qwen3", {"tp_size": 2, "pp_size": 2}, {"micro_batch_size": 2}),
    "tp2 pp2 sp": ("qwen2", {"tp_size": 2, "pp_size": 2, "sequence_parallel": True}, {"micro_batch_size": 2}),
    "tp2 pp2 vpp2 sp": ("qwen3", {"tp_size": 2, "pp_size": 2, "vpp_size": 2, "sequence_parallel": True}, {"micro_batch_size": 2}),
    "dp2 tp2": ("llama", {"dp_size": 2, "tp_size": 2}, {}),
    "dp2 pp2 distributed optimizer": ("qwen3", {"dp_size": 2, "pp_size": 2}, {"use_distributed_optimizer": True, "optimizer": ADAMW}),
    "dp4": ("qwen3", {"dp_size": 4}, {}),
    "pp4": ("qwen3", {"pp_size": 4}, {"micro_batch_size": 2}),
}


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_equal_the_reference(name: str, four_ranks: Any, checkpoint: Any, reference: Any, features: list[Any]) -> None:
    family, sizes, options = FOUR_RANKS[name]
    path = checkpoint(family, vocab_size=301, num_hidden_layers=4)
    check_equal(four_ranks.run(train_on_rank, path, features, sizes, **options), reference(path, options.get("optimizer", SGD)))
