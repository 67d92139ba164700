"""Mixture of experts: auxiliary losses by their formulas in every layout, load counts, biases that balance, replay of routing."""

import gc
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinkle_data import InputFeature, PackedFeature
from twinkle_megatron import MegatronModel
from twinkle_train import ConfigError, InputError, LossInput, LossOutput

AUX, Z = 0.5, 0.02
AUX_OPTIONS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z}
SP = {"sequence_parallel": True}


def train_on_rank(path: Path, rows: Sequence[Any], sizes: dict[str, Any], micro_batch_size: int | None = 1, **options: Any) -> dict[str, Any]:
    """Runs on every rank: the loss, the gradients, the metrics, and the routing of this rank's rows."""
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh

    rank = int(os.environ.get("RANK", "0"))
    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    trainer = MegatronTrainer(path, mesh, **options)
    share = list(rows)[mesh.get_slice(len(rows), rank)]
    try:
        trainer.set_loss("cross_entropy")
        trainer.set_optimizer("sgd", lr=0.1)
        loss = trainer.forward_backward(share, micro_batch_size).loss
        metrics = trainer.calculate_metric()
        gradients = trainer.export_gradients()
        before = trainer.export_weights()
        trainer.step()
        after = trainer.export_weights()
        trainer.load(path)
        routing = trainer.record_routing(share, 2)
        return {
            "loss": loss,
            "metrics": metrics,
            "gradients": gradients,
            "routing": routing,
            "biases": {name: (before[name], after[name]) for name in before if name.endswith("e_score_correction_bias")},
            "representatives": mesh.representatives(),
        }
    finally:
        trainer.close()


LAYOUTS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "single": (1, {}, True),
    "TP2+SP": (2, {"tp_size": 2, **SP}, False),
    "PP2": (2, {"pp_size": 2}, False),
    "CP2": (2, {"cp_size": 2}, False),
    "EP2": (2, {"dp_size": 2, "ep_size": 2}, True),
    "EP2+TP2 ETP1": (2, {"tp_size": 2, "ep_size": 2, "etp_size": 1, **SP}, True),
    "EP2+CP2": (2, {"cp_size": 2, "ep_size": 2}, False),
    "EP2+TP2+CP2": (4, {"tp_size": 2, "cp_size": 2, "ep_size": 2, "etp_size": 1, **SP}, False),
    "EP2+TP2+PP2+VPP2": (4, {"tp_size": 2, "pp_size": 2, "vpp_size": 2, "ep_size": 2, "etp_size": 1, **SP}, False),
}


def layouts() -> list[Any]:
    return [pytest.param(name, marks=() if quick else (pytest.mark.full,), id=name) for name, (_, _, quick) in LAYOUTS.items()]


