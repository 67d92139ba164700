"""A mesh as a block of an SVG drawing."""

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

from twinkle_mesh._labels import cell, cell_axes, count, data_axes, describe, left_out, pick, product_of
from twinkle_mesh._svg import Block, chip, column, document, framed, mark, row, text, wide

if TYPE_CHECKING:
    from twinkle_mesh._mesh import DeviceMesh

_MOST_IN_A_CELL, _MOST_IN_A_ROW = 16, 8
_WIDEST = 1000


def mesh_svg(mesh: "DeviceMesh") -> str:
    """An SVG file with the mesh alone."""
    title = f"Device mesh of {count(mesh.world_size, 'rank')}: {product_of(mesh.axis_sizes()) or 'all sizes are 1'}"
    return document(column([mesh_block(mesh), legend()], 10), title)


def mesh_block(mesh: "DeviceMesh", name: str = "") -> Block:
    """The sizes, then a table: a row for each data rank, a column for each pipeline stage, in the cells a box for each rank.

    The ranks that speak for a data rank (`DeviceMesh.representatives`) are filled.
    """
    title, *details = describe(mesh)
    stages = pick(mesh.pp_size)
    boxes = _has_boxes(mesh, len(stages))
    rows: list[list[Block]] = []
    if mesh.pp_size > 1:
        rows.append([Block(0, 0), *(text("..." if stage is None else f"stage {stage}", "soft") for stage in stages)])
    for data_rank in pick(mesh.data_world_size):
        if data_rank is None:
            rows.append([text(left_out(mesh.data_world_size, "data rank"), "soft")])
            continue
        cells = [text("...", "soft") if stage is None else _cell(mesh, data_rank, stage, boxes) for stage in stages]
        rows.append([_data_label(mesh, data_rank), *cells])
    heading = [text(name, bold=True)] if name else []
    return column([*heading, text(title, bold=not name), *(text(line, "soft") for line in details), _table(rows)], 6)


def legend() -> Block:
    """What a filled box means."""
    return row([mark(), text("speaks for its data rank: results are taken from here", "soft")], 8, middle=True)


def _data_label(mesh: "DeviceMesh", data_rank: int) -> Block:
    lines = [text(f"data {data_rank}", "soft")]
    axes = [axis for axis, size in data_axes(mesh).items() if size > 1]
    if len(axes) > 1:
        where = mesh.coordinates(cell(mesh, data_rank, 0)[0])
        lines.append(text(" ".join(f"{axis} {where[axis]}" for axis in axes), "soft"))
    return column(lines)


def _cell(mesh: "DeviceMesh", data_rank: int, stage: int, boxes: bool) -> Block:
    ranks = cell(mesh, data_rank, stage)
    speaks = stage == mesh.pp_size - 1
    if not boxes:
        others = [text(f"to {ranks[-1]}")] if len(ranks) > 1 else []
        return framed(row([chip([str(ranks[0])], _box_width(mesh), chosen=speaks), *others], 8, middle=True), "inset", 4)
    chips = [chip([str(rank)], _box_width(mesh), chosen=speaks and rank == ranks[0]) for rank in ranks]
    per_line = _per_line(mesh)
    return framed(column([row(chips[start : start + per_line], 4) for start in range(0, len(chips), per_line)], 4), "inset", 4)


def _has_boxes(mesh: "DeviceMesh", stages: int) -> bool:
    """Whether there is room for a box for each rank; else a cell shows its first and last rank."""
    per_cell = prod(cell_axes(mesh).values())
    return per_cell <= _MOST_IN_A_CELL and stages * min(per_cell, _per_line(mesh)) * (_box_width(mesh) + 4) <= _WIDEST


def _per_line(mesh: "DeviceMesh") -> int:
    # One line for each cp and ulysses coordinate where the tp ranks fit into it.
    return mesh.tp_size if 1 < mesh.tp_size <= _MOST_IN_A_ROW else _MOST_IN_A_ROW


def _box_width(mesh: "DeviceMesh") -> int:
    return 8 * len(str(mesh.world_size - 1)) + 12


def _table(rows: Iterable[list[Block]]) -> Block:
    table = list(rows)
    columns = max(len(cells) for cells in table)
    # A row of one cell is a remark across the table.
    widths = [max(cells[i].width for cells in table if len(cells) == columns) for i in range(columns)]
    return column([row([wide(block, width) for block, width in zip(cells, widths, strict=False)], 12, middle=True) for cells in table], 6)
