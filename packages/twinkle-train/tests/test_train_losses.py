"""Losses against formulas written again in numpy, with loops."""

from typing import Any

import numpy as np
import pytest
import torch

from twinkle_train import (
    CISPOLoss,
    ConfigError,
    CrossEntropyLoss,
    DROLoss,
    GRPOLoss,
    GSPOLoss,
    ImportanceSamplingLoss,
    InputError,
    LossInput,
    LossOutput,
    ReinforceLoss,
    resolve_loss,
)

MASK = np.array([[0, 1, 1, 0.5, 0, 0], [1, 1, 2, 1, 1, 0]], dtype=np.float32)
# Row 0 holds one sequence and padding, row 1 two packed sequences.
IDS = np.array([[0, 0, 0, 0, -1, -1], [1, 1, 1, 2, 2, 2]])


def loss_input(seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 0.4, without: tuple[str, ...] = ()) -> Any:
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.0, MASK.shape)
    values = {
        "logprobs_BT": logprobs,
        "entropy_BT": rng.uniform(0, 3, MASK.shape),
        "old_logprobs_BT": logprobs + rng.normal(0, spread, MASK.shape),
        "ref_logprobs_BT": logprobs + rng.normal(0, spread, MASK.shape),
        "advantages_BT": rng.normal(0, 1, MASK.shape),
    }
    tensors = {name: torch.tensor(value, dtype=dtype) for name, value in values.items() if name not in without}
    tensors["logprobs_BT"].requires_grad_()
    return LossInput(**tensors, mask_BT=torch.tensor(MASK), sequence_ids_BT=torch.tensor(IDS))


def numpy_of(inputs: LossInput) -> dict[str, np.ndarray]:
    names = ("logprobs_BT", "entropy_BT", "old_logprobs_BT", "ref_logprobs_BT", "advantages_BT")
    return {name: getattr(inputs, name).detach().numpy() for name in names if getattr(inputs, name) is not None}


def grpo_by_loops(inputs: LossInput, low: float, high: float, beta: float, aggregation: str) -> tuple[float, float, dict[str, float]]:
    x = numpy_of(inputs)
    by_sequence: dict[int, list[tuple[float, float]]] = {}
    ratios, gaps, clipped, kls, entropies = [], [], [], [], []
    for b in range(MASK.shape[0]):
        for t in range(MASK.shape[1]):
            if MASK[b, t] == 0:
                continue
            gap = x["logprobs_BT"][b, t] - x["old_logprobs_BT"][b, t]
            ratio, advantage = np.exp(gap), x["advantages_BT"][b, t]
            objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
            d = x["ref_logprobs_BT"][b, t] - x["logprobs_BT"][b, t]
            k3 = np.exp(d) - d - 1
            by_sequence.setdefault(IDS[b, t], []).append((MASK[b, t], -objective + beta * k3))
            ratios.append(abs(ratio - 1))
            gaps.append(abs(gap))
            clipped.append((advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low))
            kls.append(k3)
            entropies.append(x["entropy_BT"][b, t])
    metrics = {
        "ratio_max_deviation": max(ratios),
        "logprob_gap": max(gaps),
        "clip_fraction": float(np.mean(clipped)),
        "kl_ref": float(np.mean(kls)),
        "entropy": float(np.mean(entropies)),
    }
    if aggregation == "token":
        pairs = [pair for pairs in by_sequence.values() for pair in pairs]
        return sum(w * v for w, v in pairs), sum(w for w, _ in pairs), metrics
    means = [sum(w * v for w, v in pairs) / sum(w for w, _ in pairs) for pairs in by_sequence.values()]
    return sum(means), len(means), metrics


def test_cross_entropy_is_the_weighted_sum_of_negative_logprobs():
    inputs = loss_input()
    output = CrossEntropyLoss()(inputs)
    x = numpy_of(inputs)
    assert output.sum.item() == pytest.approx(float(-(x["logprobs_BT"] * MASK).sum()), abs=1e-12)
    assert float(output.weight) == pytest.approx(MASK.sum(), abs=1e-12)
    assert output.metrics["entropy"].compute() == pytest.approx(x["entropy_BT"][MASK > 0].mean(), abs=1e-12)
    output.sum.backward()
    np.testing.assert_allclose(inputs.logprobs_BT.grad, -MASK, atol=1e-12)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize(("high", "beta"), [(None, 0.0), (0.28, 0.0), (None, 0.3), (0.5, 0.04)])
