"""Several sequences in one row, and the one row back in sequences.

Shape suffixes: T tokens of the row, S sequences of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._errors import FormatError
from ._formats import IGNORE_INDEX, InputFeature
from ._wording import a_kind

_ALIGNED = (
    "input_ids",
    "labels",
    "targets",
    "position_ids",
    "completion_mask",
    "loss_weights",
    "logprobs",
    "ref_logprobs",
    "advantages",
    "weight_versions",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedFeature:
    """One row of several sequences, which do not see one another: `PackingDataset` makes them, `InputProcessor` collates them.

    The sequences are kept as they are, each with its own temperature, weight version and user data. The arrays of the row, `[T]`, are put
    together when they are asked for: `position_ids` begin anew with each sequence, and `labels` are -100 at the first token of each, which
    nothing of its sequence predicts. A feature whose position ids begin anew at 0 holds several sequences, and is taken apart.

    Raises:
        FormatError: no sequence, or something that is no InputFeature.
    """

    features: Sequence[InputFeature]

    if TYPE_CHECKING:  # what may be given; the field tells what is kept

        def __init__(self, *, features: Sequence[InputFeature]) -> None: ...

    def __post_init__(self) -> None:
        features = tuple(self.features)
        if not features:
            raise FormatError("PackedFeature.features is empty; a packed row has at least one sequence")
        for index, feature in enumerate(features):
            if not isinstance(feature, InputFeature):
                raise FormatError(f"PackedFeature.features[{index}] is {a_kind(feature)}, not an InputFeature")
        object.__setattr__(self, "features", tuple(sequence for feature in features for sequence in sequences_of(feature)))

    def __len__(self) -> int:
        """The number of tokens T of all sequences together."""
        return sum(map(len, self.features))

    def __repr__(self) -> str:
        return f"<PackedFeature of {len(self.features)} {'sequence' if len(self.features) == 1 else 'sequences'}, {len(self)} tokens>"

    def __eq__(self, other: object) -> bool:
        """Equal when the sequences are."""
        return self.features == other.features if isinstance(other, PackedFeature) else NotImplemented

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __getstate__(self) -> dict[str, Any]:
        return {"features": self.features}

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The tokens of each sequence, `[S]`."""
        return np.array([len(feature) for feature in self.features], np.int64)

    @cached_property
    def cu_seq_lens(self) -> NDArray[np.int32]:
        """Where each sequence begins, and the end, `[S + 1]`."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @cached_property
    def input_ids(self) -> NDArray[np.int64]:
        """The tokens of all sequences, one after another, int64 `[T]`."""
        return np.concatenate([feature.input_ids for feature in self.features])

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """The token where it is trained on, else -100; int64 `[T]`."""
        trained = np.concatenate([loss_mask(feature) != 0 for feature in self.features])
        trained[self.cu_seq_lens[:-1]] = False
        return np.where(trained, self.input_ids, IGNORE_INDEX)

    @cached_property
    def position_ids(self) -> NDArray[np.int64]:
        """0, 1, 2, ... in each sequence, unless it has its own; int64 `[T]`, or `[A, T]` with A axes."""
        return np.concatenate(positions(self.features), axis=-1)

    @cached_property
    def completion_mask(self) -> NDArray[np.bool_] | None:
        """`[T]`; None unless every sequence has one. So are the four that follow."""
        return self._joined("completion_mask")

    @cached_property
    def loss_weights(self) -> NDArray[np.float32] | None:
        """float32 `[T]`."""
        return self._joined("loss_weights")

    @cached_property
    def logprobs(self) -> NDArray[np.float32] | None:
        """float32 `[T]`."""
        return self._joined("logprobs")

    @cached_property
    def ref_logprobs(self) -> NDArray[np.float32] | None:
        """float32 `[T]`."""
        return self._joined("ref_logprobs")

    @cached_property
    def advantages(self) -> NDArray[np.float32] | None:
        """float32 `[T]`; a sequence's single number is repeated for all of its tokens."""
        return self._joined("advantages")

    def _joined(self, name: str) -> Any:
        values = [getattr(feature, name) for feature in self.features]
        if any(value is None for value in values):
            return None
        return np.concatenate(
            [np.full(len(f), value, np.float32) if isinstance(value, float) else value for f, value in zip(self.features, values, strict=True)]
        )


def loss_mask(feature: InputFeature) -> NDArray[np.float32]:
    """The weight of each token's loss: 0 where it is not trained on, else 1 or its loss weight; float32 `[T]`."""
    if feature.labels is not None:
        mask = (feature.labels != IGNORE_INDEX).astype(np.float32)
    elif feature.completion_mask is not None:
        mask = feature.completion_mask.astype(np.float32)
    else:
        mask = np.ones(len(feature), np.float32)
    return mask if feature.loss_weights is None else mask * feature.loss_weights


def positions(features: Sequence[InputFeature]) -> list[NDArray[np.int64]]:
    """The position ids of each sequence: all `[T_i]`, or, where one has several axes, all `[A, T_i]`.

    Raises:
        FormatError: sequences with different numbers of axes above one.
    """
    found = [np.arange(len(feature)) if feature.position_ids is None else feature.position_ids for feature in features]
    axes = {array.shape[0] for array in found if array.ndim == 2}
    if len(axes) > 1:
        raise FormatError(f"some sequences have position_ids of {min(axes)} axes, others of {max(axes)}; they cannot share a row or a batch")
    return [np.broadcast_to(array, (axis, array.shape[-1])) for axis in axes for array in found] if axes else found


def cut(feature: InputFeature, part: slice) -> InputFeature:
    """The tokens of a slice as a sequence of its own: position ids begin anew, and nothing precedes its first token.

    Raises:
        FormatError: a slice without tokens.
    """
    changed: dict[str, Any] = {}
    for name in _ALIGNED:
        value = getattr(feature, name)
        if isinstance(value, np.ndarray):
            changed[name] = value[..., part]
    if len(changed["input_ids"]) == 0:
        raise FormatError(f"{part} of a sequence of {len(feature)} tokens has none")
    if "position_ids" in changed:
        changed["position_ids"] = _from_zero(changed["position_ids"])
    for name in {"logprobs", "ref_logprobs"} & changed.keys():
        changed[name] = np.concatenate([[0.0], changed[name][1:]])
    return replace(feature, **changed)


def _from_zero(position_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The positions of a part: its first sequence counts from 0; those behind it, which begin at 0 already, stay.

    All axes move by the same, so that text keeps the same position on each. In the middle of an image the first token need not be at the least.
    """
    if position_ids.ndim > 1:
        return position_ids - position_ids.min()
    starts = np.flatnonzero(position_ids[1:] == 0) + 1
    end = starts[0] if len(starts) else len(position_ids)
    return np.concatenate([position_ids[:end] - position_ids[:end].min(), position_ids[end:]])


def sequences_of(row: InputFeature | PackedFeature) -> Sequence[InputFeature]:
    """The sequences of a row. One with single-axis position ids that begin anew at 0 holds several, as transformers and flash-attn read it."""
    if isinstance(row, PackedFeature):
        return row.features
    if row.position_ids is None or row.position_ids.ndim > 1:
        return (row,)
    starts = np.flatnonzero(row.position_ids[1:] == 0) + 1
    if not len(starts):
        return (row,)
    bounds = [0, *starts.tolist(), len(row)]
    return [cut(row, slice(begin, end)) for begin, end in pairwise(bounds)]
