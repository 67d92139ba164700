"""Collation: sequences of different lengths become one rectangle of arrays, or one row. The only place that shifts.

Shape suffixes: B rows of a batch, T columns of it, S sequences in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._batch import Batch, PaddingSide
from ._checks import is_count
from ._errors import FormatError
from ._formats import InputFeature
from ._packed import PackedFeature, loss_mask, positions, sequences_of
from ._wording import a_kind

_SHIFTED = ("logprobs", "ref_logprobs", "advantages")


@dataclass(frozen=True, kw_only=True)
class InputProcessor:
    """Collates features into a `Batch`: a row a feature, or, padding-free, one row for all of them.

    Args:
        pad_token_id: fills the rectangle.
        alignment: the number of columns is a multiple of it (tensor-parallel size under sequence parallelism, Ulysses size, 8 or 16 for
            low-precision kernels, or their least common multiple).
        sequence_alignment: each sequence of a row takes a multiple of so many columns, its padding behind it, and so does what padding is
            left at the end (twice the context-parallel size for zigzag ring attention, which shards each sequence by itself).
        padding_side: 'right' for training; 'left' when rows must end in the same column.
        padding_free: all sequences one after another in one row, so that nothing is padded but for alignment.

    Raises:
        FormatError: an alignment below 1, a negative pad token, an unknown side, padding on the left of a padding-free row.
    """

    pad_token_id: int = 0
    alignment: int = 1
    sequence_alignment: int = 1
    padding_side: PaddingSide = "right"
    padding_free: bool = False

    def __post_init__(self) -> None:
        for name in ("alignment", "sequence_alignment"):
            if not is_count(value := getattr(self, name)) or value < 1:
                raise FormatError(f"InputProcessor.{name} is {value!r}; it must be a whole number, at least 1")
        if not is_count(self.pad_token_id):
            raise FormatError(f"InputProcessor.pad_token_id is {self.pad_token_id!r}; it must be a token of the vocabulary")
        if self.padding_side not in ("left", "right"):
            raise FormatError(f"InputProcessor.padding_side is {self.padding_side!r}; it must be 'left' or 'right'")
        if self.padding_side == "left" and (self.padding_free or self.sequence_alignment > 1):
            raise FormatError("InputProcessor.padding_side is 'left'; padding-free rows and aligned sequences have their padding on the right")

    def __call__(self, features: Sequence[InputFeature | PackedFeature]) -> Batch:
        """Collates features, one after another into one row when padding-free, else each into its own.

        An `InputFeature` whose position ids begin anew at 0 is a packed row, too; its sequences are kept apart.

        Raises:
            FormatError: no features, something that is no feature, or a field that some have and others lack: a missing
                log-probability or advantage must not pass for 0.
        """
        sequences, feature_ids = _sequences(features)
        layout = self._layout(sequences, feature_ids)

        def blank(fill: float, dtype: type) -> NDArray[Any]:
            return np.full(layout.shape, fill, dtype)

        pad = self.pad_token_id
        input_ids, targets = blank(pad, np.int64), blank(pad, np.int64)
        sequence_ids = blank(-1, np.int64)
        own_positions = positions(sequences)
        position_ids = np.zeros((*own_positions[0].shape[:-1], *layout.shape), np.int64)
        mask, temperature = blank(0, np.float32), blank(1, np.float32)
        optional = {name: blank(0, np.float32) for name in _SHIFTED if _all_or_none(sequences, feature_ids, name)}
        for index, (feature, row, start) in enumerate(zip(sequences, layout.rows.tolist(), layout.starts.tolist(), strict=True)):
            own, shifted = slice(start, start + len(feature)), slice(start, start + len(feature) - 1)
            input_ids[row, own] = feature.input_ids
            position_ids[..., row, own] = own_positions[index]
            sequence_ids[row, own] = index
            temperature[row, own] = feature.temperature
            targets[row, shifted] = (feature.input_ids if feature.targets is None else feature.targets)[1:]
            mask[row, shifted] = loss_mask(feature)[1:]
            for name, array in optional.items():
                value = getattr(feature, name)
                array[row, shifted] = value if isinstance(value, float) else value[1:]
        return Batch(
            input_ids=input_ids,
            position_ids=position_ids,
            targets=targets,
            loss_mask=mask,
            valid=sequence_ids >= 0,
            sequence_ids=sequence_ids,
            logprobs=optional.get("logprobs"),
            ref_logprobs=optional.get("ref_logprobs"),
            advantages=optional.get("advantages"),
            temperature=temperature,
            lengths=layout.lengths,
            rows=layout.rows,
            starts=layout.starts,
            spans=layout.spans,
            feature_ids=np.array(feature_ids, np.int64),
            padding_side=self.padding_side,
        )

    def _layout(self, sequences: Sequence[InputFeature], feature_ids: Sequence[int]) -> "_Layout":
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        spans = -(-lengths // self.sequence_alignment) * self.sequence_alignment
        rows = np.zeros_like(lengths) if self.padding_free else np.array(feature_ids, np.int64)
        totals = np.bincount(rows, weights=spans).astype(np.int64)
        multiple = math.lcm(self.alignment, self.sequence_alignment)
        columns = -(-int(totals.max()) // multiple) * multiple
        before = np.cumsum(spans) - spans  # of all rows so far; each row begins anew
        starts = before - np.concatenate([[0], np.cumsum(totals)])[rows]
        if self.padding_side == "left":
            starts += (columns - totals)[rows]
        return _Layout(shape=(len(totals), columns), lengths=lengths, rows=rows, starts=starts, spans=spans)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where each sequence goes."""

    shape: tuple[int, int]
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    spans: NDArray[np.int64]


def _sequences(features: Sequence[InputFeature | PackedFeature]) -> tuple[list[InputFeature], list[int]]:
    """All sequences of all features, and of which feature each is."""
    if isinstance(features, (InputFeature, PackedFeature)):
        raise FormatError(f"a list of features is collated, not {a_kind(features)} alone: [feature]")
    if len(features) == 0:
        raise FormatError("there is nothing to collate: the list of features is empty")
    sequences: list[InputFeature] = []
    feature_ids: list[int] = []
    for index, feature in enumerate(features):
        if not isinstance(feature, (InputFeature, PackedFeature)):
            given: Any = feature
            if isinstance(given, tuple) and all(isinstance(side, InputFeature) for side in given):  # pyright: ignore[reportUnknownVariableType]
                raise FormatError(f"features[{index}] is a pair of features (chosen, rejected): collate [side for pair in features for side in pair]")
            raise FormatError(f"features[{index}] is {a_kind(feature)}, not an InputFeature; encode it with a Template first")
        own = sequences_of(feature)
        sequences += own
        feature_ids += [index] * len(own)
    return sequences, feature_ids


def _all_or_none(sequences: Sequence[InputFeature], feature_ids: Sequence[int], name: str) -> bool:
    have = [getattr(sequence, name) is not None for sequence in sequences]
    if any(have) and not all(have):
        index = feature_ids[have.index(False)]
        raise FormatError(f"features[{index}] has no {name}, others of the batch do; give it to all of them or to none")
    return have[0]
