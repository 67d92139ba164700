"""How the model sees a collated batch: its tokens in other places, and the way back.

A batch [B, T] is collated for the loss. The model wants other shapes: columns that its ranks can share, one shape for all micro-batches of a
pipeline, sequences that begin at column 0, packed sequences in one row, this context-parallel rank's chunks of each sequence. A view says for
every position that the model has which position of the batch it holds, so that all of these are one thing.

Shape suffixes: B rows and T columns of the batch; R rows and C columns that the model sees, K of them on this context-parallel rank.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from twinkle_data import Batch
from twinkle_train import InputError


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What a layout asks of the columns that a model sees.

    cp_size, cp_rank: context parallelism cuts every sequence into 2 * cp_size chunks; a rank holds chunks r and 2 * cp_size - 1 - r, so that
    causal attention is equal work. tp_size: under sequence parallelism each rank's columns are divided once more, else 1.
    """

    cp_size: int = 1
    cp_rank: int = 0
    tp_size: int = 1

    @property
    def multiple_of(self) -> int:
        """Of which the number of columns is a multiple."""
        return self.tp_size if self.cp_size == 1 else self.cp_size * math.lcm(2, self.tp_size)

    @property
    def sequence_multiple_of(self) -> int:
        """Of which each packed sequence's columns are a multiple."""
        return 1 if self.cp_size == 1 else 2 * self.cp_size

    def of_rank(self, bounds: Sequence[int], rank: int) -> NDArray[np.int64]:
        """The columns that a context-parallel rank holds, in its order.

        bounds: where each separately cut stretch of columns begins, and the end; the whole row is one unless it is packed.
        """
        if self.cp_size == 1:
            return np.arange(bounds[-1])
        parts: list[NDArray[np.int64]] = []
        for begin, end in itertools.pairwise(bounds):
            chunk = (end - begin) // (2 * self.cp_size)
            for number in (rank, 2 * self.cp_size - 1 - rank):
                parts.append(np.arange(begin + number * chunk, begin + (number + 1) * chunk))
        return np.concatenate(parts)


@dataclass(frozen=True, kw_only=True)
class ViewShape:
    """How large a view is, and whether all its sequences lie in one row."""

    rows: int
    columns: int
    packed: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """What the model is fed with for one micro-batch, on its device.

    index: of the micro-batch. input_ids_RK, position_ids_RK, targets_RK, temperature_RK: this rank's columns; padding has token
    ``pad_token_id``, target 0 and temperature 1. padding_RK: True where there is no token; None when there is none.
    cu_seqlens: int32, where each packed sequence (and what padding is left) begins among all C columns, and the end; None for plain rows.
    max_length: of the longest of them. is_filler: computed for its peers' sake only, without loss or result.
    """

    index: int
    batch: Batch
    shape: ViewShape
    input_ids_RK: torch.Tensor
    position_ids_RK: torch.Tensor
    targets_RK: torch.Tensor
    temperature_RK: torch.Tensor
    padding_RK: torch.Tensor | None
    places_PRK: NDArray[np.int64]
    cu_seqlens: torch.Tensor | None
    max_length: int
    is_filler: bool = False

    def to_batch(self, values_PRK: torch.Tensor) -> torch.Tensor:
        """The values of all context-parallel ranks, [P, R, K, ...], as [B, T, ...] of the batch: 0 where the batch has padding. Differentiable."""
        rows, columns = self.batch.input_ids.shape
        places = torch.as_tensor(self.places_PRK.reshape(-1), device=values_PRK.device)
        held = places >= 0
        rest = values_PRK.shape[3:]
        flat = values_PRK.new_zeros(rows * columns, *rest).index_put((places[held],), values_PRK.reshape(-1, *rest)[held])
        return flat.view(rows, columns, *rest)


def view_shape(batch: Batch, columns: Columns, *, packed: bool) -> ViewShape:
    """The smallest view of a batch that suits the layout."""
    if packed:
        total = int(_spans(batch, columns).sum())
        return ViewShape(rows=1, columns=_up(total, columns.multiple_of), packed=True)
    return ViewShape(rows=len(batch.input_ids), columns=_up(int(batch.lengths.max()), columns.multiple_of), packed=False)


def common_shape(shapes: Sequence[ViewShape]) -> ViewShape:
    """A shape that holds all of these, which are all packed or all plain."""
    return ViewShape(rows=max(s.rows for s in shapes), columns=max(s.columns for s in shapes), packed=shapes[0].packed)


def make_view(index: int, batch: Batch, shape: ViewShape, columns: Columns, *, pad_token_id: int, device: torch.device) -> View:
    """A batch as the model sees it.

    Raises:
        InputError: positions of a sequence that are not 0, 1, 2, ..., which megatron-core's rotary embedding would ignore.
    """
    places_RC, positions_RC = np.full((2, shape.rows, shape.columns), -1, np.int64)
    bounds = [0]
    width = batch.input_ids.shape[1]
    for length, span, row, start in zip(batch.lengths, _spans(batch, columns), batch.rows, batch.starts, strict=True):
        if not np.array_equal(batch.position_ids[..., row, start : start + length], np.arange(length)):
            raise InputError(
                "a sequence's position_ids are not 0, 1, 2, ...: megatron-core's rotary embedding counts a sequence's tokens itself. Leave "
                "position_ids out, or let them begin at 0 in each sequence."
            )
        into = (0, slice(bounds[-1], bounds[-1] + length)) if shape.packed else (row, slice(0, length))
        places_RC[into] = row * width + start + np.arange(length)
        positions_RC[into] = np.arange(length)
        if shape.packed:
            bounds.append(bounds[-1] + int(span))
    if bounds[-1] < shape.columns:
        bounds.append(shape.columns)
    places_PRK = np.stack([places_RC[:, columns.of_rank(bounds, rank)] for rank in range(columns.cp_size)])
    mine = columns.of_rank(bounds, columns.cp_rank)
    places_RK, positions_RK = places_RC[:, mine], np.maximum(positions_RC[:, mine], 0)
    padding = places_RK < 0

    def pick(array_BT: NDArray[np.generic], fill: float) -> torch.Tensor:
        picked = array_BT.reshape(-1)[np.maximum(places_RK, 0)]
        return torch.as_tensor(np.where(padding, np.array(fill, picked.dtype), picked), device=device)

    return View(
        index=index,
        batch=batch,
        shape=shape,
        input_ids_RK=pick(batch.input_ids, pad_token_id),
        position_ids_RK=torch.as_tensor(positions_RK, device=device),
        targets_RK=pick(batch.targets, 0),
        temperature_RK=pick(batch.temperature, 1),
        padding_RK=torch.as_tensor(padding, device=device) if (places_PRK < 0).any() else None,
        places_PRK=places_PRK,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device) if shape.packed else None,
        max_length=int(np.diff(bounds).max()),
    )


def with_fillers(views: list[View], multiple_of: int) -> list[View]:
    """The views and as many fillers as make their number a multiple."""
    return views + [replace(views[-1], is_filler=True)] * (-len(views) % multiple_of)


def _spans(batch: Batch, columns: Columns) -> NDArray[np.int64]:
    return -(-batch.lengths // columns.sequence_multiple_of) * columns.sequence_multiple_of


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
