"""Which worker runs where: a pure function from groups and nodes to a plan."""

import sys
from collections.abc import Callable, Iterable, Sequence
from warnings import warn

from twinkle_mesh._device_types import MIG_PREFIX, visible_devices_variable
from twinkle_mesh._errors import InvalidMeshError, PlacementError
from twinkle_mesh._group import DeviceGroup
from twinkle_mesh._labels import shorten_ids
from twinkle_mesh._nodes import Node
from twinkle_mesh._plan import PlacementPlan, WorkerSlot

MAX_PROCESSES_PER_CORE = 8
_CPU_UNITS = 10_000  # Ray counts resources in ten-thousandths; whole numbers add up without rounding.
_NODES_SHOWN = 8


def plan_placement(groups: Iterable[DeviceGroup], nodes: Iterable[Node], *, cpus_per_rank: float = 0.01) -> PlacementPlan:
    """Give every worker of every group a node and devices.

    - A list of ranks means these devices, counted over all devices of the group's type, node after node. Groups that
      list the same device share it.
    - A number of ranks means devices of the group's own: that no other group lists or was given. A group goes whole
      to the node that it fills best; else it takes the nodes with most free devices first. The devices of one worker
      are always on one node. Only devices in `visible_devices` are taken, where that is set.
    - A 'cpu' rank is a process. More of them than cores on a node warn (UserWarning); more than 8 a core are refused.
    - Every worker reserves `cpus_per_rank` cores of its node.

    Equal arguments give equal plans. Raises PlacementError, saying what is short where, if the nodes cannot hold the
    groups, and InvalidMeshError (a ValueError) for two groups of one name or a `cpus_per_rank` below 0.0001.
    """
    cluster = tuple(nodes)
    by_name: dict[str, DeviceGroup] = {}
    for group in groups:
        if group.name in by_name:
            raise InvalidMeshError(f"two device groups are named {group.name!r}")
        by_name[group.name] = group
    if not cpus_per_rank * _CPU_UNITS >= 1:
        raise InvalidMeshError(f"cpus_per_rank={cpus_per_rank}: it is at least {1 / _CPU_UNITS}")
    if not cluster:
        raise PlacementError("there are no nodes to place device groups on")
    planner = _Planner(cluster, cpus_per_rank)
    slots = {group.name: planner.place(group) for group in sorted(by_name.values(), key=_urgency)}
    planner.warn_if_crowded()
    return PlacementPlan(groups=by_name, nodes=cluster, workers={name: slots[name] for name in by_name})


def _urgency(group: DeviceGroup) -> tuple[bool, bool, bool, int]:
    # Those with least choice first: named devices, then restricted ones, then many devices to a worker. Processes last.
    return (group.device_type == "cpu", isinstance(group.ranks, int), group.visible_devices is None, -group.gpus_per_worker)


