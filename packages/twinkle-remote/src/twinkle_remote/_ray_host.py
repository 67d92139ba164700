"""What driver and workers share as runtimes on Ray: both build components on the groups' places, and take in handles of others' components."""

import weakref
from collections.abc import Sequence
from typing import Any, Literal

from twinkle_mesh import DeviceGroup, DeviceMesh, draw_topology
from twinkle_remote._local import check_mesh_fits, find_group, on_devices_of
from twinkle_remote._packing import ship_definitions
from twinkle_remote._placement_arguments import FailurePolicy
from twinkle_remote._protocol import Component, Execute
from twinkle_remote._ray_api import ray
from twinkle_remote._ray_component import RayComponent
from twinkle_remote._ray_gate import Gate
from twinkle_remote._ray_messages import Limits, Link
from twinkle_remote._ray_places import Crew, Places, start_workers
from twinkle_remote._stats import ComponentStats, Totals
from twinkle_remote._trace import Trace


class RayHost:
    """A process that builds components on Ray workers. Subclasses say where the places are."""

    mode: Literal["local", "torchrun", "ray"] = "ray"
    slices_in_loader = False

    def __init__(self, groups: dict[str, DeviceGroup], limits: Limits, token: str, trace: Trace | None) -> None:
        self.groups = groups
        self.limits = limits
        self.token = token
        self.trace = trace
        self.is_open = True
        self.gate = Gate()
        self._components: weakref.WeakValueDictionary[str, RayComponent] = weakref.WeakValueDictionary()
        self._borrowed: weakref.WeakValueDictionary[tuple[str, int], RayComponent] = weakref.WeakValueDictionary()
        self._totals: list[Totals] = []
        self._in_process: dict[str, Totals] = {}
        self._compression: dict[str, tuple[int | None, frozenset[int]]] = {}
        self._splits = tuple(sorted({group.num_workers for group in groups.values()}))

    def places(self) -> tuple[Places, Any]:
        """The reserved places, and a reference to them in Ray's store."""
        raise NotImplementedError

    def log_tail(self, pid: int) -> str:
        """The last lines that a worker process wrote to stderr, if they can be read here."""
        return ""

    def placed_mesh(self, group_name: str, mesh: DeviceMesh | None, execute: Execute) -> DeviceMesh:
        """The mesh of a component on the workers of a group. Raises GroupError for one that does not fit."""
        group = find_group(self.groups, group_name)
        if mesh is None:
            mesh = DeviceMesh.from_sizes(dp_size=1 if execute == "first" else group.num_workers)
        elif execute == "all":
            check_mesh_fits(mesh, group)
        return on_devices_of(group, mesh)

    def create(
        self,
        cls: type,
        group_name: str,
        mesh: DeviceMesh,
        execute: Execute,
        policy: FailurePolicy,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> RayComponent:
        """Start a process for every rank and build the object in each; raises what its constructor raises."""
        ship_definitions(cls)
        component = RayComponent(self, cls.__name__, group_name, mesh, self.limits, policy)
        self._components[component.id] = component
        self._totals.append(component.costs.totals)
        num_workers = 1 if execute == "first" else self.groups[group_name].num_workers
        try:
            with self.gate:
                component.build(cls, num_workers, args, {**kwargs, "remote_group": group_name, "device_mesh": mesh})
        except BaseException:  # a traceback that somebody keeps would keep it in drawings
            del self._components[component.id]
            raise
        self._splits = tuple(sorted({*self._splits, mesh.data_world_size}))
        return component

    def start_workers(self, component: RayComponent, cls: type, num_workers: int) -> Crew:
        """Start the processes of a component of this host."""
        places, reference = self.places()
        return start_workers(
            places,
            reference,
            cls,
            component.group_name,
            num_workers,
            component_id=component.id,
            what=f"{cls.__name__} in group {component.group_name!r}",
        )

    def adopt(self, link: Link) -> Component:
        """The component that a handle from another process stands for."""
        if (own := self._components.get(link.component_id)) is not None:
            return own
        key = link.component_id, link.restarts
        component = self._borrowed.get(key)
        if component is None:
            self._borrowed[key] = component = RayComponent.borrow(self, link)
            self._totals.append(component.costs.totals)
        return component

    def known_splits(self) -> tuple[int, ...]:
        """Into how many parts batches may be cut: the data ranks of all known meshes and the workers of all groups."""
        return self._splits

    def compression(self, group_name: str) -> tuple[int | None, frozenset[int]]:
        """Above how many bytes to compress (None: nothing), and the ranks of a group that are on other nodes than this process."""
        if group_name not in self._compression:
            places, _ = self.places()
            far: frozenset[int] = frozenset()
            if places.compress_above_bytes is not None:
                far = places.ranks_elsewhere(group_name, ray.util.get_node_ip_address())
            self._compression[group_name] = places.compress_above_bytes, far
        return self._compression[group_name]

    def record(self, component: str, method: str, start_s: float, end_s: float, *, failed: bool) -> None:
        """See `Runtime.record`."""
        if component not in self._in_process:
            self._in_process[component] = Totals(component, None)
        self._in_process[component].add_run(method, end_s - start_s, failed=failed)
        if self.trace is not None:
            self.trace.add(component, None, method, start_s, end_s)

    def stats(self) -> dict[str, ComponentStats]:
        """See `Runtime.stats`."""
        return {totals.name: totals.snapshot() for totals in (*self._totals, *self._in_process.values())}

    def draw(self, *, format: Literal["text", "svg"] = "text") -> str:
        """See `Runtime.draw`."""
        whole = [one for one in self._components.values() if one.num_workers == one.mesh.world_size == self.groups[one.group_name].num_workers]
        places, _ = self.places()
        drawing = draw_topology(self.groups.values(), [(one.class_name, one.group_name, one.mesh) for one in whole], places.plan, format=format)
        if format == "svg":
            return drawing
        first = [f"{one.class_name}: only on rank 0 of group {one.group_name}" for one in self._components.values() if one not in whole]
        return "\n".join([drawing, *([""] if first else []), *first])
