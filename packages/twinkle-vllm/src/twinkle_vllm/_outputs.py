"""From vLLM's outputs to `SampleResponse`s."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from twinkle_data import InputFeature, SampledSequence, SampleResponse, SamplingParams, Template, append_sample

from ._errors import SamplerError

if TYPE_CHECKING:
    from vllm import RequestOutput


def as_responses(
    outputs: "Sequence[RequestOutput]",
    prompts: Sequence[InputFeature],
    params: SamplingParams,
    template: Template | None,
    *,
    logprob_temperature: float,
    weight_version: int,
) -> list[SampleResponse]:
    """One response for each prompt. All completions are decoded in one call of the tokenizer."""
    tokens = [list(completion.token_ids) for output in outputs for completion in output.outputs]
    texts = iter(_decode(tokens, template))
    responses: list[SampleResponse] = []
    for output, prompt in zip(outputs, prompts, strict=True):
        sequences: list[SampledSequence] = []
        for completion in output.outputs:
            ids = list(completion.token_ids)
            logprobs = cast(Any, completion.logprobs).logprobs if params.logprobs else None
            feature = append_sample(prompt, ids, logprobs, temperature=logprob_temperature, weight_version=weight_version)
            if completion.finish_reason not in ("stop", "length"):
                raise SamplerError(f"vLLM ended a completion with {completion.finish_reason!r}; expected 'stop' or 'length'")
            sequences.append(
                SampledSequence(
                    tokens=ids,
                    logprobs=list(logprobs or ()),
                    stop_reason=completion.finish_reason,
                    decoded=next(texts),
                    new_input_feature=feature,
                )
            )
        responses.append(SampleResponse(sequences=sequences, prompt_token_ids=prompt.input_ids.tolist(), user_data=prompt.user_data))
    return responses


def prompt_logprobs(output: "RequestOutput") -> NDArray[np.float32]:
    """Log-probability of every token of a prompt, `[T]`; 0 at index 0."""
    return np.array([0.0, *cast(Any, output.prompt_logprobs).logprobs], np.float32)


def _decode(tokens: list[list[int]], template: Template | None) -> list[str]:
    if template is None:
        return [""] * len(tokens)
    return cast("list[str]", template.tokenizer.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