class _Planner:
    """What is still free while a plan is made."""

    def __init__(self, nodes: tuple[Node, ...], cpus_per_rank: float) -> None:
        self.nodes = nodes
        self.cpus_per_rank = cpus_per_rank
        self.cpu_unit = round(cpus_per_rank * _CPU_UNITS)
        self.cpu_left = [int(node.num_cpus * _CPU_UNITS) for node in nodes]
        self.processes = [0] * len(nodes)
        self.owners: list[list[str | None]] = [[None] * node.num_gpus for node in nodes]
        self.ids = [node.device_ids for node in nodes]

    def place(self, group: DeviceGroup) -> tuple[WorkerSlot, ...]:
        if group.device_type == "cpu":
            return self._place_processes(group)
        if not any(node.device_type == group.device_type and node.num_gpus for node in self.nodes):
            there = sorted({node.device_type for node in self.nodes if node.num_gpus}) or ["only cores"]
            raise PlacementError(
                f"device group {group.name!r} needs {group.num_devices} {group.device_type} devices, but no node has any: "
                f"{len(self.nodes)} node(s) with {', '.join(there)}"
            )
        allowed = self._allowed(group)
        if isinstance(group.ranks, int):
            return self._place_own(group, allowed)
        return self._place_listed(group, group.ranks, allowed)

    def _allowed(self, group: DeviceGroup) -> list[Sequence[int]]:
        """For each node the positions of the devices that the group may use at all, in the order to use them."""
        visible = group.visible_device_ids
        matching = [node.device_type == group.device_type for node in self.nodes]
        if visible is None:
            return [range(node.num_gpus) if ok else () for node, ok in zip(self.nodes, matching, strict=True)]
        found = [node.positions_of(visible) if ok else {} for node, ok in zip(self.nodes, matching, strict=True)]
        absent = [name for name in visible if not any(name in positions for positions in found)]
        if absent:
            raise PlacementError(self._absent_devices(group, absent))
        return [tuple(dict.fromkeys(positions.values())) for positions in found]

    def _place_listed(self, group: DeviceGroup, ranks: Sequence[int], allowed: list[Sequence[int]]) -> tuple[WorkerSlot, ...]:
        devices = [(i, p) for i, node in enumerate(self.nodes) if node.device_type == group.device_type for p in range(node.num_gpus)]
        if max(ranks) >= len(devices):
            raise PlacementError(
                f"device group {group.name!r} lists the {group.device_type} device {max(ranks)}, but there are {len(devices)} "
                f"(0 to {len(devices) - 1}). {self._free_rows(allowed)}"
            )
        may_use = [set(positions) for positions in allowed]
        chosen = [devices[rank] for rank in ranks]
        for rank, (i, position) in zip(ranks, chosen, strict=True):
            if position not in may_use[i]:
                raise PlacementError(
                    f"device group {group.name!r} lists rank {rank}, which is device {self.ids[i][position]} of {self._where(i)}, and "
                    f"visible_devices={group.visible_devices!r} leaves it out. Take it off the list, or write ranks={group.num_devices}"
                )
            self.owners[i][position] = group.name
        size = group.gpus_per_worker
        slots: list[WorkerSlot] = []
        for start in range(0, len(chosen), size):
            worker = chosen[start : start + size]
            node_index = worker[0][0]
            if any(i != node_index for i, _ in worker):
                raise PlacementError(
                    f"device group {group.name!r}: the {size} devices of worker {start // size} (ranks {list(ranks[start : start + size])}) "
                    f"are on more than one node"
                )
            slots.append(self._slot(group, len(slots), node_index, [position for _, position in worker]))
        return tuple(slots)

    def _place_own(self, group: DeviceGroup, allowed: list[Sequence[int]]) -> tuple[WorkerSlot, ...]:
        free = [[p for p in positions if owner[p] is None] for positions, owner in zip(allowed, self.owners, strict=True)]
        size = group.gpus_per_worker
        by_devices = [len(positions) // size for positions in free]
        capacity = [min(most, left // self.cpu_unit) for most, left in zip(by_devices, self.cpu_left, strict=True)]
        if sum(capacity) < group.num_workers:
            raise PlacementError(self._short_of_devices(group, allowed, sum(by_devices), sum(capacity)))
        slots: list[WorkerSlot] = []
        for i, count in _choose_nodes(capacity, group.num_workers):
            for start in range(0, count * size, size):
                positions = free[i][start : start + size]
                for position in positions:
                    self.owners[i][position] = group.name
                slots.append(self._slot(group, len(slots), i, positions))
        return tuple(slots)

    def _place_processes(self, group: DeviceGroup) -> tuple[WorkerSlot, ...]:
        # Every core gets one process before any gets a second, and so on.
        rounds = [self._process_capacity(per_core) for per_core in range(MAX_PROCESSES_PER_CORE + 1)]
        last = next((i for i, capacity in enumerate(rounds) if sum(capacity) >= group.num_workers), None)
        if last is None:
            room = rounds[-1]
            cores = sum(node.num_cpus for node in self.nodes)
            rows = self._rows(lambda i: f"{self.nodes[i].num_cpus:g} cores, {self.processes[i]} processes, room for {room[i]}", "cores")
            raise PlacementError(
                f"device group {group.name!r} needs {group.num_workers} CPU processes, but only {sum(room)} more fit on {cores:g} cores: "
                f"at most {MAX_PROCESSES_PER_CORE} a core, each reserving cpus_per_rank={self.cpus_per_rank:g}. {rows}"
            )
        full = rounds[last - 1]
        left = [most - below for most, below in zip(rounds[last], full, strict=True)]
        counts = {i: below for i, below in enumerate(full) if below}
        for i, count in _choose_nodes(left, group.num_workers - sum(full)):
            counts[i] = counts.get(i, 0) + count
        slots: list[WorkerSlot] = []
        for i, count in counts.items():
            self.processes[i] += count
            slots.extend([self._slot(group, rank, i, ()) for rank in range(len(slots), len(slots) + count)])
        return tuple(slots)

    def _process_capacity(self, per_core: int) -> list[int]:
        """How many more processes each node holds with at most `per_core` a core."""
        return [
            max(0, min(int(per_core * node.num_cpus) - used, left // self.cpu_unit))
            for node, used, left in zip(self.nodes, self.processes, self.cpu_left, strict=True)
        ]

    def _slot(self, group: DeviceGroup, rank: int, node_index: int, positions: Sequence[int]) -> WorkerSlot:
        self.cpu_left[node_index] -= self.cpu_unit
        if self.cpu_left[node_index] < 0:
            raise PlacementError(
                f"device group {group.name!r}: {self._where(node_index)} has {self.nodes[node_index].num_cpus:g} cores, too few for "
                f"every worker there to reserve cpus_per_rank={self.cpus_per_rank:g}; lower cpus_per_rank"
            )
        ids = self.ids[node_index]
        device_ids = tuple([ids[p] for p in positions])
        if len(device_ids) > 1 and any(device_id.startswith(MIG_PREFIX) for device_id in device_ids):
            raise PlacementError(
                f"device group {group.name!r}: worker {rank} would get {' '.join(device_ids)} on {self._where(node_index)}, but CUDA shows a "
                f"process one MIG instance at most; leave gpus_per_worker at 1, or restrict the group to whole GPUs with visible_devices"
            )
        return WorkerSlot(rank, node_index, device_ids, self.cpus_per_rank)

    def warn_if_crowded(self) -> None:
        if any(used > node.num_cpus for node, used in zip(self.nodes, self.processes, strict=True)):
            cores = sum(node.num_cpus for node in self.nodes)
            warn(f"{sum(self.processes)} CPU processes share {cores:g} cores: expect them to be slow", stacklevel=_callers_level())

    def _absent_devices(self, group: DeviceGroup, absent: Sequence[str]) -> str:
        message = f"device group {group.name!r}: no node has the device(s) {', '.join(absent)} of visible_devices={group.visible_devices!r}"
        message += f". {self._rows(lambda i: shorten_ids(self.ids[i]) or 'none', 'device ids')}"
        if any(not name.isdecimal() for name in absent) and all(device_id.isdecimal() for ids in self.ids for device_id in ids):
            variable = visible_devices_variable(group.device_type)
            message += f". The nodes know their devices by index only: name indices, or list UUIDs in {variable} there"
        return message

    def _short_of_devices(self, group: DeviceGroup, allowed: list[Sequence[int]], by_devices: int, fit: int) -> str:
        kind = f"{group.device_type} device(s)"
        message = f"device group {group.name!r} needs {group.num_workers} worker(s) of {group.gpus_per_worker} {kind}, but only {fit} fit"
        if by_devices >= group.num_workers:
            return f"{message}: the nodes lack cores for each to reserve cpus_per_rank={self.cpus_per_rank:g}; lower cpus_per_rank"
        limit = "" if group.visible_devices is None else f" among visible_devices={group.visible_devices!r}"
        others = {owner for positions, owners in zip(allowed, self.owners, strict=True) for p in positions if (owner := owners[p])}
        taken = f" Taken by {', '.join(sorted(others))}; groups share devices by listing the same ranks." if others else ""
        return f"{message}{limit}.{taken} {self._free_rows(allowed)}"

    def _free_rows(self, allowed: list[Sequence[int]]) -> str:
        def row(i: int) -> str:
            free = sum(self.owners[i][p] is None for p in allowed[i])
            return f"{free} of {self.nodes[i].num_gpus} {self.nodes[i].device_type}"

        return self._rows(row, "free devices")

    def _rows(self, describe: Callable[[int], str], title: str) -> str:
        rows = [f"{self._where(i)}: {describe(i)}" for i in range(min(len(self.nodes), _NODES_SHOWN))]
        if len(self.nodes) > _NODES_SHOWN:
            rows.append(f"and {len(self.nodes) - _NODES_SHOWN} more nodes")
        return f"By node, {title}: {'; '.join(rows)}"

    def _where(self, node_index: int) -> str:
        return f"node {node_index} ({self.nodes[node_index].address})"


def _choose_nodes(capacity: Sequence[int], count: int) -> list[tuple[int, int]]:
    """(node, how many there), for `count` workers: nodes with most room first, the rest on the node that it fills best."""
    order = sorted((i for i, most in enumerate(capacity) if most > 0), key=lambda i: (-capacity[i], i))
    chosen: list[tuple[int, int]] = []
    for start, i in enumerate(order):
        if capacity[i] >= count:
            tightest = min((j for j in order[start:] if capacity[j] >= count), key=lambda j: (capacity[j], j))
            chosen.append((tightest, count))
            break
        chosen.append((i, capacity[i]))
        count -= capacity[i]
    return chosen


def _callers_level() -> int:
    """The `stacklevel` at which a warning shows the line of whoever called into our packages, whose names begin alike."""
    frame, level = sys._getframe(1), 1  # pyright: ignore[reportPrivateUsage]
    while (above := frame.f_back) is not None and str(frame.f_globals.get("__name__")).startswith("twinkle_"):
        frame, level = above, level + 1
    return level
