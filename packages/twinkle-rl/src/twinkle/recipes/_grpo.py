"""Group-relative policy optimisation (GRPO, arXiv 2402.03300): a trainer group and a sampler group, one step at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from twinkle.config import GRPOConfig
from twinkle.recipes._evaluate import Evaluation, evaluate
from twinkle.recipes._rollout_queue import RolloutQueue, importance_weights
from twinkle.recipes._task import Task
from twinkle_data import DataLoader, InputFeature, SampleResponse, SamplingParams, Template, Trajectory
from twinkle_remote import gather
from twinkle_sync import CheckpointEngineManager
from twinkle_train import GRPOLoss, group_advantages

if TYPE_CHECKING:
    from twinkle.layout import Trainer
    from twinkle_vllm import vLLMSampler


@dataclass
class Checks:
    """What must hold in every step of an fp32 run; worst values over the run, shown in its summary."""

    logprob_gap: float | None = None
    """Largest |sampler - trainer| log-probability of a sampled token that the same weights produced; None where there was none yet."""
    fewest_tokens: int | None = None
    """Fewest tokens that one sync was checked over."""
    ratio_gap_trainer: float | None = None
    """Largest |first PPO ratio - 1| with the old log-probabilities recomputed by the trainer; None where they are the sampler's."""
    ratio_gap_sampler: float | None = None
    """The same with the sampler's log-probabilities, of the same tokens as `logprob_gap`."""
    kl_by_step: list[float] = field(default_factory=list)
    """KL to the frozen initial policy, step by step."""

    def to_summary(self) -> dict[str, Any]:
        """The figures under the names that `summary.json` uses."""
        kl = self.kl_by_step
        return {
            "max_logprob_gap": self.logprob_gap,
            "min_tokens_per_check": self.fewest_tokens,
            "max_first_ratio_gap_trainer": self.ratio_gap_trainer,
            "max_first_ratio_gap_sampler": self.ratio_gap_sampler,
            "kl_step_1": kl[0] if kl else None,
            "kl_step_10": kl[9] if len(kl) > 9 else None,
        }