def test_grpo_equals_the_formula(aggregation, high, beta):
    inputs = loss_input(seed=3)
    output = GRPOLoss(epsilon=0.2, epsilon_high=high, beta=beta, aggregation=aggregation)(inputs)
    want_sum, want_weight, want_metrics = grpo_by_loops(inputs, 0.2, 0.2 if high is None else high, beta, aggregation)
    assert 0 < want_metrics["clip_fraction"] < 1, "these inputs do not reach the clip"
    assert output.sum.item() == pytest.approx(want_sum, abs=1e-10)
    assert float(output.weight) == pytest.approx(want_weight, abs=1e-10)
    assert {name: metric.compute() for name, metric in output.metrics.items()} == pytest.approx(want_metrics, abs=1e-7)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_grpo_gradient_equals_finite_differences(aggregation):
    inputs = loss_input(seed=5)
    loss = GRPOLoss(epsilon=0.15, beta=0.2, aggregation=aggregation)

    def total(logprobs_BT: torch.Tensor) -> torch.Tensor:
        return loss(
            LossInput(
                logprobs_BT=logprobs_BT,
                mask_BT=inputs.mask_BT,
                sequence_ids_BT=inputs.sequence_ids_BT,
                old_logprobs_BT=inputs.old_logprobs_BT,
                ref_logprobs_BT=inputs.ref_logprobs_BT,
                advantages_BT=inputs.advantages_BT,
            )
        ).sum

    assert torch.autograd.gradcheck(total, (inputs.logprobs_BT,))


def test_grpo_first_step_is_the_plain_policy_gradient():
    inputs = loss_input(spread=0.0)
    output = GRPOLoss(beta=0.5)(inputs)
    output.sum.backward()
    np.testing.assert_allclose(inputs.logprobs_BT.grad, -MASK * inputs.advantages_BT.numpy(), atol=1e-12)
    assert output.metrics["ratio_max_deviation"].compute() == 0
    assert output.metrics["kl_ref"].compute() == 0


def test_grpo_takes_no_gradient_from_clipped_tokens():
    inputs = loss_input(seed=3)
    output = GRPOLoss(epsilon=0.2)(inputs)
    output.sum.backward()
    ratio = (inputs.logprobs_BT - inputs.old_logprobs_BT).exp().detach().numpy()
    advantages = inputs.advantages_BT.numpy()
    cut = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    assert cut[MASK > 0].any()
    grad = inputs.logprobs_BT.grad.numpy()
    assert (grad[cut] == 0).all()
    assert (grad[~cut & (MASK > 0)] != 0).all()


@pytest.mark.parametrize("loss", [CrossEntropyLoss(), GRPOLoss(beta=0.1), GRPOLoss(beta=0.1, aggregation="sequence")])
def test_garbage_at_untrained_positions_changes_nothing(loss):
    clean = loss_input()
    want = loss(clean)
    want.sum.backward()
    dirty_values = clean.logprobs_BT.detach().clone()
    dirty_values[torch.tensor(MASK) == 0] = float("-inf")
    dirty_values.requires_grad_()
    old = clean.old_logprobs_BT.clone()
    old[torch.tensor(MASK) == 0] = -1e4
    dirty: Any = LossInput(
        logprobs_BT=dirty_values,
        mask_BT=clean.mask_BT,
        sequence_ids_BT=clean.sequence_ids_BT,
        entropy_BT=torch.where(clean.mask_BT > 0, clean.entropy_BT, float("nan")),
        old_logprobs_BT=old,
        ref_logprobs_BT=clean.ref_logprobs_BT,
        advantages_BT=torch.where(clean.mask_BT > 0, clean.advantages_BT, 1e9),
    )
    have = loss(dirty)
    have.sum.backward()
    assert have.sum.item() == want.sum.item()
    np.testing.assert_array_equal(dirty.logprobs_BT.grad, clean.logprobs_BT.grad)
    assert {n: m.compute() for n, m in have.metrics.items()} == {n: m.compute() for n, m in want.metrics.items()}


@pytest.mark.parametrize("loss", [CrossEntropyLoss(), GRPOLoss(beta=0.1), GRPOLoss(aggregation="sequence")])
def test_a_batch_equals_its_rows_one_by_one(loss):
    inputs = loss_input()
    whole = loss(inputs)
    fields = ("logprobs_BT", "mask_BT", "sequence_ids_BT", "entropy_BT", "old_logprobs_BT", "ref_logprobs_BT", "advantages_BT")
    rows = [loss(LossInput(**{name: getattr(inputs, name)[b : b + 1] for name in fields})) for b in range(2)]
    assert sum(row.sum.item() for row in rows) == pytest.approx(whole.sum.item(), abs=1e-12)
    assert sum(float(row.weight) for row in rows) == pytest.approx(float(whole.weight), abs=1e-12)


