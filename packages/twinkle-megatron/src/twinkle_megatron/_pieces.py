"""The pieces of a training checkpoint that this rank has: rectangles of whole weights and of their optimizer states.

Optimizer states that are sharded over data ranks are stretches of flattened weights; each is at most three rectangles of the weight, so that nothing
is gathered to be saved.
"""

from collections.abc import Iterator

import torch

from twinkle_train import Piece

from ._weights import Placement


def weight_pieces(placement: Placement) -> Iterator[Piece]:
    """The pieces of a weight."""
    for first, rows, offset in placement.parts:
        if rows:
            tensor = placement.tensor.detach()[first : first + rows]
            yield Piece(key=placement.key, shape=placement.shape, offset=offset, tensor=tensor, is_copy=placement.is_copy)


def state_pieces(placement: Placement, prefix: str, flat: torch.Tensor, start: int) -> Iterator[Piece]:
    """The pieces of an optimizer state.

    flat: the state of elements start, start + 1, ... of this rank's flattened part of the weight.
    """
    columns = placement.tensor[0].numel()
    end = start + len(flat)
    for first, rows, offset in placement.parts:
        begin, stop = max(start, first * columns), min(end, (first + rows) * columns)
        while begin < stop:
            row, column = divmod(begin, columns)
            if column == 0 and stop - begin >= columns:
                height, width = (stop - begin) // columns, columns
            else:
                height, width = 1, min(stop - begin, columns - column)
            tensor = flat.detach()[begin - start : begin - start + height * width]
            if placement.tensor.dim() == 1:
                where: tuple[int, ...] = (offset[0] + row - first,)
            elif placement.tensor.dim() == 2:
                tensor, where = tensor.view(height, width), (offset[0] + row - first, offset[1] + column)
            else:
                assert width == columns, "weights of more than two axes are not sharded within a row"
                tensor, where = tensor.view(height, *placement.tensor.shape[1:]), (offset[0] + row - first, *offset[1:])
            yield Piece(key=f"{prefix}.{placement.key}", shape=placement.shape, offset=where, tensor=tensor, is_copy=placement.is_copy)
            begin += height * width