class GRPOLoop:
    """One GRPO step after another, over components that the caller has built.

    Args:
        config: settings.
        actor: the trained policy; loss, optimizer and schedule are set here.
        sampler: samples from the actor's weights.
        weights: moves the actor's weights to the sampler.
        template: turns problems into prompts.
        task: problems and reward.
        reference: the frozen initial policy, or None to skip the KL.
    """

    def __init__(
        self,
        config: GRPOConfig,
        *,
        actor: Trainer,
        sampler: vLLMSampler,
        weights: CheckpointEngineManager,
        template: Template,
        task: Task,
        reference: Trainer | None = None,
    ) -> None:
        self.config = config
        self.checks = Checks()
        self._actor, self._sampler, self._weights, self._reference = actor, sampler, weights, reference
        self._template, self._task = template, task
        self._held_out = [template.encode(problem, add_generation_prompt=True) for problem in task.held_out]
        self._shuffle = random.Random(config.seed)
        self._loader = DataLoader(task.training, batch_size=config.prompts_per_step, shuffle=True, seed=config.seed, num_epochs=None)
        self._batches = iter(self._loader)
        self._steps = 0
        self._params = SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature, num_samples=config.num_samples)
        self._queue = RolloutQueue(sampler, template, self._params)
        self._submitted = 0  # rollouts that were begun, with --async-steps
        set_up_actor(actor, config)

    @property
    def steps(self) -> int:
        """Steps taken, those before a resumption included."""
        return self._steps

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, as plain JSON; the actor's state is not part of it."""
        version, numbers, gauss = self._shuffle.getstate()
        return {
            "steps": self._steps,
            "loader": self._queue.loader_state or self._loader.state_dict(),
            "shuffle": [version, list(numbers), gauss],
            "weight_version": self._weights.version,
            "checks": asdict(self.checks),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called. The manager of the weights must have been made with the state's weight_version + 1."""
        self._steps = self._submitted = state["steps"]
        self._loader.load_state_dict(state["loader"])
        self._batches = iter(self._loader)
        version, numbers, gauss = state["shuffle"]
        self._shuffle.setstate((version, tuple(numbers), gauss))
        self.checks = Checks(**state["checks"])

    def step(self, *, sync: bool = True) -> tuple[dict[str, Any], list[InputFeature], list[float]]:
        """One sync, one rollout, one update. With `async_steps` the rollout was begun so many steps ago.

        Args:
            sync: bring the sampler to the actor's weights first (leave it out to see the checks fail; not with `async_steps`).

        Returns:
            the figures of the step, the features it trained on, and their rewards.
        """
        config, clock = self.config, _Clock()
        # Ahead, the first rollout only, also after a resumption, is of the weights that train on it.
        same_weights = not config.async_steps or not self._queue
        problems, responses = self._sample_ahead(clock) if config.async_steps else self._sample(sync, clock)
        rewards = self._task.reward(problems, responses)
        sampled = [sequence.new_input_feature for response in responses for sequence in response.sequences]
        advantages = self._advantages(rewards, responses)
        clock.lap("reward_s")
        features, row = self._with_logprobs(sampled, advantages)
        row |= train_step(self._actor, features, config)
        self._note_first_ratio(row, same_weights)
        clock.lap("train_s")
        self._steps += 1
        tokens = sum(len(sequence.tokens) for response in responses for sequence in response.sequences)
        row = {
            "step": self._steps,
            "reward": float(np.mean(rewards)),
            **row,
            **clock.laps,
            "tokens": tokens,
            "tokens_per_s": tokens / clock.total_s(),
        }
        return row, features, rewards

    def _sample(self, sync: bool, clock: _Clock) -> tuple[list[Trajectory], list[SampleResponse]]:
        if sync:
            self._weights.sync_weights()
        clock.lap("sync_s")
        problems = next(self._batches)
        prompts = [self._template.encode(problem, add_generation_prompt=True) for problem in problems]
        self._sampler.set_seed(sampling_seed(self.config.seed, self._steps))
        responses = [response.raise_for_error() for response in self._sampler.sample(prompts, self._params)]
        clock.lap("sample_s")
        return problems, responses

    def _sample_ahead(self, clock: _Clock) -> tuple[list[Trajectory], list[SampleResponse]]:
        """The oldest rollout that is under way; the sampler goes on with the newest weights while the actor trains on it."""
        begins = not self._queue
        if begins:
            self._weights.sync_weights()
            self._submit()
        clock.lap("sync_s")
        taken = self._queue.take()
        clock.lap("sample_s")
        if not begins:
            self._weights.sync_weights()
        while len(self._queue) < self.config.async_steps and self._submitted < self.config.steps:
            self._submit()
        clock.lap("sync_s")
        return taken

    def _submit(self) -> None:
        state = self._loader.state_dict()
        problems = next(self._batches)
        self._sampler.set_seed(sampling_seed(self.config.seed, self._submitted))
        self._queue.submit(problems, state)
        self._submitted += 1

    def evaluate(self) -> Evaluation:
        """Sync, then evaluate on the held-out problems."""
        self._weights.sync_weights()
        config = self.config
        self._sampler.set_seed(sampling_seed(config.seed, self._steps, evaluation=True))
        return evaluate(
            self._sampler,
            self._held_out,
            self._task.held_out,
            self._task.reward,
            temperature=config.temperature,
            max_tokens=config.max_tokens,
            num_samples=config.eval_samples,
        )

    def _advantages(self, rewards: Sequence[float], responses: Sequence[SampleResponse]) -> NDArray[np.floating]:
        config = self.config
        if config.advantage == "likelihood":
            likelihoods = [float(np.sum(sequence.logprobs)) for response in responses for sequence in response.sequences]
            return group_advantages(likelihoods, config.num_samples)
        advantages = group_advantages(rewards, config.num_samples)
        if config.advantage == "shuffled":
            for start in range(0, len(advantages), config.num_samples):
                group = advantages[start : start + config.num_samples].tolist()
                self._shuffle.shuffle(group)
                advantages[start : start + config.num_samples] = group
        return advantages

    def _with_logprobs(self, sampled: list[InputFeature], advantages: NDArray[np.floating]) -> tuple[list[InputFeature], dict[str, Any]]:
        """Advantages into the features; and, where they are needed, the log-probabilities of the trainer and of the reference."""
        self._note_tokens(sampled)
        from_sampler = self.config.old_logprobs == "sampler"
        if from_sampler and self._reference is None:
            # The loss itself compares the trainer's log-probabilities with the sampler's: scoring the batch once more tells nothing new.
            return [replace(feature, advantages=float(value)) for feature, value in zip(sampled, advantages, strict=True)], {}
        size = self.config.actor.micro_batch_size
        models = [self._actor] if self._reference is None else [self._actor, self._reference]
        # Both score the batch at the same time: forward_only returns a LazyResult.
        scores: list[Any] = [model.forward_only(sampled, micro_batch_size=size) for model in models]
        policy, *anchors = [score.logprobs for score in gather(*scores)]
        row = self._compare(sampled, policy)
        if anchors:
            row["kl"] = mean_kl(sampled, policy, anchors[0])
            self.checks.kl_by_step.append(row["kl"])
        reference = anchors[0] if anchors else [None] * len(sampled)
        counts: list[Any] = [float(advantage) for advantage in advantages]
        if self.config.async_steps and not from_sampler:
            # Where the ratio of the loss begins with the sampler's log-probabilities it makes up for the older weights itself.
            weights = importance_weights(sampled, policy, self.config.importance_cap)
            counts = [advantage * weight for advantage, weight in zip(counts, weights, strict=True)]
            tokens = np.concatenate([_completion(feature, weight) for feature, weight in zip(sampled, weights, strict=True)])
            row |= {"importance_mean": float(tokens.mean()), "importance_max": float(tokens.max()), "importance_min": float(tokens.min())}
        features = [
            replace(feature, logprobs=feature.logprobs if from_sampler else own, ref_logprobs=anchor, advantages=count)
            for feature, own, anchor, count in zip(sampled, policy, reference, counts, strict=True)
        ]
        return features, row

    def _compare(self, sampled: Sequence[InputFeature], policy: Sequence[NDArray[np.float32]]) -> dict[str, Any]:
        """How far the sampler's log-probabilities are from the trainer's."""
        pairs = zip(sampled, policy, strict=True)
        gaps = np.concatenate([_completion(feature, own) - _completion(feature, feature.logprobs) for feature, own in pairs])
        return {"sampler_logprob_gap": float(np.abs(gaps).max()), "sampler_ratio_gap": float(np.abs(np.expm1(gaps)).max())}

    def _note_tokens(self, sampled: Sequence[InputFeature]) -> None:
        count = sum(int(np.count_nonzero(feature.completion_mask)) for feature in sampled if feature.completion_mask is not None)
        self.checks.fewest_tokens = min(count, self.checks.fewest_tokens or count)

    def _note_first_ratio(self, row: dict[str, Any], same_weights: bool) -> None:
        checks = self.checks
        if self.config.old_logprobs == "trainer":
            checks.ratio_gap_trainer = max(checks.ratio_gap_trainer or 0.0, row["ratio_max_deviation"])
        else:
            row |= {"sampler_logprob_gap": row["logprob_gap"], "sampler_ratio_gap": row["ratio_max_deviation"]}
        if same_weights:
            checks.logprob_gap = max(checks.logprob_gap or 0.0, row["sampler_logprob_gap"])
            checks.ratio_gap_sampler = max(checks.ratio_gap_sampler or 0.0, row["sampler_ratio_gap"])


def sampling_seed(seed: int, step: int, *, evaluation: bool = False) -> int:
    """The seed of a step's samples: they depend on the step, not on what was sampled before, so that a resumed run draws the same."""
    return int(np.random.SeedSequence([seed, step, int(evaluation)]).generate_state(1)[0])


def set_up_actor(actor: Trainer, config: GRPOConfig) -> None:
    """Give the actor GRPO's loss, a fresh Adam and its schedule."""
    actor.set_loss(GRPOLoss(epsilon=config.clip_low, epsilon_high=config.clip_high, beta=config.kl_beta))
    actor.set_optimizer("adam", lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, eps=config.adam_eps)
    actor.set_lr_scheduler("constant", warmup_steps=config.lr_warmup_steps)


def train_step(actor: Trainer, features: list[InputFeature], config: GRPOConfig) -> dict[str, Any]:
    """One update on a batch; returns the trainer's metrics of it."""
    actor.forward_backward(features, micro_batch_size=config.actor.micro_batch_size)
    actor.clip_grad_and_step(config.max_grad_norm)
    return dict(actor.calculate_metric())


def mean_kl(features: Sequence[InputFeature], policy: Sequence[NDArray[np.float32]], reference: Sequence[NDArray[np.float32]]) -> float:
    """KL(policy || reference) in nats a completion token, by the k3 estimator: exp(d) - d - 1 with d = log ref - log policy.

    It is never negative, and exactly 0 where the two agree (J. Schulman, "Approximating KL divergence", 2020).
    """
    gaps = np.concatenate([_completion(feature, b) - _completion(feature, a) for feature, a, b in zip(features, policy, reference, strict=True)])
    return float(np.mean(np.expm1(gaps) - gaps))


def _completion(feature: InputFeature, values: NDArray[np.float32] | None) -> NDArray[np.float64]:
    """The values of the completion's tokens, in float64."""
    if values is None or feature.completion_mask is None:
        raise ValueError("a sampled feature carries log-probabilities and a completion mask; this one does not")
    return values[feature.completion_mask].astype(np.float64)


class _Clock:
    """Splits the time of a step into named laps, in seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    def total_s(self) -> float:
        return time.perf_counter() - self._start
