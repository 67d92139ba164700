"""The errors of twinkle_mesh.

MeshError
 +-- InvalidMeshError        (ValueError)    sizes, axes or group fields that cannot be
 +-- RankOutsideMeshError    (ValueError)    a rank that the mesh or the plan does not have
 +-- LauncherError           (ValueError)    RANK, WORLD_SIZE or LOCAL_RANK hold something that is not a rank
 +-- PlacementError          (RuntimeError)  the nodes cannot hold the groups: what is short where

Each takes its message as its one argument, so that it pickles.
"""


class MeshError(Exception):
    """Base of everything that twinkle_mesh raises on purpose."""


class InvalidMeshError(MeshError, ValueError):
    """Sizes that do not factor the world size, an axis that does not exist, or a group that cannot be."""


class RankOutsideMeshError(MeshError, ValueError):
    """A rank below 0 or not below the world size."""


class LauncherError(MeshError, ValueError):
    """The launcher's environment (RANK, WORLD_SIZE, LOCAL_RANK) is not one of whole numbers that fit together."""


class PlacementError(MeshError, RuntimeError):
    """The nodes cannot hold the groups. The message says which group needs what and what each node has left."""
