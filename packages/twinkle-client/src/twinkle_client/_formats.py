"""The records that travel between datasets, samplers and trainers, as the service's wire has them.

Twins of the records of twinkle-data and twinkle-train: the same names, fields and defaults, with lists for arrays, as pydantic dataclasses. So
`dataclasses.replace(feature, advantages=1.0)` works on either, and checks. Unknown fields are errors. Arrays of numpy, torch and their like
(anything with `tolist()`) are taken where numbers are.

Shape suffix: T tokens of a sequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, Protocol, cast, runtime_checkable

from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat, StrictBool, StrictInt
from pydantic.dataclasses import dataclass

from ._errors import RequestFailed

IGNORE_INDEX = -100
"""The label of a token that is not trained on."""

StopReason = Literal["stop", "length", "abort"]

# NaN and infinity are no JSON: on the wire they are the texts "NaN", "Infinity" and "-Infinity", which pydantic reads back.
RECORD = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


def as_list(value: Any) -> Any:
    """An array (anything with `tolist()`) as nested lists; everything else as it is."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _as_texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Tokens = Annotated[list[StrictInt], BeforeValidator(as_list)]
Numbers = Annotated[list[FiniteFloat], BeforeValidator(as_list)]
Flags = Annotated[list[bool], BeforeValidator(as_list)]
Whole = Annotated[StrictInt, BeforeValidator(as_list)]
Number = Annotated[FiniteFloat, BeforeValidator(as_list)]


@dataclass(frozen=True, kw_only=True, config=RECORD)
class ToolCall:
    """A call that the assistant makes.

    name: of the function. arguments: a mapping, or its JSON text. id: by which the tool's answer refers to the call.
    """

    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, Any] | str = field(default_factory=dict[str, Any])
    id: str | None = None


def _as_tool_call(value: Any) -> Any:
    """OpenAI's form, `{"id", "type", "function": {"name", "arguments"}}`, as ours."""
    if not isinstance(value, Mapping) or "function" not in value:
        return cast("Any", value)
    call = cast("Mapping[str, Any]", value)
    if not isinstance(call["function"], Mapping):
        return call
    function = cast("Mapping[str, Any]", call["function"])
    return {"id": call.get("id"), **function}


@dataclass(frozen=True, kw_only=True, config=RECORD)
class Message:
    """One turn of a conversation.

    role: 'system', 'user', 'assistant', 'tool', or another that the chat template knows. content: the text, without the template's markers.
    loss: whether the turn is trained on; None: assistant turns are. loss_weight: a factor for the loss of each of the turn's tokens.
    reasoning_content: what the assistant thought before it answered. tool_calls: also in OpenAI's form. tool_call_id: of a tool's answer: the call
    that it answers. name: of the speaker, or of the tool that answers.
    """

    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str, BeforeValidator(lambda value: "" if value is None else value)] = ""
    loss: StrictBool | None = None
    loss_weight: Annotated[Number, Field(ge=0)] = 1.0
    reasoning_content: str | None = None
    tool_calls: tuple[Annotated[ToolCall, BeforeValidator(_as_tool_call)], ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True, config=RECORD)
