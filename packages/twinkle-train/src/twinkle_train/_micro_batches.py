"""Splitting a rank's rows into micro-batches, and a micro-batch into what a loss takes."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinkle_data import IGNORE_INDEX, Batch, PackedFeature, plan_micro_batches

from ._contract import Row
from ._errors import ConfigError, InputError
from ._loss import LossInput

_ALL_OR_NONE = ("logprobs", "ref_logprobs", "advantages")


def num_micro_batches(num_rows: int, micro_batch_size: int | None) -> int:
    """How many micro-batches that many rows make; one when `micro_batch_size` is None.

    Raises ConfigError for a size below 1, InputError without rows.
    """
    if num_rows < 1:
        raise InputError("this rank got no rows: give every data rank at least one")
    if micro_batch_size is None:
        return 1
    if not isinstance(micro_batch_size, numbers.Integral) or isinstance(micro_batch_size, bool) or micro_batch_size < 1:
        raise ConfigError(f"micro_batch_size must be a whole number >= 1, or None, got {micro_batch_size!r}")
    return -(-num_rows // micro_batch_size)


def split_micro_batches(inputs: Sequence[Row], micro_batch_size: int | None = None, *, count: int | None = None) -> list[list[Row]]:
    """The rows in order, in micro-batches of at most `micro_batch_size` rows; all in one when it is None.

    count: make exactly that many instead (at least as many as needed), of nearly equal size: data ranks whose models talk to one another
    must run equally many, and their rows differ by up to one. Where rows run out, micro-batches hold one untrained copy of the last row,
    which adds nothing to loss or gradients; the copies come after all rows.

    Raises ConfigError for a size below 1 or too small a count, InputError without rows or when only some rows have logprobs,
    ref_logprobs or advantages.
    """
    needed = num_micro_batches(len(inputs), micro_batch_size)
    for name in _ALL_OR_NONE:
        missing = [index for index, feature in enumerate(inputs) if getattr(feature, name) is None]
        if missing and len(missing) < len(inputs):
            raise InputError(f"row {missing[0]} has no {name}, others have: give it to all rows or to none")
    if count is None:
        size = len(inputs) if micro_batch_size is None else micro_batch_size
        return [list(inputs[start : start + size]) for start in range(0, len(inputs), size)]
    if count < needed:
        raise ConfigError(f"{count} micro-batches of at most {micro_batch_size} rows cannot hold {len(inputs)} rows")
    rows = [*inputs, *[untrained(inputs[-1])] * (count - len(inputs))]
    bounds = [len(rows) * index // count for index in range(count + 1)]
    return [rows[start:end] for start, end in itertools.pairwise(bounds)]


def split_by_tokens(inputs: Sequence[Row], micro_batch_tokens: int, *, padded: bool, count: int | None = None) -> tuple[list[list[Row]], list[int]]:
    """The rows in micro-batches of at most so many tokens (see `plan_micro_batches`), and for each row, in that order, which one of `inputs` it is.

    padded: whether shorter rows of a micro-batch count as much as its longest. count: make exactly that many, as `split_micro_batches` does; copies
    are numbered from len(inputs) on.

    Raises ConfigError for a budget below 1, InputError without rows, for a row that is longer, or when only some rows have logprobs,
    ref_logprobs or advantages.
    """
    split_micro_batches(inputs)  # refuses rows that do not go together
    if micro_batch_tokens < 1:
        raise ConfigError(f"micro_batch_tokens must be >= 1 or None, got {micro_batch_tokens}")
    lengths = [len(row) for row in inputs]
    if max(lengths) > micro_batch_tokens:
        longest = lengths.index(max(lengths))
        raise InputError(
            f"inputs[{longest}] has {lengths[longest]} tokens, and a micro-batch at most micro_batch_tokens={micro_batch_tokens}: raise it"
        )
    copies = max(0, (count or 0) - len(inputs))
    plan = plan_micro_batches(lengths, micro_batch_tokens, padded=padded, count=None if count is None else count - copies)
    shortest = lengths.index(min(lengths))
    parts = [[inputs[index] for index in rows] for rows in plan] + [[untrained(inputs[shortest])]] * copies
    return parts, [*itertools.chain.from_iterable(plan), *range(len(inputs), len(inputs) + copies)]


def untrained(feature: Row) -> Row:
    """The same row with no token trained on."""
    if isinstance(feature, PackedFeature):
        return PackedFeature(features=[replace(one, labels=np.full(len(one), IGNORE_INDEX, dtype=np.int64)) for one in feature.features])
    return replace(feature, labels=np.full(len(feature.input_ids), IGNORE_INDEX, dtype=np.int64))


def loss_input_from_batch(batch: Batch, logprobs_BT: Tensor, entropy_BT: Tensor | None = None) -> LossInput:
    """What a loss takes, from a collated batch and the model's per-token log-probabilities, on their device.

    batch: position t speaks of the token that follows (`InputProcessor` has shifted). logprobs_BT: log-probabilities of `batch.targets`
    at `batch.temperature`, [B, T] of the batch, with their graph. entropy_BT: the same shape, or None.

    `old_logprobs_BT` are the features' `logprobs`.

    Raises InputError when shapes disagree or a loss weight is negative.
    """
    if (batch.loss_mask < 0).any():
        raise InputError("a loss weight is negative; give the sign to the advantages")

    def tensor(array: NDArray[np.generic] | None) -> Tensor | None:
        return None if array is None else torch.as_tensor(array, device=logprobs_BT.device)

    return LossInput(
        logprobs_BT=logprobs_BT,
        mask_BT=torch.as_tensor(batch.loss_mask, device=logprobs_BT.device),
        sequence_ids_BT=torch.as_tensor(batch.sequence_ids, device=logprobs_BT.device),
        entropy_BT=entropy_BT,
        old_logprobs_BT=tensor(batch.logprobs),
        ref_logprobs_BT=tensor(batch.ref_logprobs),
        advantages_BT=tensor(batch.advantages),
        temperature_BT=tensor(batch.temperature),
    )


def unshift_rows(batches: Sequence[Batch], values: Sequence[Tensor], num_rows: int, order: Sequence[int] | None = None) -> list[NDArray[np.float32]]:
    """Per-token values of micro-batches as one numpy array [T] a row, aligned with `input_ids`, without the untrained copies.

    values: one [B, T] a batch, on any device. order: which row each of theirs is, one after another (copies are numbered from num_rows on);
    None: in order.
    """
    rows: list[NDArray[np.float32]] = []
    for batch, value_BT in zip(batches, values, strict=True):
        rows += batch.unshift(_array(value_BT))
    return _in_order(rows, order, num_rows)


def split_rows(batches: Sequence[Batch], values: Sequence[Tensor], num_rows: int, order: Sequence[int] | None = None) -> list[NDArray[np.float32]]:
    """As `unshift_rows`, for values of the tokens themselves, ``[B, T, ...]`` a batch: one numpy array ``[T, ...]`` a row."""
    rows: list[NDArray[np.float32]] = []
    for batch, value in zip(batches, values, strict=True):
        rows += batch.split_features(_array(value))
    return _in_order(rows, order, num_rows)


def _array(value: Tensor) -> NDArray[np.float32]:
    return value.detach().float().cpu().numpy()


def _in_order(rows: list[NDArray[np.float32]], order: Sequence[int] | None, num_rows: int) -> list[NDArray[np.float32]]:
    if order is None:
        return rows[:num_rows]
    placed = dict(zip(order, rows, strict=True))
    return [placed[index] for index in range(num_rows)]
