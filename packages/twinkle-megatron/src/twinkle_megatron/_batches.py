"""From collated batches to the tensors that the model sees.

Shape suffixes: B rows of a micro-batch, T tokens of a row; R and C the rows and columns that the model sees, B and T or more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from twinkle_data import Batch
from twinkle_train import InputError, Row, num_micro_batches


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """A collated batch and what the model is fed with, on the model's device.

    With a pipeline all micro-batches of a call are padded to one shape [R, C], so that stages need not tell each other
    shapes; the padding is on the right and below, where causal attention does not look.
    """

    index: int
    batch: Batch
    input_ids_RC: torch.Tensor
    position_ids_RC: torch.Tensor
    is_filler: bool = False

    def cut(self, values_RCV: torch.Tensor) -> torch.Tensor:
        """What belongs to the batch itself, [B, T, V]."""
        rows, columns = self.batch.input_ids.shape
        return values_RCV[:rows, :columns]

    def tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        """An array [B, T] of the batch, on the model's device."""
        return torch.as_tensor(array, device=self.input_ids_RC.device)


def pipeline_micro_batches(num_rows: int, micro_batch_size: int | None, pp_size: int) -> int:
    """How many micro-batches a pipeline runs for that many rows: one a stage when no size is given, as far as there are rows."""
    return min(pp_size, num_rows) if micro_batch_size is None else num_micro_batches(num_rows, micro_batch_size)


def make_micro_batches(
    batches: Sequence[Batch], *, equal_shapes: bool, multiple_of: int, pad_token_id: int, device: torch.device
) -> list[MicroBatch]:
    """The tensors of these batches, each padded to the largest when ``equal_shapes``.

    Fillers, which have no loss and no result, make their number a multiple of ``multiple_of``.
    """
    largest = tuple(max(batch.input_ids.shape[axis] for batch in batches) for axis in (0, 1))
    micro_batches: list[MicroBatch] = []
    for index, batch in enumerate(batches):
        shape = largest if equal_shapes else batch.input_ids.shape
        missing = [(0, size - have) for size, have in zip(shape, batch.input_ids.shape, strict=True)]
        micro_batches.append(
            MicroBatch(
                index=index,
                batch=batch,
                input_ids_RC=torch.as_tensor(np.pad(batch.input_ids, missing, constant_values=pad_token_id), device=device),
                position_ids_RC=torch.as_tensor(np.pad(batch.position_ids, missing), device=device),
            )
        )
    return micro_batches + [replace(micro_batches[-1], is_filler=True)] * (-len(micro_batches) % multiple_of)


def check_features(features: Sequence[Row], vocab_size: int) -> None:
    """Refuses rows that would train silently wrong.

    Raises:
        InputError: positions other than 0, 1, 2, ... (megatron-core's rotary embedding counts the tokens of a row and ignores them), or
            tokens beyond the vocabulary (the padded one of tensor parallelism has some that mean nothing).
    """
    for index, feature in enumerate(features):
        if feature.position_ids is not None and not np.array_equal(feature.position_ids, np.arange(len(feature.input_ids))):
            raise InputError(
                f"inputs[{index}].position_ids are not 0, 1, 2, ...: packed rows are not supported by MegatronModel in this version; "
                "give one sequence a row and leave position_ids out."
            )
        if feature.input_ids.max() >= vocab_size:
            raise InputError(
                f"inputs[{index}].input_ids has the token {feature.input_ids.max()}, and the model's vocabulary has {vocab_size}: "
                "encode with the tokenizer of this model."
            )
