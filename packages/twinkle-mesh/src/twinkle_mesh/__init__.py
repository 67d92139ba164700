"""Device meshes and device groups: topology, data ranks and placement for distributed training."""

from twinkle_mesh._device_types import normalize_device_type, visible_devices_env, visible_devices_variable
from twinkle_mesh._errors import InvalidMeshError, LauncherError, MeshError, PlacementError, RankOutsideMeshError
from twinkle_mesh._group import DeviceGroup
from twinkle_mesh._launcher import launcher_local_rank, launcher_rank, launcher_world_size
from twinkle_mesh._mesh import DeviceMesh
from twinkle_mesh._nodes import Node
from twinkle_mesh._placement import plan_placement
from twinkle_mesh._plan import PlacementPlan, WorkerSlot
from twinkle_mesh._topology import draw_topology

__all__ = [
    "DeviceGroup",
    "DeviceMesh",
    "InvalidMeshError",
    "LauncherError",
    "MeshError",
    "Node",
    "PlacementError",
    "PlacementPlan",
    "RankOutsideMeshError",
    "WorkerSlot",
    "draw_topology",
    "launcher_local_rank",
    "launcher_rank",
    "launcher_world_size",
    "normalize_device_type",
    "plan_placement",
    "visible_devices_env",
    "visible_devices_variable",
]
