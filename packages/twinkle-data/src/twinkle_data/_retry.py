"""Prompts whose completions all have one reward teach nothing; they are replaced, or tried again (dynamic sampling of DAPO, arXiv 2503.14476)."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._checks import check_state, check_whole, is_number
from ._errors import DatasetError, LoaderStateError, NoSignalError
from ._loader import DataLoader
from ._sampling import SampleResponse
from ._wording import a_kind


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """A prompt with its completions. row: as the loader gave it; rewards: one a sequence of the response; attempts: how often it was sampled."""

    row: Any
    response: SampleResponse
    rewards: Sequence[float]
    attempts: int = 1

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ, so that advantages within the group are not all 0."""
        return len(self.rewards) > 0 and max(self.rewards) > min(self.rewards)


class RetrySampler:
    """Batches of prompts whose completions do not all have the same reward.

    Each round samples as many prompts as are missing, so all completions of a batch come from the weights that `sample` used for it. Prompts
    without signal wait, and come again once more than a batch of them do or no new ones are left, up to `max_attempts` times: later the policy
    may do better or worse at them. When all prompts are used up, an unfinished last batch is left out.

    Nothing is lost when `sample`, `reward` or the loader raises, or too few groups had a signal: prompts that were drawn come again, groups that
    were found wait, and the next call of `next` goes on. (Those groups come from the weights of the earlier call.)

    Args:
        prompts: a loader; its batches are taken apart.
        sample: rows to one response each (`lambda rows: sampler.sample(encode(rows), params)`).
        reward: rows and responses to the rewards of all sequences, one after another, as twinkle_train's rewards give them.
        batch_size: prompts of a batch.
        max_rounds: of sampling for one batch.
        max_attempts: how often one prompt is sampled before it is left out.
        when_short: what happens when the rounds are used up: 'error', or 'give' what there is (which may be nothing), also at the end.

    Raises:
        DatasetError: a number below 1.
    """

    def __init__(
        self,
        prompts: DataLoader,
        sample: Callable[[list[Any]], Sequence[SampleResponse]],
        reward: Callable[[Sequence[Any], Sequence[SampleResponse]], Sequence[float]],
        *,
        batch_size: int,
        max_rounds: int = 8,
        max_attempts: int = 1,
        when_short: str = "error",
    ) -> None:
        for name, value in (("batch_size", batch_size), ("max_rounds", max_rounds), ("max_attempts", max_attempts)):
            check_whole(name, value, 1)
        if when_short not in ("error", "give"):
            raise DatasetError(f"when_short is {when_short!r}; it must be 'error' or 'give'")
        self._loader, self._sample, self._reward = prompts, sample, reward
        self._batch_size, self._max_rounds, self._max_attempts, self._when_short = batch_size, max_rounds, max_attempts, when_short
        self._fresh: deque[Any] = deque()
        self._again: deque[tuple[Any, int]] = deque()
        self._drawn: deque[tuple[Any, int]] = deque()  # drawn, and not sampled or not rewarded
        self._found: list[PromptGroup] = []
        self._batches: Iterator[Any] | None = None
        self.num_sampled = 0
        """How many prompts have been sampled so far."""
        self.num_without_signal = 0
        """How many of them had no signal."""

    def __iter__(self) -> Iterator[list[PromptGroup]]:
        """The batches, until the prompts are used up."""
        while (batch := self.next()) is not None:
            yield batch

    def next(self) -> list[PromptGroup] | None:
        """The next batch: `batch_size` groups with signal; None once all prompts have been used up.

        Raises:
            NoSignalError: too few groups had a signal.
            Exception: the error of a response.
            DatasetError: `sample` or `reward` returned another number of things than were asked for, or a reward that is no finite number.
        """
        groups = self._found
        tried = len(groups)
        for _ in range(self._max_rounds):
            drawn = self._draw(self._batch_size - len(groups))
            if not drawn:
                self._found = []
                return groups if groups and self._when_short == "give" else None
            try:
                tested = self._try(drawn)
            except BaseException:
                self._drawn.extendleft(reversed(drawn))
                raise
            tried += len(drawn)
            for group in tested:
                if group.has_signal:
                    groups.append(group)
                elif group.attempts < self._max_attempts:
                    self._again.append((group.row, group.attempts))
            if len(groups) == self._batch_size:
                self._found = []
                return groups
        if self._when_short == "give":
            self._found = []
            return groups
        raise NoSignalError(
            f"{len(groups)} of {tried} prompts had rewards that differ, {self._batch_size} are needed: the task is too easy or too hard for the "
            "policy, or num_samples too small; raise max_rounds, or take fewer with when_short='give'"
        )

    def state_dict(self) -> dict[str, Any]:
        """The position: the loader's, and the prompts that wait, as they are (JSON where the rows are).

        Prompts whose groups wait after an error are sampled anew from there.
        """
        first = [[group.row, group.attempts - 1] for group in self._found]
        return {
            "loader": self._loader.state_dict(),
            "fresh": list(self._fresh),
            "again": [list(entry) for entry in self._again],
            "drawn": first + [list(entry) for entry in self._drawn],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up at a saved position.

        Raises:
            LoaderStateError: a position of a loader with other settings, or not one of a RetrySampler.
        """
        check_state(state, ("loader", "fresh", "again", "drawn"), {})
        waiting = [state[name] for name in ("again", "drawn")]
        if not isinstance(state["fresh"], list) or not all(isinstance(entries, list) and all(map(_is_tried, entries)) for entries in waiting):
            raise LoaderStateError("the saved state is none of a RetrySampler, or damaged")
        self._loader.load_state_dict(state["loader"])
        again, drawn = (deque((row, attempts) for row, attempts in entries) for entries in waiting)
        self._fresh, self._again, self._drawn = deque(state["fresh"]), again, drawn
        self._found, self._batches = [], None

    def _try(self, drawn: list[tuple[Any, int]]) -> list[PromptGroup]:
        rows = [row for row, _ in drawn]
        responses = list(self._sample(rows))
        if len(responses) != len(rows):
            raise DatasetError(f"sample returned {len(responses)} responses for {len(rows)} prompts")
        for response in responses:
            if not isinstance(response, SampleResponse):
                raise DatasetError(f"sample returned {a_kind(response)} for a prompt; it returns a SampleResponse for each, as a sampler does")
            response.raise_for_error()
        if any(not response.sequences for response in responses):
            raise DatasetError("sample returned a response without a sequence")
        rewards = list(self._reward(rows, responses))
        if len(rewards) != sum(len(response.sequences) for response in responses):
            raise DatasetError(f"reward returned {len(rewards)} numbers for {sum(len(response.sequences) for response in responses)} sequences")
        for reward in rewards:
            if not is_number(reward) and not isinstance(reward, (bool, np.bool_)):
                raise DatasetError(f"reward returned {reward!r}; a reward is a finite number")
        groups: list[PromptGroup] = []
        start = 0
        for (row, attempts), response in zip(drawn, responses, strict=True):
            end = start + len(response.sequences)
            groups.append(PromptGroup(row=row, response=response, rewards=rewards[start:end], attempts=attempts + 1))
            start = end
        self.num_sampled += len(groups)
        self.num_without_signal += sum(not group.has_signal for group in groups)
        return groups

    def _draw(self, count: int) -> list[tuple[Any, int]]:
        """The next prompts, and how often each has been sampled: new ones while there are, with those that wait in between."""
        drawn: list[tuple[Any, int]] = []
        try:
            self._fill(drawn, count)
        except BaseException:
            self._drawn.extendleft(reversed(drawn))
            raise
        return drawn

    def _fill(self, drawn: list[tuple[Any, int]], count: int) -> None:
        while len(drawn) < count:
            if self._drawn:
                drawn.append(self._drawn.popleft())
            elif len(self._again) > self._batch_size or (self._again and not self._refill()):
                drawn.append(self._again.popleft())
            elif self._refill():
                drawn.append((self._fresh.popleft(), 0))
            else:
                return

    def _refill(self) -> bool:
        """Whether there is a new prompt."""
        if not self._fresh:
            batches = self._batches = self._batches or iter(self._loader)
            self._fresh.extend(next(batches, ()))
        return bool(self._fresh)


def _is_tried(entry: Any) -> bool:
    return isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], int)
