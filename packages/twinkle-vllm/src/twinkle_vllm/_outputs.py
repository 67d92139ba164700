"""From vLLM's outputs to `SampleResponse`s."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from twinkle_data import InputFeature, SampledSequence, SampleResponse, SamplingParams, Template, append_sample

from ._errors import EngineFailed

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput

NOT_FINITE = "a log-probability is not a finite number: the weights, or the adapter, hold or make infinities or NaN"
_REASONS = ("stop", "length", "abort")


def as_responses(
    outputs: "Sequence[RequestOutput | None]",
    prompts: Sequence[InputFeature],
    params: Sequence[SamplingParams],
    template: Template | None,
    *,
    at_temperature: bool,
    adapter_versions: Sequence[int | None],
) -> list[SampleResponse]:
    """One response for each prompt; an output of None is that of a request that was aborted before it began.

    All completions are decoded in one call of the tokenizer.
    """
    texts = iter(_decode([list(completion.token_ids) for output in outputs if output is not None for completion in output.outputs], template))
    return [
        _aborted(prompt, wanted)
        if output is None
        else _as_response(output, prompt, wanted, texts, wanted.temperature if at_temperature else 1.0, adapter_version)
        for output, prompt, wanted, adapter_version in zip(outputs, prompts, params, adapter_versions, strict=True)
    ]


def prompt_logprobs(output: "RequestOutput") -> NDArray[np.float32]:
    """Log-probability of every token of a prompt, `[T]`; 0 at index 0."""
    flat = cast(Any, output.prompt_logprobs)
    return np.array([0.0, *(flat.logprobs[start] for start in flat.start_indices[1:])], np.float32)


def _as_response(
    output: "RequestOutput", prompt: InputFeature, params: SamplingParams, texts: Any, temperature: float, adapter_version: int | None
) -> SampleResponse:
    sequences: list[SampledSequence] = []
    for completion in output.outputs:
        try:
            sequences.append(_as_sequence(completion, prompt, params, next(texts), temperature, adapter_version))
        except EngineFailed as error:
            for _ in output.outputs[len(sequences) + 1 :]:
                next(texts)
            return SampleResponse(sequences=[], prompt_token_ids=prompt.input_ids.tolist(), user_data=prompt.user_data, error=error)
    return SampleResponse(
        sequences=sequences,
        prompt_token_ids=prompt.input_ids.tolist(),
        user_data=prompt.user_data,
        prompt_logprobs=prompt_logprobs(output).tolist() if params.prompt_logprobs and output.prompt_logprobs is not None else [],
    )


def _as_sequence(
    completion: "CompletionOutput", prompt: InputFeature, params: SamplingParams, text: str, temperature: float, adapter_version: int | None
) -> SampledSequence:
    if completion.finish_reason not in _REASONS:
        cause = "; structured_output may be what it could not compile" if params.structured_output is not None else ""
        raise EngineFailed(f"vLLM ended a completion with {completion.finish_reason!r}, which is none of {_REASONS}{cause}: its log says more")
    tokens = list(completion.token_ids)
    versions = [int(span.version) for span in completion.weight_versions or () for _ in range(span.start, span.end)]
    if adapter_version is not None:
        versions = [adapter_version] * len(tokens)
    logprobs: list[float] = []
    top: list[dict[int, float]] = []
    if params.logprobs and tokens:
        flat = cast(Any, completion.logprobs)
        # At each place vLLM has the sampled token first, then the most likely ones.
        logprobs = [flat.logprobs[start] for start in flat.start_indices]
        if not all(map(math.isfinite, logprobs)):
            raise EngineFailed(NOT_FINITE)
        if params.top_logprobs:
            places = zip(flat.start_indices, flat.end_indices, strict=True)
            top = [dict(zip(flat.token_ids[start + 1 : end], flat.logprobs[start + 1 : end], strict=True)) for start, end in places]
    feature = prompt
    if tokens:
        feature = append_sample(prompt, tokens, logprobs if params.logprobs else None, temperature=temperature, weight_version=versions or None)
    return SampledSequence(
        tokens=tokens,
        logprobs=logprobs,
        stop_reason=cast(Any, completion.finish_reason),
        decoded=text,
        new_input_feature=feature,
        top_logprobs=top,
        weight_versions=versions,
    )


def _aborted(prompt: InputFeature, params: SamplingParams) -> SampleResponse:
    nothing = SampledSequence(tokens=[], logprobs=[], stop_reason="abort", decoded="", new_input_feature=prompt)
    return SampleResponse(sequences=[nothing] * params.num_samples, prompt_token_ids=prompt.input_ids.tolist(), user_data=prompt.user_data)


def _decode(tokens: list[list[int]], template: Template | None) -> list[str]:
    if template is None:
        return [""] * len(tokens)
    return cast("list[str]", template.tokenizer.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
