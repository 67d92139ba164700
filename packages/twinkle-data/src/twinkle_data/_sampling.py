"""What a sampler takes and returns, and what a trainer returns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._checks import is_number, is_whole
from ._errors import FormatError
from ._formats import IGNORE_INDEX, InputFeature, StopReason


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample. A sampler refuses what it cannot honour; it drops nothing.

    Args:
        max_tokens: the most tokens of a completion; None: what the model's context leaves.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this, in (0, 1].
        top_k: keep the k most likely tokens; -1 keeps all.
        min_p: drop tokens less likely than this times the most likely one, in [0, 1].
        seed: makes a request reproducible.
        stop: texts that end a completion (a single string is taken as one text, however many tokens it has).
        stop_token_ids: tokens that end a completion, besides the model's own end token.
        num_samples: completions for each prompt.
        logprobs: return the log-probability of every sampled token.

    Raises:
        FormatError: a value out of range, or of another type.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    num_samples: int = 1
    logprobs: bool = True

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str) and name == "stop":
                value = (value,)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise FormatError(f"SamplingParams.{name} is {value!r}; it must be a list, () for none")
            object.__setattr__(self, name, tuple(value))
        checks = {
            "max_tokens": (self.max_tokens is None or (is_whole(self.max_tokens) and self.max_tokens >= 1), "None or a whole number, at least 1"),
            "temperature": (is_number(self.temperature) and self.temperature >= 0, "a finite number, at least 0"),
            "top_p": (is_number(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (is_whole(self.top_k) and (self.top_k == -1 or self.top_k >= 1), "-1 (all) or a whole number, at least 1"),
            "min_p": (is_number(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]"),
            "seed": (self.seed is None or is_whole(self.seed), "None or a whole number"),
            "stop": (all(isinstance(text, str) and text for text in self.stop), "non-empty strings"),
            "stop_token_ids": (all(map(is_whole, self.stop_token_ids)), "whole numbers"),
            "num_samples": (is_whole(self.num_samples) and self.num_samples >= 1, "a whole number, at least 1"),
        }
        for name, (holds, rule) in checks.items():
            if not holds:
                raise FormatError(f"SamplingParams.{name} is {getattr(self, name)!r}; it must be {rule}")
        for name in ("temperature", "top_p", "min_p"):  # plain numbers, of numpy's too
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, self.stop_token_ids)))


@dataclass(frozen=True, kw_only=True)
class SampledSequence:
    """One completion.

    Args:
        tokens: the sampled token ids, the end token included when it was sampled.
        logprobs: the log-probability of each at the sampling temperature; empty when not asked for.
        stop_reason: 'stop' (an end token or a stop text) or 'length'.
        decoded: the text of `tokens` without special tokens.
        new_input_feature: prompt and completion as one feature, ready to train on or to sample from again (see `append_sample`).

    Raises:
        FormatError: as many log-probabilities as tokens are needed, or none.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    decoded: str
    new_input_feature: InputFeature

    def __post_init__(self) -> None:
        if wrong := [token for token in self.tokens if not is_whole(token)]:
            raise FormatError(f"SampledSequence.tokens holds {wrong[0]!r}; tokens are whole numbers")
        if self.logprobs and len(self.logprobs) != len(self.tokens):
            raise FormatError(f"SampledSequence has {len(self.tokens)} tokens but {len(self.logprobs)} logprobs")
        if self.stop_reason not in ("stop", "length"):
            raise FormatError(f"SampledSequence.stop_reason is {self.stop_reason!r}; it must be 'stop' or 'length'")


