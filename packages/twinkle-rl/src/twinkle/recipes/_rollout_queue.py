"""Rollouts that are sampled while the actor trains on earlier ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from twinkle_data import InputFeature, SampleResponse, SamplingParams, Template, Trajectory

if TYPE_CHECKING:
    from twinkle_vllm import vLLMSampler

_WAIT_S = 0.5  # of one look for what has finished; it returns as soon as something has


@dataclass(frozen=True)
class _Rollout:
    problems: list[Trajectory]
    ids: list[str]
    loader_state: dict[str, Any]


class RolloutQueue:
    """Batches that the sampler works on by itself, oldest first.

    Args:
        sampler: takes requests and says what has finished (`submit`, `collect`).
        template: turns problems into prompts.
        params: how completions are sampled.
    """

    def __init__(self, sampler: vLLMSampler, template: Template, params: SamplingParams) -> None:
        self._sampler, self._template, self._params = sampler, template, params
        self._waiting: deque[_Rollout] = deque()
        self._done: dict[str, SampleResponse] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def loader_state(self) -> dict[str, Any] | None:
        """Where the data loader was before the oldest batch: where a resumed run begins, which samples them anew."""
        return self._waiting[0].loader_state if self._waiting else None

    def submit(self, problems: list[Trajectory], loader_state: dict[str, Any]) -> None:
        """Let a batch enter; it is sampled with the weights that the sampler has at each token.

        loader_state: of before the batch was taken.
        """
        prompts = [self._template.encode(problem, add_generation_prompt=True) for problem in problems]
        self._waiting.append(_Rollout(problems, list(self._sampler.submit(prompts, self._params)), loader_state))

    def take(self) -> tuple[list[Trajectory], list[SampleResponse]]:
        """The oldest batch and its responses, in order; waits for them. Raises what went wrong with one of them."""
        rollout = self._waiting[0]
        while missing := [name for name in rollout.ids if name not in self._done]:
            self._done |= dict(self._sampler.collect(missing, _WAIT_S))
        self._waiting.popleft()
        return rollout.problems, [self._done.pop(name).raise_for_error() for name in rollout.ids]


def importance_weights(sampled: Sequence[InputFeature], policy: Sequence[NDArray[np.float32]], cap: float) -> list[NDArray[np.float32]]:
    """How much likelier the policy that is trained makes each sampled token than the one that sampled it: `[T]` a row, at most `cap`; else 0.

    As factors of the advantages, with the ratio of the loss starting from `policy`, they make PPO's objective that of the older policy's samples
    (the decoupled objective of AReaL, arXiv:2505.24298), truncated so that no token outweighs the rest.
    """
    weights: list[NDArray[np.float32]] = []
    for feature, own in zip(sampled, policy, strict=True):
        if feature.logprobs is None or feature.completion_mask is None:
            raise ValueError("a sampled feature carries log-probabilities and a completion mask; this one does not")
        ratio = np.exp(np.minimum(own.astype(np.float64) - feature.logprobs, np.log(cap)))
        weights.append(np.where(feature.completion_mask, ratio, 0.0).astype(np.float32))
    return weights