class Trajectory:
    """A conversation, and whatever the user wants to carry along with it.

    messages: at least one. user_data: travels untouched into features and samples (an answer to compare with, say); plain JSON. tools: the
    functions that the assistant may call, as JSON schemas in OpenAI's form.
    """

    messages: Annotated[tuple[Message, ...], Field(min_length=1)]
    user_data: dict[str, Any] = field(default_factory=dict[str, Any])
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True, config=RECORD)
class InputFeature:
    """One tokenised sequence. Every list is [T] and aligned with `input_ids`: entry t speaks of token t.

    input_ids: [T], T >= 1, none negative. labels: [T], `input_ids[t]` where token t is trained on, -100 elsewhere; None: `completion_mask`
    decides, and without one every token is trained on. targets: [T], the tokens whose log-probabilities are asked for, where they are not
    `input_ids`. position_ids: [T], or [A][T] for A axes. completion_mask: [T], the token was sampled or
    written by the assistant. loss_weights: [T], a factor for each token's loss. logprobs: [T], natural log-probabilities under the policy that
    sampled; 0 where not sampled. ref_logprobs: [T], under a reference policy. advantages: a number for the whole completion, or [T].
    temperature: of `logprobs`, above 0. weight_version: of the weights that sampled; the oldest where several did. weight_versions: [T], -1
    where not sampled. user_data: travels along.
    """

    input_ids: Annotated[list[Annotated[StrictInt, Field(ge=0)]], BeforeValidator(as_list), Field(min_length=1)]
    labels: Tokens | None = None
    targets: Annotated[list[Annotated[StrictInt, Field(ge=0)]], BeforeValidator(as_list)] | None = None
    position_ids: Annotated[list[StrictInt] | list[list[StrictInt]], BeforeValidator(as_list)] | None = None
    completion_mask: Flags | None = None
    loss_weights: Numbers | None = None
    logprobs: Numbers | None = None
    ref_logprobs: Numbers | None = None
    advantages: Annotated[FiniteFloat | list[FiniteFloat], BeforeValidator(as_list)] | None = None
    temperature: Annotated[Number, Field(gt=0)] = 1.0
    weight_version: Whole | None = None
    weight_versions: Tokens | None = None
    user_data: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        length = len(self.input_ids)
        for name in (
            "labels",
            "targets",
            "completion_mask",
            "loss_weights",
            "logprobs",
            "ref_logprobs",
            "advantages",
            "weight_versions",
            "position_ids",
        ):
            value = getattr(self, name)
            if not isinstance(value, list):
                continue
            rows = cast("list[Any]", value)
            for row in rows if rows and isinstance(rows[0], list) else [rows]:
                if len(row) != length:
                    raise ValueError(f"InputFeature.{name} has {len(row)} entries, input_ids has {length}: they are aligned token by token")

    def __len__(self) -> int:
        """The number of tokens T."""
        return len(self.input_ids)


@dataclass(frozen=True, kw_only=True, config=RECORD)
class PackedFeature:
    """One row of several sequences, which do not see one another."""

    features: Annotated[tuple[InputFeature, ...], Field(min_length=1)]

    def __len__(self) -> int:
        """The number of tokens of all sequences together."""
        return sum(map(len, self.features))


@dataclass(frozen=True, kw_only=True, config=RECORD)
class SamplingParams:
    """How to sample. A sampler refuses what it cannot honour; it drops nothing.

    max_tokens: the most tokens of a completion; None: what the model's context leaves. temperature: 0 is greedy. top_p: in (0, 1]. top_k: -1
    keeps all. min_p: in [0, 1]. seed: makes a request reproducible. stop: texts that end a completion. stop_token_ids: tokens that do.
    num_samples: completions for each prompt. logprobs: return those of every sampled token. top_logprobs: and of the k most likely ones at its
    place. prompt_logprobs: and of every token of the prompt. min_tokens: no end token before so many. logit_bias: token id to what is added to
    its logit. structured_output: exactly one of json (a schema), json_object (True), regex, choice (texts) and grammar.
    """

    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[StrictInt, Field(ge=-1)] = -1
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    seed: StrictInt | None = None
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_texts)] = ()
    stop_token_ids: tuple[StrictInt, ...] = ()
    num_samples: Annotated[StrictInt, Field(ge=1)] = 1
    logprobs: StrictBool = True
    top_logprobs: Annotated[StrictInt, Field(ge=0)] = 0
    prompt_logprobs: StrictBool = False
    min_tokens: Annotated[StrictInt, Field(ge=0)] = 0
    logit_bias: dict[int, FiniteFloat] = field(default_factory=dict[int, float])
    structured_output: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.top_k == 0:
            raise ValueError("SamplingParams.top_k is 0; it must be -1 (all) or at least 1")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("SamplingParams.top_logprobs needs logprobs=True")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"SamplingParams.min_tokens is {self.min_tokens}, max_tokens {self.max_tokens}")


@dataclass(frozen=True, kw_only=True, config=RECORD)
class SampledSequence:
    """One completion.

    tokens: the sampled ids, the end token included when it was sampled. logprobs: of each, at the sampling temperature; empty when not asked for.
    stop_reason: 'stop', 'length' or 'abort'. decoded: the text of `tokens` without special tokens. new_input_feature: prompt and completion as one
    feature, ready to train on or to sample from again. top_logprobs: for each token the most likely ones at its place, most likely first.
    weight_versions: of the weights that sampled each token; empty when the sampler does not tell.
    """

    tokens: Tokens
    logprobs: Annotated[list[float], BeforeValidator(as_list)]
    stop_reason: StopReason
    decoded: str
    new_input_feature: InputFeature
    top_logprobs: list[dict[int, float]] = field(default_factory=list[dict[int, float]])
    weight_versions: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, kw_only=True, config=RECORD)
