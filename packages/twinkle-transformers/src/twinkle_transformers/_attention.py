"""Attention that keeps the sequences of a packed row apart, whatever implementation and model it is.

transformers looks attention functions, and the functions that make their masks, up by name. Each model gets a name of its own, under which both are
this model's: the mask function is told by the trainer which tokens belong together, so that nothing depends on position ids (which gpt_oss and
afmoe do not hand to their masks, transformers 5.19), on `use_cache`, or on a mask of ones, each of which lets packed sequences see one another there.

Shape suffixes: B rows, T columns, N = B * T tokens, H query heads, K key-value heads, D size of a head.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

from ._errors import UnsupportedModelError
from ._gated_delta import RUNS
from ._rotary import by_own_length

# Implementations that take a mask, and those that take bounds of segments.
_MASKED = ("eager", "sdpa", "flex_attention")
_VARLEN = ("flash_attention_2", "flash_attention_3", "flash_attention_4")

_numbers = itertools.count()

Result = tuple[torch.Tensor, torch.Tensor | None]
AttentionFunction = Callable[..., Result]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the next call of the model is about: whole rows, in the order of their columns, however they are split over ranks.

    sequence_ids_BT: which sequence each token is of; tokens of different sequences do not see one another. None: each row is one sequence,
    with what padding it has behind it, so that causal attention is all there is to it. shape: (B, T).
    segments: where each sequence begins among the B * T tokens, and the end; every sequence is one stretch.
    lengths_BL: how long the sequence of each token of this rank's columns is; for rotary frequencies that depend on it.
    """

    shape: tuple[int, int]
    sequence_ids_BT: torch.Tensor | None = None
    segments: Sequence[int] = ()
    lengths_BL: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What stands in for a mask on its way through the model: that of whole rows, or where causal segments begin; neither is plain causal."""

    rows: Rows
    mask: Any = None
    segments: Sequence[int] = ()


class Attention:
    """The attention of one model, under a name of its own in transformers' registries until `remove`.

    Args:
        model: of transformers.

    Raises:
        UnsupportedModelError: its attention implementation, or its code, cannot be told which tokens belong together; nothing is changed then.
    """

    def __init__(self, model: Any) -> None:
        self.base: str = model.config.get_text_config(decoder=True)._attn_implementation
        self._model = model
        if self.base not in _MASKED + _VARLEN:
            raise UnsupportedModelError(
                f"the attention implementation {self.base!r} of {type(model).__name__} is not known to keep packed or divided sequences apart; "
                f"known are {', '.join(_MASKED + _VARLEN)}"
            )
        if not model._can_set_attn_implementation():
            raise UnsupportedModelError(f"{type(model).__name__} has attention of its own, not from transformers' AttentionInterface")
        self.name = f"twinkle_{next(_numbers)}_{self.base}"
        self.distribute: Callable[[AttentionFunction, Any, Sequence[torch.Tensor], Plan, dict[str, Any]], Result] | None = None
        """Attention over ranks, where sequences are divided: called with the function for whole sequences, the module, q, k, v, plan, options."""
        self.special: set[str] = set()
        """What the model's attention has beside causal softmax, as far as it was called."""
        self.makes_masks = True
        """Whether attention over ranks looks at the plan's mask or segments; without, only at its rows."""
        self._rows: Rows | None = None
        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, self._make_mask)
        model.set_attn_implementation(self.name)
        self._undo_rotary = by_own_length(model, lambda: None if self._rows is None else self._rows.lengths_BL)

    def remove(self) -> None:
        """The model attends as it did before."""
        self._model.set_attn_implementation(self.base)
        self._undo_rotary()
        for registry in (AttentionInterface, AttentionMaskInterface):
            registry._global_mapping.pop(self.name, None)

    @contextmanager
    def of(self, rows: Rows) -> Iterator[None]:
        """Calls of the model in this context are about these rows. A backward that recomputes may come later."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _make_mask(self, *, mask_function: Callable[..., Any] = causal_mask_function, **options: Any) -> Any:
        make = AttentionMaskInterface._global_mapping[self.base]
        rows = self._rows
        if rows is None:  # called by someone else, as in generate
            return make(mask_function=mask_function, **options)
        if mask_function is not causal_mask_function:
            self.special.add("windows or chunks")
        if not self.makes_masks:
            return Plan(rows=rows)
        options |= {"batch_size": rows.shape[0], "q_length": rows.shape[1], "kv_length": rows.shape[1], "attention_mask": None}
        ids = rows.sequence_ids_BT
        if ids is not None:
            if self.base in _VARLEN or (self.base == "sdpa" and mask_function is causal_mask_function):
                return Plan(rows=rows, segments=rows.segments)
            mask_function = and_masks(mask_function, packed_sequence_mask_function(ids))
            options["allow_is_causal_skip"] = False
        elif self.distribute is None:
            return make(mask_function=mask_function, **options)
        return Plan(rows=rows, mask=make(mask_function=mask_function, **options))

    def _attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any) -> Result:
        options.pop(RUNS, None)  # for other layers
        if self.base == "sdpa" and options.get("softcap") is not None:
            # transformers 5.19's sdpa drops it without a word.
            raise UnsupportedModelError(f"{type(module).__name__} caps its attention scores, which 'sdpa' cannot do: set attn_implementation='eager'")
        if options.get("softcap") is not None:
            self.special.add("capped scores")
        if options.get("s_aux") is not None or getattr(module, "sinks", None) is not None:
            self.special.add("sinks")
        whole = self._whole(module)
        if self.distribute is not None:
            if not isinstance(attention_mask, Plan):
                raise UnsupportedModelError(
                    f"{type(module).__name__} made its mask without transformers' mask functions: its sequences cannot be divided over ranks"
                )
            return self.distribute(whole, module, (query, key, value), attention_mask, options)
        return whole(module, query, key, value, attention_mask, **options)

    def _whole(self, module: Any) -> AttentionFunction:
        """Attention of whole sequences, with a Plan or what the implementation itself takes as a mask."""
        function = _eager_function(module) if self.base == "eager" else AttentionInterface._global_mapping[self.base]

        def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any) -> Result:
            if not isinstance(mask, Plan):
                return function(module, query, key, value, mask, **options)
            if not mask.segments:
                return function(module, query, key, value, mask.mask, **options)
            if self.base in _VARLEN:
                return _attend_flattened(function, module, query, key, value, mask.segments, options)
            return _attend_segments(query, key, value, mask.segments, scaling=options.get("scaling"), dropout=options.get("dropout", 0.0)), None

        return attend


def _eager_function(module: Any) -> AttentionFunction:
    """The attention that the model's file writes out itself, with whatever is special about it (sinks, soft-capping)."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedModelError(f"{type(module).__name__}: its file has no eager_attention_forward; choose another attn_implementation")


