"""Held-out evaluation: exact match, sampled at the training temperature, and greedy beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinkle_data import InputFeature, SampleResponse, SamplingParams, Trajectory
from twinkle_train import Reward

if TYPE_CHECKING:
    from twinkle_vllm import vLLMSampler


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Shares of right answers, in [0, 1]."""

    sampled: float
    greedy: float
    example: str
    """The first problem and its greedy completion, to look at."""


def accuracy(
    sampler: vLLMSampler,
    prompts: Sequence[InputFeature],
    problems: Sequence[Trajectory],
    reward: Reward,
    params: SamplingParams,
) -> tuple[float, list[SampleResponse]]:
    """Share of right completions over all problems and samples, and the responses; the sampler must already hold the weights to evaluate."""
    responses = [response.raise_for_error() for response in sampler.sample(list(prompts), params)]
    rewards = reward(problems, responses)
    return sum(rewards) / len(rewards), responses


def evaluate(
    sampler: vLLMSampler,
    prompts: Sequence[InputFeature],
    problems: Sequence[Trajectory],
    reward: Reward,
    *,
    temperature: float,
    max_tokens: int,
    num_samples: int,
) -> Evaluation:
    """Evaluate sampled (num_samples each, at `temperature`) and greedy."""
    sampled = SamplingParams(max_tokens=max_tokens, temperature=temperature, num_samples=num_samples, logprobs=False)
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=False)
    share, _ = accuracy(sampler, prompts, problems, reward, sampled)
    greedy_share, responses = accuracy(sampler, prompts, problems, reward, greedy)
    example = f"{problems[0].messages[-1].content!r} -> {responses[0].sequences[0].decoded!r}"
    return Evaluation(sampled=share, greedy=greedy_share, example=example)
