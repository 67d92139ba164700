"""Node: what one machine offers, and how device ids are looked up on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle_mesh._device_types import normalize_device_type
from twinkle_mesh._errors import InvalidMeshError


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a cluster.

    address: how errors and drawings call it.
    num_gpus: accelerators that may be used. num_cpus: cores that may be used.
    gpu_ids: the accelerators' ids, as that node's visible-devices variable takes them: indices or UUIDs; default 0, 1, ...
    device_type: the accelerators' type.

    Raises InvalidMeshError (a ValueError) if the numbers are negative or the ids are not as many different ones.
    """

    address: str
    num_gpus: int
    num_cpus: float
    gpu_ids: Sequence[str | int] | None = None
    device_type: str = "cuda"

    def __post_init__(self) -> None:
        if self.num_gpus < 0 or self.num_cpus < 0:
            raise InvalidMeshError(f"node {self.address}: num_gpus={self.num_gpus} and num_cpus={self.num_cpus} cannot be negative")
        object.__setattr__(self, "device_type", normalize_device_type(self.device_type))
        if self.gpu_ids is not None:
            object.__setattr__(self, "gpu_ids", tuple(str(device_id) for device_id in self.gpu_ids))
        if len(set(self.device_ids)) != self.num_gpus:
            raise InvalidMeshError(f"node {self.address}: num_gpus={self.num_gpus}, but gpu_ids={self.gpu_ids} are not as many different ids")

    @property
    def device_ids(self) -> tuple[str, ...]:
        """The accelerators' ids as strings, in order."""
        if self.gpu_ids is None:
            return tuple(str(index) for index in range(self.num_gpus))
        return tuple(str(device_id) for device_id in self.gpu_ids)

    def positions_of(self, visible: Sequence[str]) -> dict[str, int]:
        """Where the devices named in `visible` are in `device_ids`; those that are not on this node are left out.

        A name is an id of this node, or the beginning of exactly one (CUDA takes shortened UUIDs), or, on a node whose
        ids are UUIDs, an index.
        """
        ids = {device_id: position for position, device_id in enumerate(self.device_ids)}
        by_index = not any(device_id.isdecimal() for device_id in ids)
        found: dict[str, int] = {}
        for name in visible:
            if name in ids:
                found[name] = ids[name]
            elif not name.isdecimal():
                matches = [position for device_id, position in ids.items() if device_id.startswith(name)]
                if len(matches) == 1:
                    found[name] = matches[0]
            elif by_index and int(name) < len(ids):
                found[name] = int(name)
        return found