def worst(gradients: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(float(np.abs(gradients[name] - gradient).max()) for name, gradient in expected.items() if name in gradients)


@pytest.fixture(scope="session")
def with_aux(checkpoint: Any, plain: Any, features: list[Any]) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A checkpoint, and what plain torch makes of it with and without the routers' losses."""
    path = checkpoint("qwen3_moe", num_hidden_layers=4, hidden_size=64)
    return path, plain.plain(path, features, aux=AUX, z=Z), plain.plain(path, features)


@pytest.mark.parametrize("name", layouts())
def test_auxiliary_losses_equal_their_formulas(name: str, pools: Any, with_aux: Any, features: list[Any]) -> None:
    path, expected, without = with_aux
    ranks, sizes, _ = LAYOUTS[name]
    results = pools(ranks).run(train_on_rank, path, features, sizes, transformer_options=AUX_OPTIONS, timeout_s=200)
    # A row with more padding than tokens would show a loss that counts padding: layouts round rows up to 2, 4 or 8 tokens.
    assert worst(results[0]["gradients"], expected["gradients"]) <= 3e-6
    assert worst(results[0]["gradients"], without["gradients"]) > 1e-3, "the losses are to matter"
    assert max(abs(result["loss"] - expected["loss"]) for result in results) <= 1e-6
    assert 0.5 < results[0]["metrics"]["moe_aux_loss"] < 4
    assert results[0]["metrics"]["moe_z_loss"] > 0


def count(routing: Sequence[Any], num_experts: int) -> Any:
    """Tokens of each expert, ``[expert layers, experts]``."""
    tokens = np.concatenate(list(routing))
    return np.stack([np.bincount(tokens[:, layer].reshape(-1), minlength=num_experts) for layer in range(tokens.shape[1])])


@pytest.mark.parametrize("name", layouts())
def test_loads_are_measured_and_biases_move_towards_balance(name: str, pools: Any, checkpoint: Any, features: list[Any]) -> None:
    path = checkpoint("glm4_moe", num_hidden_layers=4)
    ranks, sizes, _ = LAYOUTS[name]
    rate = {"moe_router_bias_update_rate": 0.25}
    results = pools(ranks).run(train_on_rank, path, features, sizes, None, transformer_options=rate, timeout_s=200)
    loads = count([row for rank in results[0]["representatives"] for row in results[rank]["routing"]], 4)
    assert loads.shape == (3, 4)
    assert (loads.sum(1) == 2 * sum(len(row.input_ids) for row in features)).all()
    relative = loads / loads.mean(1, keepdims=True)
    for result in results:
        assert abs(result["metrics"]["moe_load_max"] - relative.max()) < 1e-6
        assert abs(result["metrics"]["moe_load_min"] - relative.min()) < 1e-6
    biases = results[0]["biases"]
    assert len(biases) == 3
    for layer, (_, (before, after)) in enumerate(sorted(biases.items())):
        np.testing.assert_allclose(after - before, 0.25 * np.sign(loads[layer].mean() - loads[layer]), atol=1e-6)


def test_biases_stay_as_they_are_unless_asked_for(checkpoint: Any, features: list[Any]) -> None:
    result = train_on_rank(checkpoint("glm4_moe", num_hidden_layers=4), features, {})
    assert all(np.array_equal(before, after) for before, after in result["biases"].values())


def replay_on_rank(path: Path, rows: Sequence[Any], sizes: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Runs on every rank: log-probabilities and gradients with the router's own choice, with that replayed, and with another replayed."""
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    trainer = MegatronTrainer(path, mesh, **options)
    share = list(rows)[mesh.get_slice(len(rows), int(os.environ.get("RANK", "0")))]

    def run(given: Sequence[Any]) -> dict[str, Any]:
        logprobs = trainer.forward_only(given, 2).logprobs
        loss = trainer.forward_backward(given, 2).loss
        gradients = trainer.export_gradients()
        trainer.zero_grad()
        return {"logprobs": logprobs, "loss": loss, "gradients": gradients}

    try:
        trainer.set_loss("cross_entropy")
        own = run(share)
        routing = trainer.record_routing(share, 3)
        trainer.set_router_replay()
        replayed = run([replace(row, user_data={"routed_experts": each}) for row, each in zip(share, routing, strict=True)])
        pack = PackedFeature(features=[replace(row, user_data={"routed_experts": each}) for row, each in zip(share, routing, strict=True)])
        packed = trainer.forward_only([pack]).logprobs
        others = [(each + 1) % 4 for each in routing]
        changed = run([replace(row, user_data={"routed_experts": each}) for row, each in zip(share, others, strict=True)])
        trainer.set_router_replay(False)
        return {"own": own, "replayed": replayed, "packed": packed, "changed": changed, "again": run(share), "routing": routing}
    finally:
        trainer.close()


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    alike = [np.array_equal(a, b) for a, b in zip(mine["logprobs"] or (), theirs["logprobs"] or (), strict=True)]
    return all(alike) and mine["loss"] == theirs["loss"] and all(np.array_equal(g, theirs["gradients"][n]) for n, g in mine["gradients"].items())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("single", {}),
        pytest.param("EP2+TP2 ETP1", {"recompute": "full"}),
        pytest.param("PP2", {"recompute": "full"}, marks=pytest.mark.full),
        pytest.param("EP2", {}, marks=pytest.mark.full),
        pytest.param("EP2+CP2", {}, marks=pytest.mark.full),
        pytest.param("EP2+TP2+PP2+VPP2", {"recompute": "full"}, marks=pytest.mark.full),
    ],
)
def test_routing_that_is_replayed_gives_bit_equal_results(name: str, options: Any, pools: Any, checkpoint: Any, features: list[Any]) -> None:
    path = checkpoint("qwen3_moe", num_hidden_layers=4, hidden_size=64)
    ranks, sizes, _ = LAYOUTS[name]
    results = pools(ranks).run(replay_on_rank, path, features, sizes, timeout_s=200, **options)
    for result in results:
        assert same(result["replayed"], result["own"])
        assert same(result["again"], result["own"])
        assert not same(result["changed"], result["own"]), "other experts give other results"
        if result["packed"] is not None:
            np.testing.assert_allclose(result["packed"][0], np.concatenate(result["own"]["logprobs"]), rtol=0, atol=1e-5)
    single = replay_on_rank(path, features, {})["routing"] if name == "single" else None
    assert single is None or all(np.array_equal(a, b) for a, b in zip(single, results[0]["routing"], strict=True))


