"""What a model's own code does with packed rows, recurrent layers and experts: asked of the model itself, while it is whole."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ._attention import Attention
from ._errors import UnsupportedModelError
from ._expert_parallel import understood_blocks
from ._gated_delta import GatedDeltaNetPaddingFreePatch
from ._packing import packing_fault


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What holds for a model, whichever part of its weights a rank has.

    packing_fault: why it must not be given packed rows, None when it may. special: what its attention has beside causal softmax. begins_anew: whether
    it has recurrent layers that can be made to begin anew in each sequence. blocks: its kinds of blocks of experts, see `understood_blocks`.
    """

    packing_fault: str | None
    special: frozenset[str]
    begins_anew: bool
    blocks: Mapping[str, bool]


def examine(model: Any, *, experts: bool) -> Findings:
    """Runs a model that is whole, in float32 on the CPU, a few times; it is left as it was.

    experts: whether its blocks of experts are looked at.

    Raises:
        UnsupportedModelError: its attention refuses to run as it is set up, or a block of experts is not understood.
    """
    attention, reason = attention_of(model)
    delta: GatedDeltaNetPaddingFreePatch | None = None
    try:
        with suppress(UnsupportedModelError):  # recurrent layers that are not known are found out by what packed rows give
            delta = GatedDeltaNetPaddingFreePatch().apply(model)
        return Findings(
            packing_fault=packing_fault(model, attention, reason),
            special=frozenset(() if attention is None else attention.special),
            begins_anew=delta is not None,
            blocks=understood_blocks(model) if experts else {},
        )
    finally:
        if delta is not None:
            delta.remove()
        if attention is not None:
            attention.remove()


def attention_of(model: Any) -> tuple[Attention | None, str]:
    """The model's attention, or None and why it cannot be told anything."""
    try:
        return Attention(model), ""
    except UnsupportedModelError as error:
        return None, str(error)
