"""Procedural reasoning tasks as datasets."""

import difflib
import warnings
from collections.abc import Sequence
from typing import Any

from ._checks import check_whole
from ._dataset import Dataset
from ._errors import DatasetError, MissingExtraError
from ._messages import Message, Trajectory


def task_dataset(name: str, **options: Any) -> Dataset:
    """A task of reasoning-gym (https://github.com/open-thought/reasoning-gym) as a dataset of prompts.

    A row is a `Trajectory` with the question as its one user message, and `user_data` with 'question', 'answer' and 'metadata'. Rows are
    generated when they are read, row i from `seed` and i alone.

    Args:
        name: of the task, e.g. 'chain_sum'.
        options: of the task; every task takes `size` and `seed`.

    Raises:
        MissingExtraError: reasoning-gym is not installed.
        DatasetError: an unknown task, or options that the task refuses.
    """
    try:
        with warnings.catch_warnings():
            # cellpylib 2.4.0, which reasoning-gym imports, compares with `is "recursive"`: a SyntaxWarning whenever it is compiled.
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise MissingExtraError("reasoning-gym is not installed: pip install 'twinkle-data[tasks]'") from error
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {len(DATASETS)}, see reasoning_gym.factory.DATASETS"
        raise DatasetError(f"reasoning-gym has no task {name!r}; {hint}")
    if "size" in options:
        check_whole(f"size of the task {name!r}", options["size"], 1)
    try:
        task = create_dataset(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise DatasetError(f"reasoning-gym's task {name!r} refuses the options {options}: {error}") from error
    return Dataset(_TaskRows(task))


class _TaskRows(Sequence[Trajectory]):
    """A task's entries, converted when they are read."""

    def __init__(self, task: Any) -> None:
        self._task = task

    def __len__(self) -> int:
        return len(self._task)

    def __getitem__(self, index: int) -> Trajectory:  # pyright: ignore[reportIncompatibleMethodOverride]
        entry = self._task[index]
        user_data = {key: entry[key] for key in ("question", "answer", "metadata")}
        return Trajectory(messages=[Message(role="user", content=entry["question"])], user_data=user_data)