def _attend_segments(
    query_BHTD: torch.Tensor, key_BKTD: torch.Tensor, value_BKTD: torch.Tensor, segments: Sequence[int], *, scaling: float | None, dropout: float
) -> torch.Tensor:
    """Causal attention within each segment of the rows put one after another, ``[B, T, H, D]``. No mask is made, and nothing outside computed."""
    rows, num_heads, columns, _ = query_BHTD.shape
    query, key, value = (tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (query_BHTD, key_BKTD, value_BKTD))
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, begin:end],
            key[:, :, begin:end],
            value[:, :, begin:end],
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=num_heads != key.shape[1],
        )
        for begin, end in itertools.pairwise(segments)
    ]
    out_HND = torch.cat(parts, dim=2)[0]
    return out_HND.view(num_heads, rows, columns, -1).permute(1, 2, 0, 3).contiguous()


def _attend_flattened(
    function: AttentionFunction,
    module: Any,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    segments: Sequence[int],
    options: dict[str, Any],
) -> Result:
    """Flash attention of variable lengths: all rows as one, with where its segments begin."""
    rows, columns = query_BHTD.shape[0], query_BHTD.shape[2]
    query, key, value = (tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (query_BHTD, key_BKTD, value_BKTD))
    bounds = torch.tensor(segments, dtype=torch.int32, device=query.device)
    longest = max(end - begin for begin, end in itertools.pairwise(segments))
    ours = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest, "position_ids": None}
    out_1NHD, _ = function(module, query, key, value, None, **options | ours)
    return out_1NHD.reshape(rows, columns, *out_1NHD.shape[2:]), None
