"""What a sampler takes and returns, and what a trainer returns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._checks import is_count, is_number, is_whole
from ._errors import FormatError
from ._formats import IGNORE_INDEX, InputFeature, StopReason

_NOT_SAMPLED = -1  # among weight versions
_STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")


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
        top_logprobs: and of the k most likely tokens at its place.
        prompt_logprobs: and of every token of the prompt.
        min_tokens: no end token before so many tokens.
        logit_bias: token id to what is added to its logit.
        structured_output: completions have this form: exactly one of `json` (a schema), `json_object` (True), `regex`, `choice` (texts) and
            `grammar`.

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
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    structured_output: Mapping[str, Any] | None = None

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
            "logprobs": (isinstance(self.logprobs, bool), "True or False"),
            "top_logprobs": (
                is_count(self.top_logprobs) and (self.logprobs or not self.top_logprobs),
                "a whole number from 0 on, 0 without logprobs",
            ),
            "prompt_logprobs": (isinstance(self.prompt_logprobs, bool), "True or False"),
            "min_tokens": (
                is_count(self.min_tokens) and (not isinstance(self.max_tokens, int) or self.min_tokens <= self.max_tokens),
                "a whole number from 0 to max_tokens",
            ),
            "logit_bias": (_is_bias(self.logit_bias), "a mapping of token ids to finite numbers"),
            "structured_output": (
                self.structured_output is None or _is_structure(self.structured_output),
                f"None or a mapping with one of {_STRUCTURES}",
            ),
        }
        for name, (holds, rule) in checks.items():
            if not holds:
                raise FormatError(f"SamplingParams.{name} is {getattr(self, name)!r}; it must be {rule}")
        for name in ("temperature", "top_p", "min_p"):  # plain numbers, of numpy's too
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, self.stop_token_ids)))
        object.__setattr__(self, "logit_bias", {int(token): float(bias) for token, bias in self.logit_bias.items()})

    @property
    def changes_distribution(self) -> list[str]:
        """The options, of those set, that make completions come from another distribution than softmax(logits / temperature)."""
        off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0} if self.temperature > 0 else {}
        off |= {"min_tokens": 0, "logit_bias": {}, "structured_output": None}
        return [name for name, value in off.items() if getattr(self, name) != value]


@dataclass(frozen=True, kw_only=True)
class SampledSequence:
    """One completion.

    Args:
        tokens: the sampled token ids, the end token included when it was sampled.
        logprobs: the log-probability of each at the sampling temperature; empty when not asked for.
        stop_reason: 'stop' (an end token or a stop text), 'length', or 'abort': the request was ended from outside, and can be sampled on from
            `new_input_feature`.
        decoded: the text of `tokens` without special tokens.
        new_input_feature: prompt and completion as one feature, ready to train on or to sample from again (see `append_sample`).
            Without any token it is the prompt.
        top_logprobs: for each token the most likely ones at its place and their log-probabilities, most likely first; empty when not asked for.
        weight_versions: the version of the weights that sampled each token; empty when the sampler does not tell.

    Raises:
        FormatError: as many log-probabilities as tokens are needed, or none.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    decoded: str
    new_input_feature: InputFeature
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if wrong := [token for token in self.tokens if not is_whole(token)]:
            raise FormatError(f"SampledSequence.tokens holds {wrong[0]!r}; tokens are whole numbers")
        for name in ("logprobs", "top_logprobs", "weight_versions"):
            if (value := getattr(self, name)) and len(value) != len(self.tokens):
                raise FormatError(f"SampledSequence has {len(self.tokens)} tokens but {len(value)} {name}")
        if self.stop_reason not in ("stop", "length", "abort"):
            raise FormatError(f"SampledSequence.stop_reason is {self.stop_reason!r}; it must be 'stop', 'length' or 'abort'")


@dataclass(frozen=True, kw_only=True)
class SampleResponse:
    """Everything that was sampled for one prompt, or why nothing was.

    Args:
        sequences: `num_samples` of them; none with an error.
        prompt_token_ids: the prompt's tokens; none where an error came before they were known.
        user_data: of the prompt.
        error: what was wrong with this request. The others of its batch were served.
        prompt_logprobs: the log-probability of each token of the prompt (index 0 is 0); empty when not asked for.

    Raises:
        FormatError: sequences beside an error.
    """

    sequences: list[SampledSequence]
    prompt_token_ids: list[int]
    user_data: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    prompt_logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.error is not None and self.sequences:
            raise FormatError(f"SampleResponse has {len(self.sequences)} sequences and an error: {self.error}")

    def raise_for_error(self) -> "SampleResponse":
        """The response itself, or its error raised: `responses = [response.raise_for_error() for response in responses]`."""
        if self.error is not None:
            raise self.error
        return self


@dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """What a trainer returns for a batch.

    Args:
        loss: the weighted mean over all ranks; None when no loss was asked for.
        loss_weight: the weight that the mean was divided by.
        logprobs: for each sequence float32 `[T]`, aligned with its `input_ids` (index 0 is 0).
        entropy: the same of the predictive distribution's entropy, in nats.
        router_logits: for each sequence float32 `[T, layers, experts]`, of its own tokens; None unless the trainer was asked to keep them.
        top_tokens, top_logprobs: for each sequence int32 and float32 `[T, k]`, the likeliest tokens **after** each of its tokens, likeliest
            first, and their log-probabilities at the row's temperature; None unless `forward_only` was asked for them.
        logits: for each sequence float32 `[T, vocabulary]`, what the model gives after each token, not divided by the temperature; None
            unless `forward_only` was asked for them.
        metrics: plain numbers, reduced over all ranks.
    """

    loss: float | None = None
    loss_weight: float = 0.0
    logprobs: list[NDArray[np.float32]] | None = None
    entropy: list[NDArray[np.float32]] | None = None
    router_logits: list[NDArray[np.float32]] | None = None
    top_tokens: list[NDArray[np.int32]] | None = None
    top_logprobs: list[NDArray[np.float32]] | None = None
    logits: list[NDArray[np.float32]] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def append_sample(
    prompt: InputFeature,
    tokens: Sequence[int],
    logprobs: ArrayLike | None = None,
    *,
    temperature: float = 1.0,
    weight_version: int | Sequence[int] | None = None,
) -> InputFeature:
    """The prompt with a completion appended, token for token: nothing is decoded and tokenised again.

    The sampled tokens are labelled, marked in `completion_mask`, and carry their log-probabilities; a prompt that holds earlier sampled
    turns keeps theirs. `advantages` and `ref_logprobs` of the prompt are dropped: they are not known for the new tokens.

    Args:
        prompt: what was sampled from.
        tokens: the sampled token ids, S of them.
        logprobs: `[S]`, at `temperature`; None when the sampler returned none.
        temperature: of sampling. 0 (greedy) is stored as 1: the log-probabilities of greedy tokens are those of the undivided logits.
        weight_version: of the weights that sampled, one number or one a token: `weight_versions` of the feature has them, `weight_version` the
            oldest.

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
    versions = _versions(prompt, size, weight_version)
    labels = _labels(prompt)
    mask = prompt.completion_mask if prompt.completion_mask is not None else np.zeros(len(prompt), np.bool_)
    return InputFeature(
        input_ids=np.concatenate([prompt.input_ids, completion]),
        labels=np.concatenate([labels, completion]),
        targets=None if prompt.targets is None else np.concatenate([prompt.targets, completion]),
        position_ids=_continue_positions(prompt, size),
        completion_mask=np.concatenate([mask, np.ones(size, np.bool_)]),
        loss_weights=None if prompt.loss_weights is None else np.concatenate([prompt.loss_weights, np.ones(size, np.float32)]),
        logprobs=all_logprobs,
        temperature=temperature,
        weight_version=_oldest(prompt.weight_version, versions),
        weight_versions=versions,
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
        targets=None if feature.targets is None else np.concatenate([feature.targets, context]),
        position_ids=_continue_positions(feature, size),
        completion_mask=np.concatenate([mask, np.zeros(size, np.bool_)]),
        loss_weights=None if feature.loss_weights is None else np.concatenate([feature.loss_weights, zeros]),
        logprobs=None if feature.logprobs is None else np.concatenate([feature.logprobs, zeros]),
        temperature=feature.temperature,
        weight_version=feature.weight_version,
        weight_versions=None if feature.weight_versions is None else np.concatenate([feature.weight_versions, np.full(size, _NOT_SAMPLED)]),
        user_data=dict(feature.user_data),
    )


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(is_count(token) and is_number(bias) for token, bias in value.items())


def _is_structure(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in _STRUCTURES


def _versions(prompt: InputFeature, size: int, given: int | Sequence[int] | None) -> NDArray[np.int64] | None:
    """The versions of a prompt's tokens and of `size` sampled ones; None where nobody has told any."""
    if given is None and prompt.weight_versions is None:
        return None
    new = np.asarray(_NOT_SAMPLED if given is None else given, np.int64)
    if new.shape not in ((), (size,)):
        raise FormatError(f"{size} sampled tokens but weight versions of shape {new.shape}")
    before = prompt.weight_versions
    if before is None:
        mask = prompt.completion_mask if prompt.completion_mask is not None else np.zeros(len(prompt), np.bool_)
        before = np.where(mask, _NOT_SAMPLED if prompt.weight_version is None else prompt.weight_version, _NOT_SAMPLED)
    return np.concatenate([before, np.broadcast_to(new, size)])


def _oldest(earlier: int | None, versions: NDArray[np.int64] | None) -> int | None:
    known = [] if versions is None else versions[versions != _NOT_SAMPLED].tolist()
    if earlier is not None:
        known.append(earlier)
    return min(known) if known else None


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
