"""Groups, the components on them, and the way of a batch through them, as plain text."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from twinkle_mesh._draw import MAX_ROWS, count, draw_mesh, span
from twinkle_mesh._errors import InvalidMeshError
from twinkle_mesh._group import DeviceGroup
from twinkle_mesh._mesh import DeviceMesh
from twinkle_mesh._plan import PlacementPlan, WorkerSlot

_RANKS_SHOWN = 8


def draw_topology(
    groups: Iterable[DeviceGroup],
    components: Iterable[tuple[str, str, DeviceMesh | None]],
    plan: PlacementPlan | None = None,
) -> str:
    """Draw each group as a box with its nodes (given a plan) and its components' meshes, then the way of a batch.

    components: (name, name of the group, mesh), in the order that a batch passes them; a mesh of None is data parallel
        over the group's workers.

    Plain ASCII. Raises InvalidMeshError (a ValueError) for a component whose group is absent, or has another number of
    workers than the mesh has ranks.
    """
    by_name = {group.name: group for group in groups}
    meshes = [(name, group_name, _mesh_on(name, by_name, group_name, mesh)) for name, group_name, mesh in components]
    boxes: list[str] = []
    for group in by_name.values():
        body = [] if plan is None else _nodes(plan, group.name)
        for name, group_name, mesh in meshes:
            if group_name == group.name:
                drawn = draw_mesh(mesh).splitlines()
                body += ["", f"{name}: {drawn[0]}", *drawn[1:]]
        boxes.append(_box(_title(group), body[1:] if body and not body[0] else body))
    return "\n\n".join([*boxes, _way([(name, mesh) for name, _, mesh in meshes])] if meshes else boxes)


def _mesh_on(name: str, groups: dict[str, DeviceGroup], group_name: str, mesh: DeviceMesh | None) -> DeviceMesh:
    if group_name not in groups:
        raise InvalidMeshError(f"component {name!r} is on device group {group_name!r}; there are {', '.join(groups) or 'none'}")
    group = groups[group_name]
    if mesh is None:
        return DeviceMesh.from_sizes(dp_size=group.num_workers, device_type=group.device_type)
    if mesh.world_size != group.num_workers:
        raise InvalidMeshError(
            f"component {name!r} has a mesh of {count(mesh.world_size, 'rank')}, but device group {group_name!r} has "
            f"{count(group.num_workers, 'worker')}: give both the same number"
        )
    # A mesh that is placed in a group takes the group's type.
    return mesh.with_device_type(group.device_type)


def _title(group: DeviceGroup) -> str:
    if group.device_type == "cpu":
        return f"group {group.name}: {count(group.num_workers, 'cpu worker')}"
    title = f"group {group.name}: {count(group.num_devices, f'{group.device_type} device')}, {count(group.num_workers, 'worker')}"
    return title if group.visible_devices is None else f"{title}, only devices {group.visible_devices}"


def _nodes(plan: PlacementPlan, group_name: str) -> list[str]:
    def node_index(slot: WorkerSlot) -> int:
        return slot.node_index

    lines: list[str] = []
    for index, same_node in groupby(plan.workers[group_name], key=node_index):
        slots = list(same_node)
        devices = [device_id for slot in slots for device_id in slot.device_ids]
        text = f"node {index} ({plan.nodes[index].address}): {'worker' if len(slots) == 1 else 'workers'} {span([slot.rank for slot in slots])}"
        lines.append(f"{text}, {'device' if len(devices) == 1 else 'devices'} {_shorten(devices)}" if devices else text)
    if len(lines) > MAX_ROWS:
        lines[MAX_ROWS:] = [f"... {len(lines) - MAX_ROWS} more nodes"]
    return lines


def _shorten(device_ids: Sequence[str]) -> str:
    if all(device_id.isdecimal() for device_id in device_ids):
        return span([int(device_id) for device_id in device_ids])
    return " ".join(device_ids)


def _box(title: str, body: Sequence[str]) -> str:
    width = max(len(line) for line in [title + "  ", *body])
    top = f"+- {title} ".ljust(width + 3, "-") + "+"
    return "\n".join([top, *(f"| {line.ljust(width)} |" for line in body), "+" + "-" * (width + 2) + "+"])


def _way(components: Sequence[tuple[str, DeviceMesh]]) -> str:
    lines = ["the way of a batch", "  driver"]
    arriving = ""
    for name, mesh in components:
        lines += [f"    | {arriving}split in {mesh.data_world_size}", "    v", f"  {name}"]
        ranks = mesh.representatives()
        shown = span(ranks[:_RANKS_SHOWN]) + (" ..." if len(ranks) > _RANKS_SHOWN else "")
        arriving = f"taken from {'rank' if len(ranks) == 1 else 'ranks'} {shown}; "
    return "\n".join([*lines, f"    | {arriving.removesuffix('; ')}", "    v", "  driver"])
