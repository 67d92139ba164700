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
from ._gated_delta import Runs


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """What the model and the loss of its logits take, on their device; all ``[B, T]``.

    rows: for the model's attention. runs: for its recurrent layers. padding_mask_BT: 1 where a token is real; for other layers, and for models
    whose attention is their own. counted_BT: 1 where a token is of a sequence that is trained on; for the routers' losses and counts.
    """

    rows: Rows
    runs: Runs
    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    padding_mask_BT: torch.Tensor
    counted_BT: torch.Tensor
    targets_BT: torch.Tensor
    temperature_BT: torch.Tensor


def model_inputs(batch: Batch, device: torch.device) -> ModelInputs:
    """The whole batch on this rank."""

    def tensor(array: NDArray[Any]) -> torch.Tensor:
        return torch.as_tensor(array, device=device)

    # Padding behind a row's only sequence is seen by nothing; all else needs to be told apart.
    plain = not batch.is_packed and bool(batch.valid[:, 0].all())
    bounds = tuple(segment_bounds(batch).tolist())
    ids_BT = None if plain else tensor(batch.sequence_ids)
    return ModelInputs(
        rows=Rows(shape=batch.input_ids.shape, sequence_ids_BT=ids_BT, segments=() if plain else bounds, lengths_BL=tensor(sequence_lengths(batch))),
        runs=Runs(bounds=bounds),
        input_ids_BT=tensor(batch.input_ids),
        position_ids_BT=tensor(batch.position_ids),
        padding_mask_BT=tensor(batch.valid.astype(np.int64)),
        counted_BT=tensor(counted_tokens(batch)),
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


def sequence_lengths(batch: Batch) -> NDArray[np.int64]:
    """How many positions the sequence of each token has, ``[B, T]``; 1 at padding."""
    _, which = np.unique(batch.sequence_ids, return_inverse=True)
    which = which.reshape(batch.sequence_ids.shape)
    longest = np.ones(which.max() + 1, dtype=np.int64)
    np.maximum.at(longest, which, batch.position_ids + 1)
    return np.where(batch.valid, longest[which], 1)


def counted_tokens(batch: Batch) -> NDArray[np.int64]:
    """1 where a token is of a sequence of which some token is trained on, ``[B, T]``."""
    trained = np.unique(batch.sequence_ids[batch.loss_mask > 0])
    return (batch.valid & np.isin(batch.sequence_ids, trained)).astype(np.int64)
