"""What a training checkpoint is made of: rectangles of whole tensors.

Every layout cuts the same whole tensors into other rectangles, so that what one layout wrote another can read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A rectangle of a whole tensor.

    tensor: a view of it in the model or the optimizer. key, shape: of the whole. offset: of its first element. is_copy: another rank has it under
    the same key; it is read, but not written.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    is_copy: bool = False
