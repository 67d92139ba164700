"""From `twinkle_data.SamplingParams` to vLLM's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from twinkle_data import DataError, SamplingParams

from ._errors import SamplingOptionError

if TYPE_CHECKING:
    from vllm import SamplingParams as EngineParams

_LOWEST_TEMPERATURE = 0.01  # vLLM 0.32 and 0.33: sampling_params._MAX_TEMP


def resolve_params(given: SamplingParams | Mapping[str, Any] | None, num_samples: int | None) -> SamplingParams:
    """The parameters of a call; SamplingOptionError for an unknown option or a value out of range."""
    if given is None:
        given = {}
    if isinstance(given, Mapping):
        known = [field.name for field in fields(SamplingParams)]
        if unknown := sorted(set(given) - set(known)):
            raise SamplingOptionError(f"unknown sampling options {unknown}; known are {known}")
        options = {str(name): value for name, value in given.items()}
        given = _checked(lambda: SamplingParams(**options))
    elif not isinstance(given, SamplingParams):
        raise SamplingOptionError(f"sampling_params is a {type(given).__name__}; give a twinkle SamplingParams or a mapping of its fields")
    return given if num_samples is None else _checked(lambda: replace(given, num_samples=num_samples))


def engine_params(
    params: SamplingParams, count: int, stop_token_ids: Sequence[int], *, has_tokenizer: bool, at_temperature: bool, rank: int
) -> "list[EngineParams]":
    """vLLM's parameters for `count` requests. With a seed each request gets its own, or equal prompts would get equal completions.

    Raises SamplingOptionError for stop texts without a tokenizer, for log-probabilities of a truncated distribution, and for a temperature
    that vLLM would silently raise.
    """
    if 0 < params.temperature < _LOWEST_TEMPERATURE:
        raise SamplingOptionError(
            f"temperature is {params.temperature:g}; vLLM samples at {_LOWEST_TEMPERATURE:g} whatever is below it: use 0 (greedy) or at least that"
        )
    from vllm import SamplingParams as EngineParams

    if params.stop and not has_tokenizer:
        raise SamplingOptionError("stop texts need a tokenizer in the model's folder; without one use stop_token_ids")
    truncated = [name for name, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)) if getattr(params, name) != off]
    if truncated and params.logprobs and at_temperature and params.temperature > 0:
        raise SamplingOptionError(
            f"with {', '.join(truncated)} vLLM's log-probabilities are those of the truncated distribution, which no trainer computes: "
            "set logprobs=False, or build the sampler with logprobs_at_temperature=False"
        )

    def build(seed: int | None) -> EngineParams:
        return EngineParams(
            n=params.num_samples,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=seed,
            max_tokens=params.max_tokens,
            stop=list(params.stop),
            stop_token_ids=list(dict.fromkeys([*stop_token_ids, *params.stop_token_ids])),
            logprobs=0 if params.logprobs else None,
            flat_logprobs=True,
            detokenize=bool(params.stop),
            skip_special_tokens=False,
        )

    if params.seed is None:
        return [build(None)] * count
    return [build(params.seed + 1_000_003 * rank + index * params.num_samples) for index in range(count)]


def scoring_params() -> "EngineParams":
    """vLLM's parameters that return the log-probability of every prompt token. (It refuses max_tokens=0: one token is sampled in vain.)"""
    from vllm import SamplingParams as EngineParams

    return EngineParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)


def _checked(build: Callable[[], SamplingParams]) -> SamplingParams:
    try:
        return build()
    except DataError as error:
        raise SamplingOptionError(str(error)) from error
