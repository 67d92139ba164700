"""The collated batch, and the way back from it.

Shape suffixes: B rows of a batch, T columns of it, S sequences in it, T_i tokens of sequence i, A axes of a position.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ._errors import FormatError

PaddingSide = Literal["left", "right"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A collated batch: numpy arrays `[B, T]`, where T is the longest row rounded up to the alignment.

    A row holds one sequence, or several that must not see one another: those of a packed row, or, padding-free, all of the batch (B is 1).
    Column t predicts the next token, so all that is known of token t+1 is stored at column t: `targets`, `loss_mask`, `logprobs`,
    `ref_logprobs` and `advantages` are shifted by one. The column of a sequence's last token predicts nothing: its target is the pad
    token and its mask 0. The three optional arrays are None when no feature has them.

    Args:
        input_ids: int64; the pad token on padding.
        position_ids: int64; anew from each sequence; 0 on padding. `[A, B, T]` where a feature's have axes.
        targets: int64; the next token's id, or that of the feature's own `targets` (the pad token where there is none, so that it can be looked
            up in the vocabulary).
        loss_mask: float32; 0 where the target is not trained on, else 1 or the target's loss weight.
        valid: bool; the column holds a real token.
        sequence_ids: int64; the index of the sequence in the batch, -1 on padding.
        logprobs: float32, of the targets under the policy that sampled.
        ref_logprobs: float32, of the targets under the reference policy.
        advantages: float32; a feature's single number is repeated for all of its targets.
        temperature: float32; each sequence's own; 1 on padding.
        lengths: int64 `[S]`, the T_i. Where each row holds one sequence, S is B.
        rows: int64 `[S]`, the row that each sequence is in.
        starts: int64 `[S]`, the column where each begins.
        spans: int64 `[S]`, the columns that each takes with the padding to `sequence_alignment`.
        feature_ids: int64 `[S]`, which of the collated features each is of.
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
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    spans: NDArray[np.int64]
    feature_ids: NDArray[np.int64]
    padding_side: PaddingSide = "right"

    @property
    def is_packed(self) -> bool:
        """Whether some row holds more than one sequence, so that attention must be kept from crossing."""
        return len(self.rows) > len(self.input_ids)

    @cached_property
    def cu_seq_lens(self) -> NDArray[np.int32]:
        """Where each segment begins in the flattened batch of B * T columns, and the end: every sequence with its own padding, and what
        padding is left in a row, are segments that do not attend to one another."""
        num_rows, columns = self.input_ids.shape
        begins = self.rows * columns + self.starts
        row_bounds = np.arange(num_rows + 1) * columns
        return np.unique(np.concatenate([begins, begins + self.spans, row_bounds])).astype(np.int32)

    @property
    def max_length(self) -> int:
        """The columns of the longest segment."""
        return int(np.diff(self.cu_seq_lens).max())

    def flash_attention_kwargs(self) -> dict[str, Any]:
        """`cu_seq_lens_q`, `cu_seq_lens_k` (int32 `[segments + 1]`), `max_length_q` and `max_length_k`, as a transformers model with
        flash attention takes them for one packed row (transformers' FlashAttentionKwargs).

        Raises:
            FormatError: more than one row.
        """
        if len(self.input_ids) != 1:
            raise FormatError(f"a batch of {len(self.input_ids)} rows is not padding-free; collate it with InputProcessor(padding_free=True)")
        bounds, longest = self.cu_seq_lens, self.max_length
        return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}

    def split(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """The columns of each sequence of an array `[B, T, ...]`, unshifted and without padding: S arrays `[T_i, ...]`.

        Raises:
            FormatError: an array of another shape.
        """
        array = np.asarray(array)
        if array.shape[:2] != self.input_ids.shape:
            raise FormatError(f"split takes an array of the batch's shape {self.input_ids.shape}, not {array.shape}")
        places = zip(self.rows.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True)
        return [array[row, start : start + length] for row, start, length in places]

    def unshift_sequences(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """Per-target values `[B, T]` back to one array `[T_i]` a sequence, aligned with its `input_ids`; index 0 is 0.

        Raises:
            FormatError: an array of another shape.
        """
        array = np.asarray(array)
        if array.shape != self.input_ids.shape:
            raise FormatError(f"unshift takes an array of the batch's shape {self.input_ids.shape}, not {array.shape}")
        return [np.concatenate([np.zeros(1, array.dtype), values[:-1]]) for values in self.split(array)]

    def unshift(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """Per-target values `[B, T]` back to one array a collated feature, aligned with its `input_ids`; 0 at the first token of each
        sequence. A feature that held several has theirs one after another.

        Raises:
            FormatError: an array of another shape.
        """
        return self._by_feature(self.unshift_sequences(array))

    def split_features(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """Values of an array `[B, T, ...]`, unshifted, as one array a collated feature; those of several sequences one after another.

        Raises:
            FormatError: an array of another shape.
        """
        return self._by_feature(self.split(array))

    def _by_feature(self, sequences: list[NDArray[Any]]) -> list[NDArray[Any]]:
        if not self.is_packed:
            return sequences
        bounds = np.flatnonzero(np.diff(self.feature_ids)) + 1
        return [np.concatenate(sequences[begin:end]) for begin, end in zip([0, *bounds], [*bounds, len(sequences)], strict=True)]