class SampleError:
    """Why a prompt was not served: the name of the sampler's error, and its message."""

    type: str
    message: str


def _as_sample_error(value: Any) -> Any:
    return {"type": type(value).__name__, "message": str(value)} if isinstance(value, Exception) else value


@dataclass(frozen=True, kw_only=True, config=RECORD)
class SampleResponse:
    """Everything that was sampled for one prompt, or why nothing was.

    sequences: `num_samples` of them; none with an error. prompt_token_ids: the prompt's tokens. user_data: of the prompt. error: what was wrong with
    this request (the original's is an exception); the others of its batch were served. prompt_logprobs: of each token of the prompt; empty when not
    asked for.
    """

    sequences: list[SampledSequence]
    prompt_token_ids: list[int]
    user_data: dict[str, Any] = field(default_factory=dict[str, Any])
    error: Annotated[SampleError | None, BeforeValidator(_as_sample_error)] = None
    prompt_logprobs: list[float] = field(default_factory=list[float])

    def raise_for_error(self) -> SampleResponse:
        """The response itself, or `RequestFailed` for its error: `responses = [response.raise_for_error() for response in responses]`."""
        if self.error is not None:
            raise RequestFailed(f"{self.error.type}: {self.error.message}")
        return self


@dataclass(frozen=True, kw_only=True, config=RECORD)
class ModelOutput:
    """What a trainer returns for a batch.

    loss: the weighted mean over all ranks; None when no loss was asked for. loss_weight: what the mean was divided by. logprobs: for each sequence
    [T], aligned with its `input_ids` (index 0 is 0). entropy: the same of the predictive distribution's entropy, in nats. router_logits: for each
    sequence [T][layers][experts]; None unless the trainer was asked to keep them. top_tokens, top_logprobs, logits: for each sequence [T][k] and
    [T][vocabulary], of what follows each token; None unless asked for. metrics: plain numbers.
    """

    loss: float | None = None
    loss_weight: float = 0.0
    logprobs: list[Annotated[list[float], BeforeValidator(as_list)]] | None = None
    entropy: list[Annotated[list[float], BeforeValidator(as_list)]] | None = None
    router_logits: list[Annotated[list[list[list[float]]], BeforeValidator(as_list)]] | None = None
    top_tokens: list[Annotated[list[list[int]], BeforeValidator(as_list)]] | None = None
    top_logprobs: list[Annotated[list[list[float]], BeforeValidator(as_list)]] | None = None
    logits: list[Annotated[list[list[float]], BeforeValidator(as_list)]] | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])


@runtime_checkable
class HasToDict(Protocol):
    """Anything with `to_dict()`, such as peft.LoraConfig."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        ...


def _as_modules(value: Any) -> Any:
    if isinstance(value, str):
        if value != "all-linear":
            raise ValueError(f"target_modules is 'all-linear' or a list of module names, got the text {value!r} (patterns are not supported)")
        return value
    return tuple(sorted(value)) if isinstance(value, Iterable) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


@dataclass(frozen=True, kw_only=True, config=RECORD)
class LoraConfig:
    """A low-rank adapter (LoRA, arXiv:2106.09685) on linear layers; the fields that every engine supports, named as in peft.

    r: rank. lora_alpha: scale; the update is multiplied by lora_alpha / r, or by lora_alpha / sqrt(r) with use_rslora. target_modules:
    'all-linear', or the last parts of module names ('q_proj', 'gate_proj', ...). lora_dropout: on the adapter's input, in training.
    """

    r: Annotated[StrictInt, Field(ge=1)] = 8
    lora_alpha: Annotated[Number, Field(gt=0)] = 8
    target_modules: Annotated[Annotated[tuple[str, ...], Field(min_length=1)] | str, BeforeValidator(_as_modules)] = "all-linear"
    lora_dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    use_rslora: StrictBool = False

    @property
    def scaling(self) -> float:
        """What the product of the two low-rank matrices is multiplied by."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
