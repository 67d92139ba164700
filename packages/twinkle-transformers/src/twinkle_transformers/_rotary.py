"""Rotary frequencies that depend on how long a sequence is: of its own length, not of the longest in the batch.

transformers (5.19) takes them ('longrope' of Phi-3 and Phi-4, 'dynamic') from the largest position that a call has: of the longest row, of this
rank's columns where rows are divided, or of a longer call before.

Shape suffixes: B rows, T columns of this rank.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def by_own_length(model: Any, lengths: Callable[[], torch.Tensor | None]) -> Callable[[], None]:
    """Makes a model of transformers take frequencies by the length of each token's own sequence; gives what undoes it.

    lengths: of the sequence of each token of the next call, ``[B, T]``; None leaves it to transformers.
    """
    patched: list[Any] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", "")
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if "longrope" in kinds or any("dynamic" in kind for kind in kinds):
            module.forward = partial(_forward, module, lengths)
            patched.append(module)

    def undo() -> None:
        for module in patched:
            module.__dict__.pop("forward", None)

    return undo


def _forward(module: Any, lengths: Callable[[], torch.Tensor | None], x: torch.Tensor, position_ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
    lengths_BT = lengths()
    if lengths_BT is None:
        return type(module).forward(module, x, position_ids, *rest, **named)
    lengths_BT = torch.where(lengths_BT > _unscaled(module), lengths_BT, 1)
    whole: tuple[torch.Tensor, ...] | None = None
    alone = False
    for length in lengths_BT.unique().tolist():
        chosen_BT = lengths_BT == length
        # The last column says how long they are.
        last = torch.full_like(position_ids[..., :1], length - 1)
        positions = torch.cat([torch.where(chosen_BT, position_ids, 0), last], -1)
        fresh = copy.copy(module)  # it keeps the frequencies of the longest call
        fresh._buffers = dict(module._buffers)
        out = type(module).forward(fresh, x, positions, *rest, **named)
        alone = isinstance(out, torch.Tensor)
        parts = tuple(part[..., :-1, :] for part in ((out,) if alone else out))
        whole = parts if whole is None else tuple(torch.where(chosen_BT[..., None], new, old) for new, old in zip(parts, whole, strict=True))
    assert whole is not None, "a batch has a token"
    return whole[0] if alone else whole


def _unscaled(module: Any) -> int:
    """Up to which length all sequences have the same frequencies."""
    parameters = module.config.rope_parameters
    each = parameters.values() if isinstance(module.rope_type, dict) else [parameters]
    return min(
        [
            module.original_max_seq_len,
            *(of_one["original_max_position_embeddings"] for of_one in each if "original_max_position_embeddings" in of_one),
        ]
    )