def test_a_batch_without_trained_tokens_has_no_weight_and_no_gradient():
    inputs = loss_input()
    empty = LossInput(
        logprobs_BT=inputs.logprobs_BT,
        mask_BT=torch.zeros_like(inputs.mask_BT),
        sequence_ids_BT=inputs.sequence_ids_BT,
        old_logprobs_BT=inputs.old_logprobs_BT,
        advantages_BT=inputs.advantages_BT,
    )
    for aggregation in ("token", "sequence"):
        output = GRPOLoss(aggregation=aggregation)(empty)
        assert (output.sum.item(), float(output.weight)) == (0, 0)
        output.sum.backward()
        assert not inputs.logprobs_BT.grad.any()


def test_old_and_reference_logprobs_and_advantages_get_no_gradient():
    inputs = loss_input()
    others = [inputs.old_logprobs_BT, inputs.ref_logprobs_BT, inputs.advantages_BT]
    for tensor in others:
        tensor.requires_grad_()
    GRPOLoss(beta=0.1)(inputs).sum.backward()
    assert all(tensor.grad is None for tensor in others)


@pytest.mark.parametrize(
    ("missing", "beta", "message"),
    [("old_logprobs_BT", 0.0, "features with logprobs"), ("advantages_BT", 0.0, "group_advantages"), ("ref_logprobs_BT", 0.1, "ref_logprobs")],
)
def test_grpo_names_the_input_that_it_lacks(missing, beta, message):
    with pytest.raises(InputError, match=message):
        GRPOLoss(beta=beta)(loss_input(without=(missing,)))


def test_kl_is_reported_without_beta_and_absent_without_a_reference():
    assert "kl_ref" in GRPOLoss()(loss_input()).metrics
    assert "kl_ref" not in GRPOLoss()(loss_input(without=("ref_logprobs_BT",))).metrics


def test_shapes_that_disagree_are_refused():
    with pytest.raises(InputError, match="advantages_BT has shape"):
        LossInput(logprobs_BT=torch.zeros(2, 3), mask_BT=torch.zeros(2, 3), sequence_ids_BT=torch.zeros(2, 3), advantages_BT=torch.zeros(2))
    with pytest.raises(InputError, match="0-d"):
        LossOutput(torch.zeros(1), torch.zeros(()))
    with pytest.raises(InputError, match="detach"):
        LossOutput(torch.zeros(()), torch.zeros((), requires_grad=True))


def test_resolve_loss_takes_names_classes_instances_and_functions():
    assert resolve_loss("grpo", beta=0.1) == GRPOLoss(beta=0.1)
    assert resolve_loss("GRPOLoss") == resolve_loss(GRPOLoss) == GRPOLoss()
    assert resolve_loss("cross_entropy") == CrossEntropyLoss()
    instance = GRPOLoss(epsilon=0.1)
    assert resolve_loss(instance) is instance

    def own(inputs: LossInput) -> LossOutput:
        return CrossEntropyLoss()(inputs)

    assert resolve_loss(own) is own


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("grop", {}, "known are cispo, cross_entropy"),
        ("grpo", {"eps": 0.1}, "eps"),
        (GRPOLoss(), {"beta": 1.0}, "ready loss"),
        (dict, {}, "not a loss"),
        (3, {}, "callable"),
        ("grpo", {"epsilon": 1.5}, "epsilon"),
        ("grpo", {"aggregation": "mean"}, "aggregation"),
        ("grpo", {"beta": -1.0}, "beta"),
    ],
)
def test_wrong_losses_and_options_are_refused(loss, options, message):
    with pytest.raises(ConfigError, match=message):
        resolve_loss(loss, **options)


