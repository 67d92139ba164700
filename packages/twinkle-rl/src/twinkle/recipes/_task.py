"""The arithmetic task of the recipes: verifiable, endless, and learned by a tiny model within minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle._errors import ConfigError
from twinkle.config import TaskConfig
from twinkle_data import SampleResponse, Trajectory
from twinkle_data.toy import arithmetic_task, exact_match, with_response


@dataclass(frozen=True, kw_only=True)
class Task:
    """Problems in three parts that share no problem; the held-out part shares no expression with the others either.

    training: for the warm-up and for RL. validation: decides when the warm-up stops. held_out: for evaluations alone.
    """

    training: Sequence[Trajectory]
    validation: Sequence[Trajectory]
    held_out: Sequence[Trajectory]
    few_shot: Sequence[Trajectory] = ()

    def worked(self, problem: Trajectory) -> Trajectory:
        """The problem with its worked answer as the assistant's turn."""
        return with_response(problem)

    def reward(self, problems: Sequence[Trajectory], responses: Sequence[SampleResponse]) -> list[float]:
        """1.0 for a completion that ended by itself and whose last word is the answer, else 0.0; in the order of the sequences."""
        pairs = zip(problems, responses, strict=True)
        return [float(exact_match(sequence, problem.user_data["answer"])) for problem, response in pairs for sequence in response.sequences]


def make_task(config: TaskConfig, *, validation: int) -> Task:
    """Draw the problems.

    Args:
        config: kind and number of the problems.
        validation: how many training problems to keep out for the warm-up's stopping rule.

    Raises:
        ConfigError: too few problems for the parts that are asked for.
    """
    drawn = arithmetic_task(
        num_terms=config.terms, num_digits=config.digits, num_problems=config.size, num_held_out=config.held_out, seed=config.seed
    )
    problems, held_out = list(drawn.train), list(drawn.held_out)
    kept_out = config.few_shot + validation
    if len(problems) < 2 * kept_out or len(held_out) < config.held_out:
        raise ConfigError(
            f"{config.size} drawn problems give {len(problems)} for training and {len(held_out)} held out; "
            f"{kept_out} kept out of training and {config.held_out} held out are asked for. Raise --task.size, or lower --task.held-out"
        )
    shots = [with_response(problem) for problem in problems[: config.few_shot]]
    training = problems[config.few_shot : len(problems) - validation]
    return Task(
        training=[_behind(shots, problem) for problem in training],
        validation=[_behind(shots, problem) for problem in problems[len(problems) - validation :]],
        held_out=[_behind(shots, problem) for problem in held_out],
        few_shot=shots,
    )


def _behind(shots: Sequence[Trajectory], problem: Trajectory) -> Trajectory:
    """The problem behind worked examples, as earlier turns of one conversation."""
    if not shots:
        return problem
    turns = [message for shot in shots for message in shot.messages]
    return Trajectory(messages=[*turns, *problem.messages], user_data=problem.user_data)
