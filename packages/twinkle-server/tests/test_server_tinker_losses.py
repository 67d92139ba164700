"""What a request to train becomes: rows and a loss whose sum and gradient are those of the protocol's formulas, written again in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from twinkle_data import InputProcessor, ModelOutput
from twinkle_server._errors import BadRequest
from twinkle_server.tinker._codec import Datum
from twinkle_server.tinker._training import loss_spec, metrics_of, rows_of
from twinkle_train import loss_input_from_batch, resolve_loss


def f32(values: Any) -> NDArray[np.float32]:
    return np.array(values, np.float32)


LIMITS: dict[str, Any] = {"max_rows": 64, "max_length": 64}


def by_formula(name: str, config: dict[str, float], logprobs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    if name == "cross_entropy":
        return (-logprobs * inputs["weights"]).sum()
    advantages, old = inputs["advantages"], inputs["logprobs"]
    ratio = torch.exp(logprobs - old)
    low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
    match name:
        case "importance_sampling":
            return -(ratio * advantages).sum()
        case "ppo":
            clipped = torch.clamp(ratio, 0.8 if low is None else low, 1.2 if high is None else high)
            return -torch.min(ratio * advantages, clipped * advantages).sum()
        case "cispo":
            clipped = torch.clamp(ratio, 0.0 if low is None else low, 4.0 if high is None else high)
            return -(clipped.detach() * logprobs * advantages).sum()
        case "dro":
            return -(logprobs * advantages - 0.5 * config.get("beta", 0.05) * (logprobs - old) ** 2).sum()
        case "gspo":
            mask = inputs.get("sequence_ratio_mask", torch.ones_like(old)) != 0
            whole = torch.exp((logprobs - old)[mask].mean()).detach()
            ratio = whole * torch.exp(logprobs - logprobs.detach())
            clipped = torch.clamp(ratio, 1 - 3e-4 if low is None else low, 1 + 4e-4 if high is None else high)
            return -torch.min(ratio * advantages, clipped * advantages)[mask].sum()
    raise AssertionError(name)


def _data(name: str, rng: np.random.Generator, mask: bool = False) -> list[Datum]:
    data = []
    for length in (3, 6, 1):
        tokens = rng.integers(0, 50, length + 1)
        prompt = np.arange(length) < length // 3
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if name == "cross_entropy":
            inputs["weights"] = np.where(prompt, 0, rng.normal(0, 1, length)).astype(np.float32)
        else:
            inputs["logprobs"] = np.where(prompt, 0, -rng.exponential(1, length)).astype(np.float32)
            inputs["advantages"] = np.where(prompt, 0, rng.normal(0, 1, length)).astype(np.float32)
            if mask:
                inputs["sequence_ratio_mask"] = (~prompt).astype(np.float32)
        data.append(Datum(tokens=tokens[:-1], loss_inputs=inputs))
    return data


@pytest.mark.parametrize(
    ("name", "config", "mask"),
    [
        ("cross_entropy", {}, False),
        ("importance_sampling", {}, False),
        ("ppo", {}, False),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}, False),
        ("cispo", {}, False),
        ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, False),
        ("dro", {"beta": 0.4}, False),
        ("gspo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}, True),
        ("gspo", {}, False),
    ],
)
def test_a_loss_and_its_gradient_are_those_of_the_protocols_formula(name, config, mask):
    rng = np.random.default_rng(5)
    data = _data(name, rng, mask)
    spec = loss_spec(name, config)
    rows = rows_of(data, spec, **LIMITS)
    batch = InputProcessor()(rows.features)
    leaf = torch.tensor(-rng.exponential(1, batch.input_ids.shape), requires_grad=True)
    have = resolve_loss(spec.name, **spec.options)(loss_input_from_batch(batch, leaf))
    assert spec.options["reduction"] == "sum"
    (gradient,) = torch.autograd.grad(have.sum, leaf)

    other = leaf.detach().clone().requires_grad_()
    want = torch.zeros((), dtype=torch.float64)
    for row, each in enumerate(data):
        inputs = {key: torch.tensor(value) for key, value in each.loss_inputs.items()}
        want = want + by_formula(name, config, other[row, : len(each.tokens)], inputs)
    (wanted,) = torch.autograd.grad(want, other)
    assert have.sum.item() == pytest.approx(want.item(), rel=1e-6)
    np.testing.assert_allclose(gradient.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-9)


def test_every_position_asks_for_its_target_whether_it_is_the_next_token_or_not():
    plain = Datum(tokens=np.array([4, 5, 6]), loss_inputs={"target_tokens": np.array([5, 6, 7])})
    other = Datum(tokens=np.array([4, 5, 6]), loss_inputs={"target_tokens": np.array([9, 6, 7])})
    many = Datum(tokens=np.array([4, 5]), loss_inputs={"target_tokens": np.array([[1, 2, 3], [7, 8, 9]])})
    rows = rows_of([plain, other, many], None, **LIMITS)
    assert rows.features[0].targets is None, "the usual case needs no targets of its own"
    batch = InputProcessor()(rows.features)
    assert [batch.targets[row, :n].tolist() for row, n in ((0, 3), (1, 3), (2, 2), (3, 2), (4, 2))] == [[5, 6, 7], [9, 6, 7], [1, 7], [2, 8], [3, 9]]
    assert [batch.input_ids[row, :n].tolist() for row, n in ((0, 3), (1, 3), (2, 2), (3, 2))] == [[4, 5, 6], [4, 5, 6], [4, 5], [4, 5]]
    values = [f32([0, *(-10 * row - np.arange(len(feature) - 1))]) for row, feature in enumerate(rows.features)]
    joined = rows.join(values)
    assert [each.tolist() for each in joined] == [[0, -1, -2], [-10, -11, -12], [[-20, -30, -40], [-21, -31, -41]]]


def test_weights_of_many_targets_go_with_their_targets():
    data = [Datum(tokens=np.array([4, 5]), loss_inputs={"target_tokens": np.array([[1, 2], [7, 8]]), "weights": f32([[0.5, 0], [-1, 2]])})]
    batch = InputProcessor()(rows_of(data, loss_spec("cross_entropy", {}), **LIMITS).features)
    assert batch.advantages is not None
    assert batch.advantages[:, :2].tolist() == [[0.5, -1], [0, 2]]


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({}, "has no target_tokens"),
        ({"target_tokens": f32([1, 2])}, "must be int64"),
        ({"target_tokens": np.array([1])}, r"shape \(1,\)"),
        ({"target_tokens": np.array([1, -100])}, "the token -100"),
        ({"target_tokens": np.array([1, 2])}, r"data\[0\] has no advantages, logprobs"),
        ({"target_tokens": np.array([1, 2]), "logprobs": f32([0, 0]), "advantages": f32([1])}, "advantages has the shape"),
        ({"target_tokens": np.array([1, 2]), "logprobs": f32([0, np.nan]), "advantages": f32([1, 1])}, "not finite"),
        (
            {"target_tokens": np.array([1, 2]), "logprobs": f32([0, 0]), "advantages": f32([1, 1]), "weights": f32([1, 1])},
            "weights",
        ),
    ],
)
def test_data_that_a_loss_cannot_take_is_refused_by_name(inputs, told):
    with pytest.raises(BadRequest, match=told):
        rows_of([Datum(tokens=np.array([3, 4]), loss_inputs=inputs)], loss_spec("ppo", {}), **LIMITS)


def test_sizes_are_bounded():
    long = Datum(tokens=np.zeros(65, np.int64), loss_inputs={"target_tokens": np.zeros(65, np.int64)})
    wide = Datum(tokens=np.zeros(1, np.int64), loss_inputs={"target_tokens": np.zeros((1, 65), np.int64)})
    empty = Datum(tokens=np.zeros(0, np.int64), loss_inputs={"target_tokens": np.zeros(0, np.int64)})
    for data, told in (([], "empty"), ([long], "65 tokens"), ([wide], "more than 64 rows"), ([empty], "0 tokens")):
        with pytest.raises(BadRequest, match=told):
            rows_of(data, None, **LIMITS)


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("stable_reinforce", {}, "no loss 'stable_reinforce'"),
        ("ppo", {"beta": 0.1}, "takes clip_high_threshold, clip_low_threshold"),
        ("cross_entropy", {"beta": 0.1}, "takes nothing"),
        ("dro", {"beta": "high"}, "finite number"),
        ("dro", {"beta": float("inf")}, "finite number"),
    ],
)
def test_losses_and_config_that_are_not_there_are_refused(name, config, told):
    with pytest.raises(BadRequest, match=told):
        loss_spec(name, config)


def test_metrics_are_named_as_the_sdk_reduces_them():
    output = ModelOutput(loss=0.5, loss_weight=4.0, metrics={"clip_fraction": 0.25, "logprob_gap": 2.0, "entropy": float("nan")})
    assert metrics_of(output) == {"loss:sum": 2.0, "clip_fraction:mean": 0.25, "logprob_gap:max": 2.0}
    assert metrics_of(ModelOutput(loss=float("nan"), loss_weight=0.0)) == {"loss:sum": 0.0}
