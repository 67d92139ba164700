"""From whatever is sampled from to prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from twinkle_data import DataError, InputFeature, Template, Trajectory

from ._errors import PromptError

SamplerInput = InputFeature | Trajectory | Mapping[str, Any] | Sequence[int] | Sequence[Mapping[str, Any]] | str


def check_batch(inputs: Sequence[SamplerInput]) -> None:
    """PromptError unless the inputs are a list (or tuple) of prompts."""
    if isinstance(inputs, (str, InputFeature, Trajectory, Mapping)) or not isinstance(inputs, Sequence):
        raise PromptError(f"inputs must be a list of prompts, not one {type(inputs).__name__}: put it into a list")


def as_prompt(item: Any, index: int, template: Template | None, max_model_len: int) -> InputFeature:
    """The prompt that an input stands for, with position ids.

    A feature is taken as it is; a trajectory, or its messages (a list of mappings with `role` and `content`), is encoded with a generation prompt; a
    text is tokenised as it stands, with the tokenizer's own beginning-of-text token; a list of ints is token ids already. PromptError names the
    index of one that cannot be used, or that leaves no room for one more token.
    """
    prompt = _as_prompt(item, index, template)
    if prompt.position_ids is None:
        prompt = replace(prompt, position_ids=np.arange(len(prompt)))
    if len(prompt) >= max_model_len:
        raise PromptError(
            f"inputs[{index}] has {len(prompt)} tokens and max_model_len is {max_model_len}, which must hold at least one more: shorten it or "
            "raise engine_args['max_model_len']"
        )
    return prompt


def check_turn(prompt: InputFeature, index: int, *, logprobs: bool, temperature: float) -> None:
    """PromptError, before anything is sampled, for a feature whose earlier turns cannot be continued: it has one temperature for all.

    temperature: of the log-probabilities that the new turn will carry (0 counts as 1).
    """
    temperature = temperature or 1.0
    if prompt.logprobs is None:
        return
    if not logprobs:
        raise PromptError(f"inputs[{index}] holds log-probabilities of earlier turns, so this one needs them too: leave logprobs=True")
    if prompt.temperature != temperature:
        raise PromptError(
            f"inputs[{index}] was sampled at temperature {prompt.temperature:g} before, and would be at {temperature:g} now; a feature has one"
        )


def _as_prompt(item: Any, index: int, template: Template | None) -> InputFeature:
    if isinstance(item, InputFeature):
        return item
    if isinstance(item, Mapping) and "messages" in item:
        item = _trajectory(item, index)
    elif isinstance(item, Sequence) and len(item) and all(isinstance(message, Mapping) for message in item):
        item = _trajectory({"messages": item}, index)
    if isinstance(item, (str, Trajectory)):
        if template is None:
            raise PromptError(
                f"inputs[{index}] is a {type(item).__name__} but the sampler has no tokenizer: the model's folder holds none; "
                "call set_template(Template(tokenizer))"
            )
        try:
            return (
                template.encode(item, add_generation_prompt=True) if isinstance(item, Trajectory) else _feature(template.tokenizer(item)["input_ids"])
            )
        except DataError as error:
            raise PromptError(f"inputs[{index}]: {error}") from error
    if isinstance(item, (Sequence, np.ndarray)) and len(item) and all(isinstance(token, (int, np.integer)) for token in item):
        if min(item) < 0:
            raise PromptError(f"inputs[{index}] holds the negative token id {min(item)}")
        if max(item) >= 2**31:
            raise PromptError(f"inputs[{index}] holds the token id {max(item)}, which no vocabulary has")
        return _feature(item)
    raise PromptError(
        f"inputs[{index}] is {_describe(item)}; a prompt is an InputFeature, a Trajectory, messages, a text or a non-empty list of token ids"
    )


def _trajectory(row: Mapping[str, Any], index: int) -> Trajectory:
    try:
        return Trajectory(**row)
    except (DataError, TypeError) as error:
        raise PromptError(f"inputs[{index}]: {error}") from error


def _feature(tokens: Any) -> InputFeature:
    """A prompt: none of its tokens is trained on."""
    size = len(tokens)
    return InputFeature(input_ids=np.asarray(tokens, np.int64), labels=np.full(size, -100), completion_mask=np.zeros(size, np.bool_))


def _describe(item: Any) -> str:
    return f"an empty {type(item).__name__}" if isinstance(item, Sequence) and not item else f"a {type(item).__name__}"
