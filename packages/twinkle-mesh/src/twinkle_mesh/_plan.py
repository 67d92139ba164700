"""What a placement is: a slot for every worker."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from twinkle_mesh._device_types import visible_devices_env
from twinkle_mesh._errors import InvalidMeshError, RankOutsideMeshError
from twinkle_mesh._group import DeviceGroup
from twinkle_mesh._nodes import Node


class WorkerSlot(NamedTuple):
    """Where one worker of a group runs: its rank, its node, its devices there (ids; none on 'cpu'), the cores it reserves."""

    rank: int
    node_index: int
    device_ids: tuple[str, ...]
    num_cpus: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementPlan:
    """A slot for every worker of every group.

    groups: the groups by name. nodes: as they were given. workers: by group name, the slots in order of rank.
    """

    groups: dict[str, DeviceGroup]
    nodes: tuple[Node, ...]
    workers: dict[str, tuple[WorkerSlot, ...]]

    def environment(self, group_name: str, rank: int) -> dict[str, str]:
        """The environment entries that make this worker see its devices and no others. Empty for a 'cpu' group."""
        slots = self._slots(group_name)
        if not 0 <= rank < len(slots):
            raise RankOutsideMeshError(f"rank {rank} is outside group {group_name!r} of {len(slots)} workers")
        return visible_devices_env(self.groups[group_name].device_type, slots[rank].device_ids)

    def device_share(self, group_name: str) -> float:
        """The part of a device that each worker of this group may reserve: 1 divided by the groups that share its devices."""
        mine = {(slot.node_index, device_id) for slot in self._slots(group_name) for device_id in slot.device_ids}
        users = Counter(
            (slot.node_index, device_id)
            for slots in self.workers.values()
            for slot in slots
            for device_id in slot.device_ids
            if (slot.node_index, device_id) in mine
        )
        return 1 / max(users.values(), default=1)

    def _slots(self, group_name: str) -> tuple[WorkerSlot, ...]:
        if group_name not in self.workers:
            raise InvalidMeshError(f"there is no device group {group_name!r}; there are {', '.join(sorted(self.workers))}")
        return self.workers[group_name]
