"""A mesh as plain text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twinkle_mesh._labels import cell, describe, left_out, pick, span

if TYPE_CHECKING:
    from twinkle_mesh._mesh import DeviceMesh


def mesh_text(mesh: "DeviceMesh") -> str:
    """The sizes (those of 1 left out), then a table: a row for each data rank, a column for each pipeline stage, ranks in the cells."""
    stages = pick(mesh.pp_size)
    rows = [["", *("..." if stage is None else f"stage {stage}" for stage in stages)]] if mesh.pp_size > 1 else []
    gap = -1
    for data_rank in pick(mesh.data_world_size):
        if data_rank is None:
            gap = len(rows)
            continue
        rows.append([f"data {data_rank}", *("..." if stage is None else span(cell(mesh, data_rank, stage)) for stage in stages)])
    table = _align(rows)
    if gap >= 0:
        table.insert(gap, left_out(mesh.data_world_size, "data rank"))
    title, *details = describe(mesh)
    return "\n".join([title, *(f"  {line}" for line in [*details, *table])])


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(text) for text in column) for column in zip(*rows, strict=True)]
    return ["   ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
