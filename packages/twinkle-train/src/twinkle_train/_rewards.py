"""Rewards of sampled completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from twinkle_data import SampleResponse, Trajectory

from ._errors import InputError


@runtime_checkable
class Reward(Protocol):
    """A reward function: any callable from prompts and what was sampled for them to numbers."""

    def __call__(self, trajectories: Sequence[Trajectory], responses: Sequence[SampleResponse], /) -> list[float]:
        """One reward a completion: those of the first response's sequences, then the second's, and so on (as `group_advantages` takes them).

        trajectories: the prompts, one a response.
        """
        ...


def last_word(text: str) -> str:
    """The last word of a text, '' when there is none."""
    words = text.split()
    return words[-1] if words else ""


@dataclass(frozen=True, kw_only=True)
class ExactMatchReward:
    """1.0 for a completion that ended by itself and whose extracted answer is the expected one, to the character; else 0.0.

    extract: finds the answer in the decoded completion, by default its last word. answer_key: where in the trajectory's `user_data` the
    expected answer is; it is compared as text. require_stop: whether a completion that was cut at its token limit counts as wrong.

    Raises InputError when prompts and responses differ in number, or a prompt has no expected answer.
    """

    extract: Callable[[str], str] = last_word
    answer_key: str = "answer"
    require_stop: bool = True

    def __call__(self, trajectories: Sequence[Trajectory], responses: Sequence[SampleResponse], /) -> list[float]:
        """One reward a completion, in order."""
        if len(trajectories) != len(responses):
            raise InputError(f"{len(trajectories)} prompts but {len(responses)} responses")
        rewards: list[float] = []
        for index, (trajectory, response) in enumerate(zip(trajectories, responses, strict=True)):
            if self.answer_key not in trajectory.user_data:
                raise InputError(f"prompt {index} has no {self.answer_key!r} in its user_data (it has {sorted(trajectory.user_data)})")
            answer = str(trajectory.user_data[self.answer_key])
            for sequence in response.sequences:
                ended = sequence.stop_reason == "stop" or not self.require_stop
                rewards.append(1.0 if ended and self.extract(sequence.decoded) == answer else 0.0)
        return rewards
