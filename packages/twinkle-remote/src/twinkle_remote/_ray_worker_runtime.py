"""The runtime in a worker process."""

from typing import Any, NoReturn

from twinkle_mesh import DeviceMesh, PlacementPlan, launcher_world_size
from twinkle_remote._errors import GroupError
from twinkle_remote._local import find_group
from twinkle_remote._protocol import Execute
from twinkle_remote._ray_api import ray
from twinkle_remote._ray_host import RayHost
from twinkle_remote._ray_messages import Identity
from twinkle_remote._ray_places import Places


class WorkerRuntime(RayHost):
    """Builds components of the worker's own group in process, and those of other groups on their workers; they end with this worker."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity.groups, identity.limits, identity.token, trace=None)
        self._group = identity.group
        self._places_reference = identity.places
        self._places: Places | None = None

    @property
    def plan(self) -> PlacementPlan:
        """Which worker of a group runs where."""
        return self.places()[0].plan

    def places(self) -> tuple[Places, Any]:
        if self._places is None:
            self._places = ray.get(self._places_reference, timeout=self.limits.start_timeout_s)
        assert self._places is not None
        return self._places, self._places_reference

    def is_remote(self, group_name: str | None) -> bool:
        if group_name is None or group_name == self._group:
            return False
        find_group(self.groups, group_name)
        return True

    def mesh_for(self, group_name: str | None, mesh: DeviceMesh | None, execute: Execute) -> DeviceMesh:
        if group_name is not None and group_name != self._group:
            return self.placed_mesh(group_name, mesh, execute)
        if mesh is None:
            mesh = DeviceMesh.from_sizes(dp_size=launcher_world_size())
        return mesh.with_device_type(self.groups[self._group].device_type)

    def shutdown(self) -> NoReturn:
        raise GroupError("only the driver script calls shutdown()")

    def __enter__(self) -> "WorkerRuntime":
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None
