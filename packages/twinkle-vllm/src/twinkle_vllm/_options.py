"""From `twinkle_data.SamplingParams` to vLLM's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

from twinkle_data import DataError, SamplingParams

from ._errors import SamplingOptionError

if TYPE_CHECKING:
    from vllm import SamplingParams as EngineParams

OptionSource = SamplingParams | Mapping[str, Any]

_LOWEST_TEMPERATURE = 0.01  # vLLM 0.32 and 0.33: sampling_params._MAX_TEMP


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the engine can do, as far as options depend on it.

    stop_token_ids: end tokens of every request. at_temperature: log-probabilities are those at the sampling temperature. max_top_logprobs: vLLM's
    `max_logprobs`.
    """

    stop_token_ids: tuple[int, ...]
    has_tokenizer: bool
    at_temperature: bool
    max_top_logprobs: int


def resolve_params(given: OptionSource | None, num_samples: int | None) -> SamplingParams:
    """The parameters of a call; SamplingOptionError for an unknown option or a value out of range."""
    if given is None:
        given = {}
    if isinstance(given, Mapping):
        known = [field.name for field in fields(SamplingParams)]
        if unknown := sorted(str(name) for name in set(given) - set(known)):
            raise SamplingOptionError(f"unknown sampling options {unknown}; known are {known}")
        options = {str(name): value for name, value in given.items()}
        given = _checked(lambda: SamplingParams(**options))
    elif not isinstance(given, SamplingParams):
        raise SamplingOptionError(f"sampling_params is a {type(given).__name__}; give a twinkle SamplingParams or a mapping of its fields")
    return given if num_samples is None else _checked(lambda: replace(given, num_samples=num_samples))


def params_of_each(
    given: OptionSource | Sequence[OptionSource] | None, num_samples: int | None, count: int, *, rank: int
) -> Sequence[SamplingParams | SamplingOptionError]:
    """The parameters of each of `count` requests; for a list, an error in the place of options that are wrong.

    Options that all requests share are raised for when they are wrong. A seed that they share becomes another one for each, or equal prompts
    would get equal completions; in a list every seed is taken as it is.
    """
    if isinstance(given, (list, tuple)):
        if len(given) != count:
            raise SamplingOptionError(f"there are {count} inputs but sampling_params for {len(given)}: give one for all, or a list with one for each")
        return [_resolved(one, num_samples) for one in given]
    params = resolve_params(cast("OptionSource | None", given), num_samples)
    seeds = [None if params.seed is None else params.seed + 1_000_003 * rank + index * params.num_samples for index in range(count)]
    return [params if seed is None else replace(params, seed=seed) for seed in seeds]


def check_options(params: SamplingParams, engine: EngineFacts) -> None:
    """SamplingOptionError for options that this engine cannot honour: stop texts without a tokenizer, log-probabilities of a distribution that no
    trainer computes or under a name that would be wrong, and a temperature that vLLM would silently raise."""
    if 0 < params.temperature < _LOWEST_TEMPERATURE:
        raise SamplingOptionError(
            f"temperature is {params.temperature:g}; vLLM samples at {_LOWEST_TEMPERATURE:g} whatever is below it: use 0 (greedy) or at least that"
        )
    if params.seed is not None and not 0 <= params.seed < 2**63 - params.num_samples:
        # vLLM 0.32 takes -1 for none; one that no generator takes is an error of the engine, and ends all requests that run.
        raise SamplingOptionError(f"seed is {params.seed}; it must be from 0 to 2**63 - 1, those of further samples included")
    if params.stop and not engine.has_tokenizer:
        raise SamplingOptionError("stop texts need a tokenizer in the model's folder; without one use stop_token_ids")
    if params.structured_output is not None and not engine.has_tokenizer:
        raise SamplingOptionError("structured_output needs a tokenizer in the model's folder")
    if params.top_logprobs > engine.max_top_logprobs:
        raise SamplingOptionError(f"top_logprobs is {params.top_logprobs}, and engine_args['max_logprobs'] allows {engine.max_top_logprobs}")
    changed = params.changes_distribution
    if changed and params.logprobs and engine.at_temperature:
        raise SamplingOptionError(
            f"with {', '.join(changed)} vLLM's log-probabilities are those of the truncated distribution, which no trainer computes: "
            "set logprobs=False, or build the sampler with logprobs_at_temperature=False"
        )
    if params.prompt_logprobs and engine.at_temperature and params.temperature not in (0.0, 1.0):
        raise SamplingOptionError(
            f"prompt_logprobs at temperature {params.temperature:g}: vLLM has those of the undivided logits only. Leave them out and use score() or "
            "the trainer's forward_only, or build the sampler with logprobs_at_temperature=False"
        )


def engine_params(params: SamplingParams, engine: EngineFacts) -> "EngineParams":
    """vLLM's parameters of one request. Raises SamplingOptionError, also for what vLLM refuses."""
    check_options(params, engine)
    from vllm import SamplingParams as EngineParams
    from vllm.exceptions import VLLMError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    try:
        return EngineParams(
            n=params.num_samples,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=params.seed,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop=list(params.stop),
            stop_token_ids=list(dict.fromkeys([*engine.stop_token_ids, *params.stop_token_ids])),
            logit_bias=dict(params.logit_bias) or None,
            structured_outputs=None if params.structured_output is None else StructuredOutputsParams(**_structure(params.structured_output)),
            logprobs=params.top_logprobs if params.logprobs else None,
            prompt_logprobs=0 if params.prompt_logprobs else None,
            flat_logprobs=True,
            detokenize=bool(params.stop),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (VLLMError, ValueError, TypeError) as error:
        raise SamplingOptionError(f"vLLM refuses these options: {error}") from error


def scoring_params() -> "EngineParams":
    """vLLM's parameters that return the log-probability of every prompt token. (It refuses max_tokens=0: one token is sampled in vain.)"""
    from vllm import SamplingParams as EngineParams
    from vllm.sampling_params import RequestOutputKind

    return EngineParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def _resolved(given: OptionSource, num_samples: int | None) -> SamplingParams | SamplingOptionError:
    try:
        return resolve_params(given, num_samples)
    except SamplingOptionError as error:
        return error


def _structure(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if name == "choice" else value for name, value in given.items()}


def _checked(build: Callable[[], SamplingParams]) -> SamplingParams:
    try:
        return build()
    except DataError as error:
        raise SamplingOptionError(str(error)) from error