@pytest.fixture(scope="module")
def model(checkpoint: Any) -> Any:
    made = MegatronModel(checkpoint("qwen3_moe"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (None, "has no user_data"),
        (np.zeros((4, 2, 2), np.int16), "names one expert twice"),
        (np.array([[[0, 4]] * 2] * 4, np.int16), "outside 0 to 3"),
        (np.zeros((3, 2, 2), np.int16), r"a \(3, 2, 2\) array as"),
    ],
    ids=["none", "twice", "outside", "too short"],
)
def test_routing_that_cannot_be_replayed_is_refused(chosen: Any, words: str, model: Any) -> None:
    model.set_router_replay()
    row = InputFeature(input_ids=[5, 6, 7, 8], user_data={} if chosen is None else {"routed_experts": chosen})
    with pytest.raises(InputError, match=words):
        model.forward_only([row]).get()
    model.set_router_replay(False)
    assert len(model.forward_only([row]).get().logprobs) == 1


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_bf16_trains_experts_close_to_float32(family: str, checkpoint: Any, features: list[Any]) -> None:
    losses: dict[str, list[float]] = {}
    for precision in ("no", "bf16"):
        made = MegatronModel(checkpoint(family), mixed_precision=precision, transformer_options={"moe_z_loss_coeff": 1e-3})
        try:
            made.set_loss("cross_entropy")
            made.set_optimizer("adamw", lr=1e-3)
            losses[precision] = []
            for _ in range(4):
                losses[precision].append(made.forward_backward(features, 3).loss or 0.0)
                made.clip_grad_and_step(1.0)
            assert made.calculate_metric()["moe_load_max"] >= 1
        finally:
            made.close()
    # bfloat16 has 8 bits: relative errors of 0.4 % a product, much less in the mean over tokens; some tokens go to other experts. A loss is about 6.
    np.testing.assert_allclose(losses["bf16"], losses["no"], rtol=0, atol=0.05)
    assert losses["bf16"][-1] < losses["bf16"][0] - 0.05


def test_a_dense_model_has_no_routing(checkpoint: Any, features: list[Any]) -> None:
    dense = MegatronModel(checkpoint("qwen3"))
    try:
        with pytest.raises(ConfigError, match="record_routing: a 'qwen3' model has no experts"):
            dense.record_routing(features)
        with pytest.raises(ConfigError, match="set_router_replay"):
            dense.set_router_replay()
    finally:
        dense.close()


def test_auxiliary_losses_beside_a_loss_that_counts_otherwise_are_refused(checkpoint: Any, features: list[Any]) -> None:
    def of_sequences(inputs: LossInput) -> LossOutput:
        return LossOutput(-(inputs.logprobs_BT * inputs.mask_BT).sum(), (inputs.mask_BT.sum(1) > 0).sum())

    made = MegatronModel(checkpoint("qwen3_moe"), transformer_options=AUX_OPTIONS)
    try:
        made.set_loss(of_sequences)
        with pytest.raises(ConfigError, match="weighs a micro-batch"):
            made.forward_backward(features, 2)
        made.zero_grad()
        made.set_loss("cross_entropy")
        assert (made.forward_backward(features, 2).loss or 0) > 0
    finally:
        made.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}, "'none' or 'aux_loss', not 'seq_aux_loss'"),
        ({"moe_router_load_balancing_type": "aux_loss"}, "needs moe_aux_loss_coeff"),
        ({"moe_token_dispatcher_type": "flex"}, "needs moe_flex_dispatcher_backend"),
        ({"moe_enable_routing_replay": True}, "moe_enable_routing_replay follow from"),
    ],
)
def test_options_of_experts_that_would_depend_on_the_layout_are_refused(options: Any, words: str, checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        MegatronModel(checkpoint("qwen3_moe"), transformer_options=options)


def test_a_model_that_was_trained_and_forgotten_is_collected(checkpoint: Any, features: list[Any]) -> None:
    # megatron-core's token dispatchers keep the last graph, which leads back to the model through autograd's hooks.
    made = MegatronModel(checkpoint("qwen3_moe"))
    made.set_loss("cross_entropy")
    made.forward_backward(features, 2)
    chunk = weakref.ref(made._engine._bare[0])
    made.close()
    del made
    gc.collect()
    assert chunk() is None
