"""What a request to train means for a trainer: its loss by name, its rows, and its result.

A loss of the protocol is a sum over tokens, and its gradient reaches the optimizer as it is. The formulas are those of twinkle_train's losses with
`reduction="sum"`; per token, with r = exp(logprob - old logprob) and A the advantage:

    cross_entropy           -weight * logprob                       (a weight may have any sign: that is how custom losses come back)
    importance_sampling     -r * A
    ppo                     -min(r * A, clip(r, low, high) * A)     low 0.8, high 1.2
    cispo                   -sg(clip(r, low, high)) * A * logprob   low 0, high 4
    dro                     -(A * logprob - beta / 2 * (logprob - old logprob) ** 2)    beta 0.05
    gspo                    as ppo with the ratio of the sequence, over tokens of sequence_ratio_mask   low 1 - 3e-4, high 1 + 4e-4

Shape suffixes: N tokens of a datum, K targets of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle_data import IGNORE_INDEX, FormatError, InputFeature, ModelOutput

from .._errors import BadRequest
from ._codec import Datum

_POLICY = frozenset({"logprobs", "advantages"})
_MAX_METRICS = ("ratio_max_deviation", "logprob_gap")


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """A loss of the protocol. name and options: for `set_loss`. needs, takes: the inputs beside target_tokens that must, and may, be there."""

    name: str
    options: Mapping[str, Any]
    needs: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()

    def fits(self, datum: Datum) -> bool:
        """Whether the datum has the inputs that the loss needs, and no others than it takes."""
        given = set(datum.loss_inputs) - {"target_tokens"}
        return self.needs <= given <= self.needs | self.takes


def _clipped(config: Mapping[str, float], low: float, high: float) -> dict[str, float]:
    low, high = config.get("clip_low_threshold", low), config.get("clip_high_threshold", high)
    return {"epsilon": 1 - low, "epsilon_high": high - 1}


_CLIP = frozenset({"clip_low_threshold", "clip_high_threshold"})
_Options = Callable[[Mapping[str, float]], dict[str, float]]
# Of each loss: the trainer's name for it, what its config may have, and the trainer's options from that.
_LOSSES: dict[str, tuple[str, frozenset[str], _Options, frozenset[str], frozenset[str]]] = {
    "cross_entropy": ("reinforce", frozenset(), lambda config: {}, frozenset(), frozenset({"weights"})),
    "importance_sampling": ("importance_sampling", frozenset(), lambda config: {}, _POLICY, frozenset()),
    "ppo": ("grpo", _CLIP, lambda config: _clipped(config, 0.8, 1.2), _POLICY, frozenset()),
    "cispo": (
        "cispo",
        _CLIP,
        lambda config: {"low": config.get("clip_low_threshold", 0.0), "high": config.get("clip_high_threshold", 4.0)},
        _POLICY,
        frozenset(),
    ),
    "dro": ("dro", frozenset({"beta"}), lambda config: {"beta": config.get("beta", 0.05)}, _POLICY, frozenset()),
    "gspo": ("gspo", _CLIP, lambda config: _clipped(config, 1 - 3e-4, 1 + 4e-4), _POLICY, frozenset({"sequence_ratio_mask"})),
}


def loss_spec(name: str, config: Mapping[str, float | str]) -> LossSpec:
    """The trainer's loss for one of the protocol.

    Raises BadRequest for a loss that this server does not have, and for config that the loss does not take.
    """
    if name not in _LOSSES:
        raise BadRequest(f"this server has no loss {name!r:.100}; it has {', '.join(_LOSSES)}. Any other can be computed by forward_backward_custom")
    own, keys, options, needs, takes = _LOSSES[name]
    if unknown := sorted(set(config) - keys):
        raise BadRequest(f"{name} takes {', '.join(sorted(keys)) or 'nothing'} in loss_fn_config, not {', '.join(unknown)[:200]}")
    numbers: dict[str, float] = {}
    for key, value in config.items():
        if isinstance(value, str) or not np.isfinite(value):
            raise BadRequest(f"loss_fn_config[{key!r}] must be a finite number")
        numbers[key] = float(value)
    return LossSpec(name=own, options={**options(numbers), "reduction": "sum"}, needs=needs, takes=takes)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a request's data. widths: of each datum, its K, or None where its targets have one axis."""

    features: Sequence[InputFeature]
    widths: Sequence[int | None]

    def join(self, logprobs: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the rows, [N + 1] each, as one array a datum of its targets' shape."""
        rows = iter(logprobs)
        joined: list[NDArray[np.float32]] = []
        for width in self.widths:
            parts = [next(rows)[1:] for _ in range(1 if width is None else width)]
            joined.append(parts[0] if width is None else np.stack(parts, axis=1))
        return joined


def rows_of(data: Sequence[Datum], spec: LossSpec | None, *, max_rows: int, max_length: int, min_rows: int = 1) -> Rows:
    """The rows that a trainer takes for a request's data: one a datum, or K where each position has K targets.

    spec: the loss; None where only log-probabilities are asked for, and other inputs than target_tokens do not matter. min_rows: a trainer on
    several data ranks needs one for each: copies that are not trained on come behind the others.

    Raises BadRequest naming the datum and the input that is missing, unknown, of another shape than its targets, or out of range.
    """
    if not data:
        raise BadRequest("data is empty")
    features: list[InputFeature] = []
    widths: list[int | None] = []
    for index, datum in enumerate(data):
        where = f"data[{index}]"
        targets = _targets(where, datum, max_length)
        inputs = {} if spec is None else _loss_inputs(where, datum, spec, targets.shape)
        widths.append(None if targets.ndim == 1 else targets.shape[1])
        for column in range(1 if targets.ndim == 1 else targets.shape[1]):
            own = {name: values if values.ndim == 1 else values[:, column] for name, values in inputs.items()}
            features.append(_feature(where, datum.tokens, targets if targets.ndim == 1 else targets[:, column], own, spec))
            if len(features) > max_rows:
                raise BadRequest(f"data has more than {max_rows} rows: send it in parts")
    last = features[-1]
    idle = replace(last, labels=np.full(len(last), IGNORE_INDEX, np.int64))
    return Rows(features=features + [idle] * (min_rows - len(features)), widths=widths)


def _targets(where: str, datum: Datum, max_length: int) -> NDArray[np.int64]:
    if "target_tokens" not in datum.loss_inputs:
        raise BadRequest(f"{where} has no target_tokens")
    targets = datum.loss_inputs["target_tokens"]
    if targets.dtype.kind != "i":
        raise BadRequest(f"{where}.target_tokens must be int64")
    length = len(datum.tokens)
    if not 1 <= length <= max_length:
        raise BadRequest(f"{where} has {length} tokens; 1 to {max_length} can be trained on")
    if targets.ndim not in (1, 2) or len(targets) != length or targets.size == 0:
        raise BadRequest(f"{where}.target_tokens has the shape {targets.shape}, and model_input has {length} tokens: [N] or [N, K] is needed")
    if targets.min() < 0:
        raise BadRequest(f"{where}.target_tokens has the token {targets.min()}")
    return targets


def _loss_inputs(where: str, datum: Datum, spec: LossSpec, shape: tuple[int, ...]) -> dict[str, NDArray[np.float32]]:
    given = set(datum.loss_inputs) - {"target_tokens"}
    if missing := sorted(spec.needs - given):
        raise BadRequest(f"{where} has no {', '.join(missing)}, which this loss needs")
    if unknown := sorted(given - spec.needs - spec.takes):
        raise BadRequest(f"{where} has {', '.join(unknown)[:200]}, which this loss does not take")
    inputs: dict[str, NDArray[np.float32]] = {}
    for name in sorted(given):
        values = datum.loss_inputs[name].astype(np.float32)
        if values.shape != shape:
            raise BadRequest(f"{where}.{name} has the shape {values.shape}, target_tokens has {shape}")
        if not np.isfinite(values).all():
            raise BadRequest(f"{where}.{name} holds a value that is not finite")
        inputs[name] = values
    return inputs


def _feature(
    where: str, tokens: NDArray[np.int64], targets: NDArray[np.int64], inputs: Mapping[str, NDArray[np.float32]], spec: LossSpec | None
) -> InputFeature:
    # Position n of the protocol predicts from tokens 0..n: it is token n + 1 of a row that has one token more.
    def shifted(values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([np.zeros(1, values.dtype), values])

    row: dict[str, Any] = {"input_ids": np.concatenate([tokens, targets[-1:]])}
    if not np.array_equal(tokens[1:], targets[:-1]):
        row["targets"] = shifted(targets)
    if spec is not None:
        weights = inputs.get("weights", np.ones(len(targets), np.float32)) if spec.name == "reinforce" else inputs["advantages"]
        row["advantages"] = shifted(weights)
        if "logprobs" in inputs:
            row["logprobs"] = shifted(inputs["logprobs"])
        counted = np.ones(len(targets), np.bool_)
        if spec.name == "gspo":
            counted = inputs["sequence_ratio_mask"] != 0 if "sequence_ratio_mask" in inputs else counted
        elif spec.name != "dro":
            # What weighs nothing adds nothing to these losses, and prompts would spoil the metrics.
            counted = weights != 0
        row["completion_mask"] = shifted(counted)
    try:
        return InputFeature(**row)
    except FormatError as error:
        raise BadRequest(f"{where}: {error}") from error


def metrics_of(output: ModelOutput) -> dict[str, float]:
    """A result's metrics under the protocol's names, which tell how those of several requests are reduced."""
    total = 0.0 if output.loss is None or not output.loss_weight else output.loss * output.loss_weight
    named = {f"{name}:{'max' if name in _MAX_METRICS else 'mean'}": value for name, value in output.metrics.items() if np.isfinite(value)}
    return {"loss:sum": total, **named}
