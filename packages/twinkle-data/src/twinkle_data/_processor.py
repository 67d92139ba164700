"""Collation: sequences of different lengths become one rectangle of arrays. The only place that shifts.

Shape suffixes: B rows of a batch, T columns of it, T_i tokens of sequence i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ._errors import FormatError
from ._formats import IGNORE_INDEX, InputFeature

PaddingSide = Literal["left", "right"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A collated batch: numpy arrays `[B, T]`, where T is the longest sequence rounded up to the alignment.

    Column t predicts the next token, so all that is known of token t+1 is stored at column t: `targets`, `loss_mask`, `logprobs`,
    `ref_logprobs` and `advantages` are shifted by one. The column of a sequence's last token predicts nothing: its target is the pad
    token and its mask 0. The three optional arrays are None when no feature has them.

    Args:
        input_ids: int64; the pad token on padding.
        position_ids: int64; 0 on padding.
        targets: int64; the next token's id (the pad token where there is none, so that it can be looked up in the vocabulary).
        loss_mask: float32; 0 where the target is not trained on, else 1 or the target's loss weight.
        valid: bool; the column holds a real token.
        sequence_ids: int64; the index of the sequence in the batch, -1 on padding.
        logprobs: float32, of the targets under the policy that sampled.
        ref_logprobs: float32, of the targets under the reference policy.
        advantages: float32; a feature's single number is repeated for all of its targets.
        temperature: float32; 1 on padding.
        lengths: int64 `[B]`, the T_i.
        padding_side: where the padding is.
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    valid: NDArray[np.bool_]
    sequence_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32] | None
    ref_logprobs: NDArray[np.float32] | None
    advantages: NDArray[np.float32] | None
    temperature: NDArray[np.float32]
    lengths: NDArray[np.int64]
    padding_side: PaddingSide = "right"

    def unshift(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """Per-target values `[B, T]` back to one array `[T_i]` a sequence, aligned with its `input_ids`; index 0 is 0.

        Raises:
            FormatError: an array of another shape.
        """
        array = np.asarray(array)
        if array.shape != self.input_ids.shape:
            raise FormatError(f"unshift takes an array of the batch's shape {self.input_ids.shape}, not {array.shape}")
        rows: list[NDArray[Any]] = []
        for row, length in zip(array, self.lengths.tolist(), strict=True):
            start = len(row) - length if self.padding_side == "left" else 0
            out = np.zeros(length, array.dtype)
            out[1:] = row[start : start + length - 1]
            rows.append(out)
        return rows


@dataclass(frozen=True, kw_only=True)
class InputProcessor:
    """Collates features into a `Batch`.

    Args:
        pad_token_id: fills the rectangle.
        alignment: the number of columns is a multiple of it (tensor-parallel size under sequence parallelism, twice the
            context-parallel size, 8 or 16 for low-precision kernels, or their least common multiple).
        padding_side: 'right' for training; 'left' when rows must end in the same column.

    Raises:
        FormatError: an alignment below 1, a negative pad token, an unknown side.
    """

    pad_token_id: int = 0
    alignment: int = 1
    padding_side: PaddingSide = "right"

    def __post_init__(self) -> None:
        if self.alignment < 1:
            raise FormatError(f"InputProcessor.alignment is {self.alignment}; it must be at least 1")
        if self.pad_token_id < 0:
            raise FormatError(f"InputProcessor.pad_token_id is {self.pad_token_id}; it must be a token of the vocabulary")
        if self.padding_side not in ("left", "right"):
            raise FormatError(f"InputProcessor.padding_side is {self.padding_side!r}; it must be 'left' or 'right'")

    def __call__(self, features: Sequence[InputFeature]) -> Batch:
        """Collates B features.

        Raises:
            FormatError: no features, something that is no feature, or a field that some have and others lack: a missing
                log-probability or advantage must not pass for 0.
        """
        if len(features) == 0:
            raise FormatError("there is nothing to collate: the list of features is empty")
        for index, feature in enumerate(features):
            if not isinstance(feature, InputFeature):
                raise FormatError(f"features[{index}] is a {type(feature).__name__}, not an InputFeature; encode it with a Template first")
        lengths = np.array([len(feature) for feature in features], np.int64)
        columns = -(-int(lengths.max()) // self.alignment) * self.alignment
        starts = columns - lengths if self.padding_side == "left" else np.zeros_like(lengths)

        def blank(fill: float, dtype: type) -> NDArray[Any]:
            return np.full((len(features), columns), fill, dtype)

        pad = self.pad_token_id
        input_ids, targets = blank(pad, np.int64), blank(pad, np.int64)
        position_ids, sequence_ids = blank(0, np.int64), blank(-1, np.int64)
        loss_mask, temperature = blank(0, np.float32), blank(1, np.float32)
        optional = {name: blank(0, np.float32) for name in ("logprobs", "ref_logprobs", "advantages") if _all_or_none(features, name)}
        for row, (feature, start, length) in enumerate(zip(features, starts.tolist(), lengths.tolist(), strict=True)):
            own, shifted = slice(start, start + length), slice(start, start + length - 1)
            input_ids[row, own] = feature.input_ids
            position_ids[row, own] = np.arange(length) if feature.position_ids is None else feature.position_ids
            sequence_ids[row, own] = row
            temperature[row, own] = feature.temperature
            targets[row, shifted] = feature.input_ids[1:]
            loss_mask[row, shifted] = _loss_mask(feature)[1:]
            for name, array in optional.items():
                value = getattr(feature, name)
                array[row, shifted] = value if isinstance(value, float) else value[1:]
        return Batch(
            input_ids=input_ids,
            position_ids=position_ids,
            targets=targets,
            loss_mask=loss_mask,
            valid=sequence_ids >= 0,
            sequence_ids=sequence_ids,
            logprobs=optional.get("logprobs"),
            ref_logprobs=optional.get("ref_logprobs"),
            advantages=optional.get("advantages"),
            temperature=temperature,
            lengths=lengths,
            padding_side=self.padding_side,
        )


def _loss_mask(feature: InputFeature) -> NDArray[np.float32]:
    if feature.labels is not None:
        mask = (feature.labels != IGNORE_INDEX).astype(np.float32)
    elif feature.completion_mask is not None:
        mask = feature.completion_mask.astype(np.float32)
    else:
        mask = np.ones(len(feature), np.float32)
    return mask if feature.loss_weights is None else mask * feature.loss_weights


def _all_or_none(features: Sequence[InputFeature], name: str) -> bool:
    have = [getattr(feature, name) is not None for feature in features]
    if any(have) and not all(have):
        raise FormatError(f"features[{have.index(False)}] has no {name}, others of the batch do; give it to all of them or to none")
    return have[0]
