"""A mesh as plain text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle_mesh._mesh import DeviceMesh

MAX_ROWS = 8
_MAX_STAGES = 8


def draw_mesh(mesh: "DeviceMesh") -> str:
    """A title with the sizes (those of 1 left out), then a table: a row for each data rank, a column for each pipeline stage, ranks in the cells."""
    per_cell = mesh.world_size // (mesh.pp_size * mesh.data_world_size)
    stages = range(min(mesh.pp_size, _MAX_STAGES))
    beyond = ["..."] if mesh.pp_size > _MAX_STAGES else []
    rows = [["", *(f"stage {stage}" for stage in stages), *beyond]] if mesh.pp_size > 1 else []
    for data_rank in range(min(mesh.data_world_size, MAX_ROWS)):
        firsts = [(stage * mesh.data_world_size + data_rank) * per_cell for stage in stages]
        rows.append([f"data {data_rank}", *(span(range(first, first + per_cell)) for first in firsts), *beyond])
    experts = _describe_experts(mesh)
    lines = [_describe(mesh), *([f"  {experts}"] if experts else []), *(f"  {line}" for line in _align(rows))]
    if mesh.data_world_size > MAX_ROWS:
        lines.append(f"  ... {mesh.data_world_size - MAX_ROWS} more data ranks")
    return "\n".join(lines)


def _describe(mesh: "DeviceMesh") -> str:
    dense = {axis: size for axis, size in mesh.axis_sizes().items() if size > 1}
    text = f"{count(mesh.world_size, 'rank')} on {mesh.device_type}"
    if dense:
        text += ": " + " x ".join(f"{axis} {size}" for axis, size in dense.items())
    if mesh.vpp_size is not None:
        text += f", {mesh.vpp_size} virtual stages a rank"
    if mesh.sequence_parallel:
        text += ", sequence parallel"
    return text


def _describe_experts(mesh: "DeviceMesh") -> str:
    if mesh.ep_size == 1 and mesh.ep_fsdp_size == 1 and mesh.etp_size == mesh.tp_size:
        return ""
    expert = {axis: size for axis, size in mesh.expert_axis_sizes().items() if axis != "pp" and size > 1}
    return "experts: " + (" x ".join(f"{axis} {size}" for axis, size in expert.items()) or "whole on every rank")


def span(ranks: Sequence[int]) -> str:
    """'0-3 8 9' for (0, 1, 2, 3, 8, 9): runs of three and more are shortened."""
    parts: list[str] = []
    start = 0
    for end in range(1, len(ranks) + 1):
        if end < len(ranks) and ranks[end] == ranks[end - 1] + 1:
            continue
        run = ranks[start:end]
        parts.extend([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run])
        start = end
    return " ".join(parts)


def count(number: int, noun: str) -> str:
    """'1 rank', '2 ranks'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