@dataclass(frozen=True, kw_only=True)
class SampleResponse:
    """Everything that was sampled for one prompt: `num_samples` sequences, the prompt's tokens and its `user_data`."""

    sequences: list[SampledSequence]
    prompt_token_ids: list[int]
    user_data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """What a trainer returns for a batch.

    Args:
        loss: the weighted mean over all ranks; None when no loss was asked for.
        loss_weight: the weight that the mean was divided by.
        logprobs: for each sequence float32 `[T]`, aligned with its `input_ids` (index 0 is 0).
        entropy: the same of the predictive distribution's entropy, in nats.
        metrics: plain numbers, reduced over all ranks.
    """

    loss: float | None = None
    loss_weight: float = 0.0
    logprobs: list[NDArray[np.float32]] | None = None
    entropy: list[NDArray[np.float32]] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def append_sample(
    prompt: InputFeature,
    tokens: Sequence[int],
    logprobs: ArrayLike | None = None,
    *,
    temperature: float = 1.0,
    weight_version: int | None = None,
) -> InputFeature:
    """The prompt with a completion appended, token for token: nothing is decoded and tokenised again.

    The sampled tokens are labelled, marked in `completion_mask`, and carry their log-probabilities; a prompt that holds earlier sampled
    turns keeps theirs. `advantages` and `ref_logprobs` of the prompt are dropped: they are not known for the new tokens.

    Args:
        prompt: what was sampled from.
        tokens: the sampled token ids, S of them.
        logprobs: `[S]`, at `temperature`; None when the sampler returned none.
        temperature: of sampling. 0 (greedy) is stored as 1: the log-probabilities of greedy tokens are those of the undivided logits.
        weight_version: of the weights that sampled. A feature with several sampled turns keeps the oldest.

    Raises:
        FormatError: no token; log-probabilities of another length; a temperature that differs from that of earlier sampled turns.
    """
    completion = _tokens("append_sample", tokens)
    if completion.ndim != 1 or completion.size == 0:
        raise FormatError("append_sample needs at least one sampled token")
    size = len(completion)
    temperature = 1.0 if temperature == 0 else float(temperature)
    sampled_before = prompt.logprobs is not None
    if sampled_before and logprobs is None:
        raise FormatError("the prompt holds log-probabilities of earlier sampled turns, this completion comes without any")
    if sampled_before and prompt.temperature != temperature:
        raise FormatError(f"earlier turns were sampled at temperature {prompt.temperature}, this one at {temperature}; a feature has one")
    all_logprobs = None
    if logprobs is not None:
        new = np.asarray(logprobs, dtype=np.float32)
        if new.shape != (size,):
            raise FormatError(f"{size} sampled tokens but logprobs of shape {new.shape}")
        before = prompt.logprobs if prompt.logprobs is not None else np.zeros(len(prompt), np.float32)
        all_logprobs = np.concatenate([before, new])
    versions = [v for v in (prompt.weight_version, weight_version) if v is not None]
    labels = _labels(prompt)
    mask = prompt.completion_mask if prompt.completion_mask is not None else np.zeros(len(prompt), np.bool_)
    return InputFeature(
        input_ids=np.concatenate([prompt.input_ids, completion]),
        labels=np.concatenate([labels, completion]),
        position_ids=_continue_positions(prompt, size),
        completion_mask=np.concatenate([mask, np.ones(size, np.bool_)]),
        loss_weights=None if prompt.loss_weights is None else np.concatenate([prompt.loss_weights, np.ones(size, np.float32)]),
        logprobs=all_logprobs,
        temperature=temperature,
        weight_version=min(versions) if versions else None,
        user_data=dict(prompt.user_data),
    )


def append_context(feature: InputFeature, tokens: Sequence[int]) -> InputFeature:
    """The feature with tokens appended that nobody samples or trains on: a tool's answer, the next user turn.

    Labels are -100, the completion mask is false, log-probabilities and loss weights are 0 there. `advantages` and `ref_logprobs` are dropped.

    Raises:
        FormatError: tokens that are not a flat list of integers.
    """
    context = _tokens("append_context", tokens)
    if context.ndim != 1:
        raise FormatError(f"append_context needs a flat list of tokens, not an array of shape {context.shape}")
    size = len(context)
    zeros = np.zeros(size, np.float32)
    labels = _labels(feature)
    mask = feature.completion_mask if feature.completion_mask is not None else np.zeros(len(feature), np.bool_)
    return InputFeature(
        input_ids=np.concatenate([feature.input_ids, context]),
        labels=np.concatenate([labels, np.full(size, IGNORE_INDEX, np.int64)]),
        position_ids=_continue_positions(feature, size),
        completion_mask=np.concatenate([mask, np.zeros(size, np.bool_)]),
        loss_weights=None if feature.loss_weights is None else np.concatenate([feature.loss_weights, zeros]),
        logprobs=None if feature.logprobs is None else np.concatenate([feature.logprobs, zeros]),
        temperature=feature.temperature,
        weight_version=feature.weight_version,
        user_data=dict(feature.user_data),
    )


def _tokens(what: str, tokens: Any) -> NDArray[np.int64]:
    try:
        array = np.asarray(tokens)
    except ValueError as error:
        raise FormatError(f"{what} needs a flat list of tokens: {error}") from None
    if array.size and array.dtype.kind not in "iu":
        raise FormatError(f"{what} needs whole numbers as tokens, not {array.dtype}")
    return array.astype(np.int64)


def _labels(feature: InputFeature) -> NDArray[np.int64]:
    """The labels, or those that the completion mask stands for; a feature without either is a prompt, of which nothing is trained on."""
    if feature.labels is not None:
        return feature.labels
    nothing = np.full(len(feature), IGNORE_INDEX, np.int64)
    return nothing if feature.completion_mask is None else np.where(feature.completion_mask, feature.input_ids, nothing)


def _continue_positions(feature: InputFeature, size: int) -> NDArray[np.int64] | None:
    if feature.position_ids is None:
        return None
    # Text that follows an image begins, on every axis, after the largest position of any.
    last = feature.position_ids[-1] if feature.position_ids.ndim == 1 else feature.position_ids.max()
    new = np.broadcast_to(last + 1 + np.arange(size), (*feature.position_ids.shape[:-1], size))
    return np.concatenate([feature.position_ids, new], axis=-1)
