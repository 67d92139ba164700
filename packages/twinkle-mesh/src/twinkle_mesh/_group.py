"""DeviceGroup: a named share of the machines."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinkle_mesh._device_types import MIG_PREFIX, normalize_device_type
from twinkle_mesh._errors import InvalidMeshError


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """A named set of devices that components are placed on.

    name: how components refer to it (`remote_group=name`).
    ranks: how many devices (an int: devices of its own, wherever they are free), or which (a list of indices into all the
        devices of this type, node after node; groups that name the same index share that device). On 'cpu' an int: the
        number of processes.
    device_type: 'cuda' ('GPU' is the same), 'cpu', 'npu', ...
    visible_devices: a comma-separated list of device ids of a node: indices ('8,9'), UUIDs ('GPU-8c1f...', also shortened) or
        MIG instances ('MIG-...'); only these are used, in this order, on each node that has them.
    gpus_per_worker: devices of one worker process, all on one node; it must divide the number of devices.

    A list of ranks is kept as a tuple. Raises InvalidMeshError (a ValueError) for fields that cannot be.
    """

    name: str
    ranks: int | Sequence[int]
    device_type: str
    visible_devices: str | None = None
    gpus_per_worker: int = 1

    def __post_init__(self) -> None:
        if type(self.name) is not str or not self.name:
            raise InvalidMeshError(f"a device group needs a name, not {self.name!r}")
        object.__setattr__(self, "device_type", normalize_device_type(self.device_type))
        object.__setattr__(self, "ranks", self._whole_ranks())
        self._check_ranks()
        if type(self.gpus_per_worker) is not int or self.gpus_per_worker < 1:
            raise self._error(f"gpus_per_worker={self.gpus_per_worker!r}: it is a whole number of at least 1")
        if self.visible_devices is not None and type(self.visible_devices) is not str:
            raise self._error(f"visible_devices={self.visible_devices!r}: it is one string of device ids, as '0,1'")
        if self.num_devices % self.gpus_per_worker:
            raise self._error(f"gpus_per_worker={self.gpus_per_worker} does not divide its {self.num_devices} devices")
        if self.device_type == "cpu" and self.visible_devices is not None:
            raise self._error("visible_devices chooses accelerators; a 'cpu' group has none: leave it out")
        if self.device_type == "cpu" and self.gpus_per_worker != 1:
            raise self._error("gpus_per_worker counts accelerators; a 'cpu' group has none: leave it at 1")
        ids = self.visible_device_ids
        if ids is not None and (not all(ids) or len(set(ids)) != len(ids)):
            raise self._error(f"visible_devices={self.visible_devices!r}: it is a comma-separated list of different device ids, as '0,1'")
        if ids is not None and self.gpus_per_worker > 1 and any(device_id.startswith(MIG_PREFIX) for device_id in ids):
            raise self._error("CUDA shows a process one MIG instance at most: leave gpus_per_worker at 1, or name whole GPUs")

    @property
    def num_devices(self) -> int:
        """How many devices the group has (on 'cpu': processes)."""
        return self.ranks if isinstance(self.ranks, int) else len(self.ranks)

    @property
    def num_workers(self) -> int:
        """How many worker processes the group has: devices / gpus_per_worker."""
        return self.num_devices // self.gpus_per_worker

    @property
    def visible_device_ids(self) -> tuple[str, ...] | None:
        """The ids in `visible_devices`, or None where every device may be used."""
        return None if self.visible_devices is None else tuple(part.strip() for part in self.visible_devices.split(","))

    def _whole_ranks(self) -> int | tuple[int, ...]:
        ranks: object = self.ranks
        if isinstance(ranks, bool | str | bytes | dict):
            raise self._error(f"ranks={ranks!r}: it is a number of devices or a list of device indices")
        try:
            # A list, or else a number that is not an int (of numpy).
            return tuple(operator.index(rank) for rank in self.ranks) if isinstance(self.ranks, Iterable) else operator.index(self.ranks)
        except TypeError:
            raise self._error(f"ranks={ranks!r}: it is a number of devices or a list of device indices") from None

    def _check_ranks(self) -> None:
        if self.num_devices < 1:
            raise self._error(f"ranks={self.ranks!r}: it needs at least one device")
        if isinstance(self.ranks, int):
            return
        if self.device_type == "cpu":
            raise self._error(f"processes on a CPU are counted, not listed: write ranks={self.num_devices}")
        if min(self.ranks) < 0 or len(set(self.ranks)) != len(self.ranks):
            raise self._error(f"ranks={list(self.ranks)}: they are different device indices of at least 0")

    def _error(self, message: str) -> InvalidMeshError:
        return InvalidMeshError(f"device group {self.name!r}: {message}")
