"""How drawings and errors word things: counts, runs of ranks, device ids, sizes; and what they leave out when there is too much."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle_mesh._mesh import DeviceMesh

MOST = 8  # Rows, columns, nodes and ids that are shown before the middle ones are left out.
_LONGEST_ID = 14
_MOST_UUIDS = 4


def count(number: int, noun: str) -> str:
    """'1 rank', '2 ranks'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def pick(total: int, most: int = MOST) -> list[int | None]:
    """Which of `total` things to show: all, or the first and the last of them with None for those between."""
    return [*range(total)] if total <= most else [*range(most - 2), None, total - 1]


def left_out(total: int, noun: str, most: int = MOST) -> str:
    """What stands where `pick` has None: '... 57 more data ranks'."""
    return f"... {count(total - most + 1, f'more {noun}')}"


def span(ranks: Sequence[int]) -> str:
    """'0-3 8 9' for (0, 1, 2, 3, 8, 9): runs of three and more are shortened, and of many runs the middle ones left out."""
    parts: list[str] = []
    start = 0
    for end in range(1, len(ranks) + 1):
        if end < len(ranks) and ranks[end] == ranks[end - 1] + 1:
            continue
        run = ranks[start:end]
        parts.extend([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run])
        start = end
    return _some(parts)


def shorten_ids(device_ids: Sequence[str]) -> str:
    """Indices as `span` does, UUIDs by their beginning and end; of many the middle ones are left out."""
    if all(device_id.isdecimal() for device_id in device_ids):
        return span([int(device_id) for device_id in device_ids])
    return _some([shorten_id(device_id) for device_id in device_ids], _MOST_UUIDS)


def shorten_id(device_id: str) -> str:
    """'GPU-8c1f..09af' for a long UUID. The end stays too: the parts of one GPU differ only there."""
    return device_id if len(device_id) <= _LONGEST_ID else f"{device_id[:8]}..{device_id[-4:]}"


def _some(words: Sequence[str], most: int = MOST) -> str:
    return " ".join("..." if i is None else words[i] for i in pick(len(words), most))


def product_of(sizes: Mapping[str, int]) -> str:
    """'dp 2 x tp 4': the axes whose size is not 1."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def describe(mesh: "DeviceMesh") -> list[str]:
    """The sizes of a mesh in one line, then lines for what stands inside a cell or a data rank and for the experts, if there is something to say."""
    sizes = mesh.axis_sizes()
    first = f"{count(mesh.world_size, 'rank')} on {mesh.device_type}"
    if mesh.world_size > 1:
        first += f": {product_of(sizes)}"
    if mesh.vpp_size is not None:
        first += f", {mesh.vpp_size} virtual stages a rank"
    if mesh.sequence_parallel:
        first += ", sequence parallel"
    inside = [f"{what} is {product_of(part)}" for what, part in (("data rank", data_axes(mesh)), ("cell", cell_axes(mesh))) if _several(part)]
    lines = [first, *([f"{'; '.join(inside)} (the last is the fastest)"] if inside else [])]
    if mesh.ep_size > 1 or mesh.ep_fsdp_size > 1 or mesh.etp_size != mesh.tp_size:
        experts = {axis: size for axis, size in mesh.expert_axis_sizes().items() if axis != "pp"}
        lines.append(f"experts: {product_of(experts) or 'whole on every rank'}")
    return lines


def data_axes(mesh: "DeviceMesh") -> dict[str, int]:
    """The dense axes that split a batch, and their sizes."""
    return {axis: size for axis, size in mesh.axis_sizes().items() if axis in ("dp", "ep_fsdp", "ep", "fsdp")}


def cell_axes(mesh: "DeviceMesh") -> dict[str, int]:
    """The dense axes whose ranks share a data rank and a pipeline stage, and their sizes."""
    return {"cp": mesh.cp_size, "ulysses": mesh.ulysses_size, "tp": mesh.tp_size}


def cell(mesh: "DeviceMesh", data_rank: int, stage: int) -> range:
    """The ranks of one pipeline stage that read one data rank's share: neighbours, since their axes are the fastest."""
    size = mesh.cp_size * mesh.ulysses_size * mesh.tp_size
    first = (stage * mesh.data_world_size + data_rank) * size
    return range(first, first + size)


def _several(sizes: Mapping[str, int]) -> bool:
    return sum(size > 1 for size in sizes.values()) > 1