def _per_token(loss: Any, logprob: torch.Tensor, old: float, advantage: float, sequence: list[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """The term of one token, as the papers write it; `sequence`: log-probabilities of its sequence's trained tokens, new and old."""
    ratio = torch.exp(logprob - old)
    match loss:
        case ReinforceLoss():
            return -advantage * logprob
        case ImportanceSamplingLoss():
            return -advantage * ratio
        case CISPOLoss():
            return -advantage * min(max(float(ratio), loss.low), loss.high) * logprob
        case DROLoss():
            return -(advantage * logprob - loss.beta / 2 * (logprob - old) ** 2)
        case GSPOLoss():
            whole = np.exp(np.mean([float(new) - before for new, before in sequence]))
            ratio = whole * torch.exp(logprob - logprob.detach())
    low, high = (loss.epsilon, loss.epsilon if loss.epsilon_high is None else loss.epsilon_high)
    return -torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


@pytest.mark.parametrize(
    "loss",
    [
        ReinforceLoss(),
        ImportanceSamplingLoss(),
        CISPOLoss(),
        CISPOLoss(low=0.9, high=1.2),
        DROLoss(beta=0.3),
        GSPOLoss(epsilon=0.1, epsilon_high=0.2),
        GRPOLoss(epsilon=0.2, epsilon_high=0.28),
    ],
    ids=lambda loss: repr(loss)[:24],
)
def test_a_policy_loss_and_its_gradient_are_those_of_its_formula(loss):
    inputs = loss_input(seed=3, without=("entropy_BT", "ref_logprobs_BT"))
    x = numpy_of(inputs)
    leaf = inputs.logprobs_BT.detach().clone().requires_grad_()
    places = [(b, t) for b in range(MASK.shape[0]) for t in range(MASK.shape[1]) if MASK[b, t]]
    want = torch.zeros((), dtype=torch.float64)
    for b, t in places:
        sequence = [(leaf[p].detach(), x["old_logprobs_BT"][p]) for p in places if IDS[p] == IDS[b, t]]
        want = want + float(MASK[b, t]) * _per_token(loss, leaf[b, t], x["old_logprobs_BT"][b, t], x["advantages_BT"][b, t], sequence)
    (gradient,) = torch.autograd.grad(want, leaf)
    have = loss(inputs)
    assert have.sum.item() == pytest.approx(want.item(), rel=1e-12)
    assert float(have.weight) == pytest.approx(MASK.sum())
    (have_gradient,) = torch.autograd.grad(have.sum, inputs.logprobs_BT)
    np.testing.assert_allclose(have_gradient.numpy(), gradient.numpy(), rtol=1e-10, atol=1e-12)
    if not isinstance(loss, ReinforceLoss):
        gaps = [x["logprobs_BT"][p] - x["old_logprobs_BT"][p] for p in places]
        assert have.metrics["logprob_gap"].compute() == pytest.approx(max(map(abs, gaps)))
        assert have.metrics["ratio_max_deviation"].compute() == pytest.approx(max(abs(np.exp(gap) - 1) for gap in gaps))


@pytest.mark.parametrize("name", ["reinforce", "importance_sampling", "cispo", "dro", "gspo", "grpo"])
def test_a_policy_loss_does_not_look_at_what_is_masked(name):
    loss: Any = resolve_loss(name, reduction="sum")
    assert loss.reduction == "sum"
    inputs = loss_input(seed=4, without=("entropy_BT", "ref_logprobs_BT"))
    want = loss(inputs)
    hidden = torch.tensor(MASK) == 0
    spoilt = inputs.logprobs_BT.detach().masked_fill(hidden, -1e4).requires_grad_()
    old = inputs.old_logprobs_BT.masked_fill(hidden, -2e4)
    have = loss(
        LossInput(
            logprobs_BT=spoilt,
            mask_BT=inputs.mask_BT,
            sequence_ids_BT=inputs.sequence_ids_BT,
            old_logprobs_BT=old,
            advantages_BT=inputs.advantages_BT,
        )
    )
    assert float(have.sum) == pytest.approx(float(want.sum), rel=1e-12)
    (gradient,) = torch.autograd.grad(have.sum, spoilt)
    assert torch.isfinite(gradient).all()
    assert (gradient[hidden] == 0).all()
    with pytest.raises(InputError, match="advantages"):
        loss(loss_input(without=("advantages_BT",)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cispo", {"low": 2.0, "high": 1.0}),
        ("dro", {"beta": -1.0}),
        ("gspo", {"epsilon": 2.0}),
        ("reinforce", {"reduction": "median"}),
        ("grpo", {"reduction": "none"}),
    ],
)
def test_options_of_a_policy_loss_that_are_out_of_range_are_refused(name, options):
    with pytest.raises(ConfigError, match=next(iter(options)) if "low" not in options and name != "gspo" else "clip range"):
        resolve_loss(name, **options)
