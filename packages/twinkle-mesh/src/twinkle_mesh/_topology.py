"""Groups, the nodes they are placed on, the components on them and the way of a batch through these: what a drawing shows."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from twinkle_mesh._errors import InvalidMeshError
from twinkle_mesh._group import DeviceGroup
from twinkle_mesh._labels import MOST, count, pick, span
from twinkle_mesh._mesh import DeviceMesh, check_format
from twinkle_mesh._plan import PlacementPlan, WorkerSlot

MOST_GROUPS = 12


def draw_topology(
    groups: Iterable[DeviceGroup],
    components: Iterable[tuple[str, str, DeviceMesh | None]],
    plan: PlacementPlan | None = None,
    *,
    format: Literal["text", "svg"] = "text",
) -> str:
    """Draw each group with its nodes, workers and devices (given a plan) and its components' meshes, then the way of a batch.

    components: (name, name of the group, mesh), in the order that a batch passes them; a mesh of None is data parallel
        over the group's workers.
    format: 'text' is plain ASCII; 'svg' is a whole SVG file that suits light and dark pages. Both show a topology of any
        size: of many groups, nodes, stages or data ranks the first and the last are drawn.

    Raises InvalidMeshError (a ValueError) for a component whose group is absent or has another number of workers than the
    mesh has ranks, and for another format.
    """
    check_format(format)
    topology = _resolve(groups, components, plan)
    if format == "svg":
        from twinkle_mesh._topology_svg import topology_svg

        return topology_svg(topology)
    from twinkle_mesh._topology_text import topology_text

    return topology_text(topology)


@dataclass(frozen=True, slots=True)
class Component:
    """A component on a group; its mesh has the group's device type and as many ranks as the group has workers."""

    name: str
    group_name: str
    mesh: DeviceMesh


@dataclass(frozen=True, slots=True)
class NodeShare:
    """The workers of one group on one node."""

    index: int
    address: str
    slots: tuple[WorkerSlot, ...]

    @property
    def title(self) -> str:
        return f"node {self.index} ({self.address})"


@dataclass(frozen=True, slots=True)
class Topology:
    """What there is to draw. shares: by group name, its part of each node; empty without a plan."""

    groups: tuple[DeviceGroup, ...]
    components: tuple[Component, ...]
    shares: dict[str, tuple[NodeShare, ...]]

    def on(self, group_name: str) -> list[Component]:
        """The components on a group."""
        return [component for component in self.components if component.group_name == group_name]


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a batch: where it comes from, how it is taken there and split here. The last one goes back to the driver."""

    taken: str
    split: str
    to: str


def way_of_a_batch(components: tuple[Component, ...]) -> list[Hop]:
    """The hops from the driver through the components and back; of many components the middle ones are left out."""
    hops: list[Hop] = []
    taken = ""
    for i in pick(len(components), MOST_GROUPS):
        if i is None:
            hops.append(Hop(taken, "", "..."))
            continue
        mesh = components[i].mesh
        hops.append(Hop(taken, f"split in {mesh.data_world_size}", components[i].name))
        ranks = mesh.representatives()
        shown = span(ranks[:MOST]) + (" ..." if len(ranks) > MOST else "")
        taken = f"taken from {'rank' if len(ranks) == 1 else 'ranks'} {shown}"
    return [*hops, Hop(taken, "", "driver")] if hops else []


def title_of(group: DeviceGroup) -> str:
    """A group in one line."""
    if group.device_type == "cpu":
        return f"group {group.name}: {count(group.num_workers, 'cpu worker')}"
    title = f"group {group.name}: {count(group.num_devices, f'{group.device_type} device')}, {count(group.num_workers, 'worker')}"
    return title if group.visible_devices is None else f"{title}, only devices {group.visible_devices}"


def _resolve(groups: Iterable[DeviceGroup], components: Iterable[tuple[str, str, DeviceMesh | None]], plan: PlacementPlan | None) -> Topology:
    by_name = {group.name: group for group in groups}
    resolved = [Component(name, group_name, _mesh_on(name, by_name, group_name, mesh)) for name, group_name, mesh in components]
    shares = {} if plan is None else {name: _shares(plan, name) for name in by_name if name in plan.workers}
    return Topology(tuple(by_name.values()), tuple(resolved), shares)


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


def _shares(plan: PlacementPlan, group_name: str) -> tuple[NodeShare, ...]:
    def node_index(slot: WorkerSlot) -> int:
        return slot.node_index

    parts = groupby(plan.workers[group_name], key=node_index)
    return tuple([NodeShare(index, plan.nodes[index].address, tuple(slots)) for index, slots in parts])
