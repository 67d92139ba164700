from types import SimpleNamespace
from typing import Any

import pytest

from twinkle import Template, WarmupError
from twinkle.config import WarmupConfig
from twinkle.recipes import Task, warm_up
from twinkle_data.toy import arithmetic_task, toy_tokenizer


class _CountingActor:
    """Takes every call of the warm-up and counts the batches."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None

    def forward_backward(self, features: list[Any], **options: Any) -> Any:
        self.batches.append(len(features))
        return SimpleNamespace(loss=1.0)


def test_data_that_hardly_fills_a_batch_is_repeated_up_to_the_last_step():
    problems = list(arithmetic_task(num_problems=100).train)[:10]
    template = Template(toy_tokenizer(problem.messages[0].content for problem in problems))
    actor: Any = _CountingActor()
    unused: Any = None
    with pytest.raises(WarmupError, match="after 10 steps"):
        warm_up(
            WarmupConfig(min_steps=100, max_steps=10, batch_size=8),
            actor=actor,
            sampler=unused,
            weights=unused,
            template=template,
            task=Task(training=problems, validation=problems[:1], held_out=[]),
            max_tokens=8,
            micro_batch_size=None,
            seed=0,
            say=print,
        )
    # Ten rows fill one batch of eight, and two are left over in every epoch.
    assert actor.batches == [8] * 10
