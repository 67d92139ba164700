"""The turns of a conversation among its tokens: masks, which of them are trained on, and what each is worth."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._errors import FormatError
from ._formats import IGNORE_INDEX, InputFeature


def turn_spans(feature: InputFeature) -> list[tuple[int, int]]:
    """First token and the one after the last of each turn that the assistant wrote: the runs of `completion_mask`, K of them.

    A turn ends at its end token, so two turns are never one run: a template writes a header between them.
    """
    if feature.completion_mask is None:
        return []
    edges = np.flatnonzero(np.diff(feature.completion_mask.astype(np.int8), prepend=0, append=0))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def turn_masks(feature: InputFeature) -> NDArray[np.bool_]:
    """bool `[K, T]`: row k is true on the tokens of turn k."""
    spans = turn_spans(feature)
    masks = np.zeros((len(spans), len(feature)), np.bool_)
    for mask, (start, stop) in zip(masks, spans, strict=True):
        mask[start:stop] = True
    return masks


def train_on_turns(feature: InputFeature, turns: Iterable[int]) -> InputFeature:
    """The feature with labels on these turns (negative indices count from the last) and on no other token.

    Raises:
        FormatError: a turn that is not there.
    """
    spans = turn_spans(feature)
    labels = np.full(len(feature), IGNORE_INDEX, np.int64)
    for turn in turns:
        if not -len(spans) <= turn < len(spans):
            raise FormatError(f"turn {turn} of a feature with {len(spans)} turns of the assistant")
        start, stop = spans[turn]
        labels[start:stop] = feature.input_ids[start:stop]
    return replace(feature, labels=labels)


def with_turn_advantages(feature: InputFeature, advantages: Sequence[float] | ArrayLike) -> InputFeature:
    """The feature with an advantage for each of its K turns, spread over the turn's tokens; 0 on all others.

    Raises:
        FormatError: another number of advantages than of turns.
    """
    spans, values = turn_spans(feature), np.asarray(advantages, np.float32)
    if values.shape != (len(spans),):
        raise FormatError(f"advantages of shape {values.shape} for a feature with {len(spans)} turns of the assistant; one a turn is needed")
    spread = np.zeros(len(feature), np.float32)
    for (start, stop), value in zip(spans, values, strict=True):
        spread[start:stop] = value
    return replace(feature, advantages=spread)
