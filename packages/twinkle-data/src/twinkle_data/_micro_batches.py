"""Micro-batches by a budget of tokens instead of a number of rows."""

from collections.abc import Sequence

import numpy as np

from ._bins import pack_lengths, whole_lengths
from ._checks import check_whole
from ._errors import DatasetError


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, *, padded: bool = False, count: int | None = None) -> list[list[int]]:
    """Which rows go into which micro-batch, so that none has more than `max_tokens` tokens, in few micro-batches.

    Rows come in another order than they were given: results of `plan[i]` belong to the rows that it names.

    Args:
        lengths: the tokens of each row (`len(feature)`), none above the budget.
        max_tokens: of a micro-batch: of its rows together for `InputProcessor(padding_free=True)`, where best-fit decreasing fills them; of
            the rectangle (rows times the longest) when `padded`, where rows of like lengths go together.
        padded: whether micro-batches are padded.
        count: make exactly so many, by splitting the largest: data ranks whose models talk to one another run equally many.

    Raises:
        DatasetError: a row longer than the budget, a budget below 1, or a count that is too small or above the number of rows.
    """
    sizes = whole_lengths(lengths)
    check_whole("max_tokens", max_tokens, 1)
    if count is not None:
        check_whole("count", count, 0)
    if len(sizes) and sizes.max() > max_tokens:
        raise DatasetError(f"row {int(sizes.argmax())} has {sizes.max()} tokens, a micro-batch at most {max_tokens}; raise max_tokens")
    if padded:
        plan = _similar(sizes, max_tokens)
    else:
        packs = pack_lengths(sizes, max_tokens)
        plan = [packs[index].tolist() for index in range(len(packs))]
    if count is not None:
        if not len(plan) <= count <= len(sizes):
            raise DatasetError(f"{len(sizes)} rows need {len(plan)} micro-batches of {max_tokens} tokens; {count} cannot be made")
        while len(plan) < count:
            largest = max((index for index, rows in enumerate(plan) if len(rows) > 1), key=lambda index: int(sizes[plan[index]].sum()))
            rows = plan[largest]
            half = len(rows) // 2
            plan[largest : largest + 1] = [rows[:half], rows[half:]]
    return plan


def _similar(sizes: np.ndarray, max_tokens: int) -> list[list[int]]:
    plan: list[list[int]] = []
    longest = 0
    for row in np.argsort(-sizes, kind="stable").tolist():
        if not plan or (len(plan[-1]) + 1) * longest > max_tokens:
            plan.append([])
            longest = int(sizes[row])
        plan[-1].append(row)
    return plan
