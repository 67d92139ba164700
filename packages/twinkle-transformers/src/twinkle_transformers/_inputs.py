"""A collated batch as a model's arguments.

Shape suffixes: B rows, T columns of the batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from twinkle_data import Batch

from ._attention import Rows


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """What the model and the loss of its logits take, on their device; all ``[B, T]``.

    rows: for the model's attention. padding_mask_BT: 1 where a token is real; for other layers, and for models whose attention is their own.
    """

    rows: Rows
    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    padding_mask_BT: torch.Tensor
    targets_BT: torch.Tensor
    temperature_BT: torch.Tensor


def model_inputs(batch: Batch, device: torch.device) -> ModelInputs:
    """The whole batch on this rank."""

    def tensor(array: NDArray[Any]) -> torch.Tensor:
        return torch.as_tensor(array, device=device)

    # Padding behind a row's only sequence is seen by nothing; all else needs to be told apart.
    plain = not batch.is_packed and bool(batch.valid[:, 0].all())
    rows = Rows(
        shape=batch.input_ids.shape,
        sequence_ids_BT=None if plain else tensor(batch.sequence_ids),
        segments=() if plain else tuple(segment_bounds(batch).tolist()),
    )
    return ModelInputs(
        rows=rows,
        input_ids_BT=tensor(batch.input_ids),
        position_ids_BT=tensor(batch.position_ids),
        padding_mask_BT=tensor(batch.valid.astype(np.int64)),
        targets_BT=tensor(batch.targets),
        temperature_BT=tensor(batch.temperature),
    )


def segment_bounds(batch: Batch) -> NDArray[np.int64]:
    """Where each stretch of one sequence, or of padding, begins among the B * T columns, and the end."""
    num_rows, columns = batch.input_ids.shape
    ids = batch.sequence_ids
    begins = np.ones((num_rows, columns), dtype=bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return np.append(np.flatnonzero(begins), num_rows * columns)
