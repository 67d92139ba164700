"""The process groups of a mesh, seen from one rank."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from twinkle_mesh import DeviceMesh, launcher_rank

from ._errors import LayoutError


@dataclass
class _Known:
    """Groups that exist, by their ranks: models with equal groups share them, for every gloo group keeps threads. Of one default group."""

    default: Any = None
    groups: dict[tuple[int, ...], Any] | None = None
    meshes: dict[tuple[int, ...], TorchMesh] | None = None


_known = _Known()


def _groups() -> dict[tuple[int, ...], Any]:
    if _known.default is not dist.group.WORLD:
        _known.default, _known.groups, _known.meshes = dist.group.WORLD, {}, {}
    assert _known.groups is not None
    return _known.groups


class Groups:
    """Which ranks of a mesh this one talks to, and about what. Collective: all ranks make it alike.

    Args:
        mesh: its world size must be that of torch.distributed. Ranks along fsdp and dp (and ep_fsdp and ep, where they are axes of their own) hold
            other data, ranks along cp and ulysses other parts of the same sequences.
        timeout_s: how long a collective may wait for its peers.

    Raises:
        LayoutError: another number of ranks than of processes, or an axis that TransformersModel does not have.
    """

    def __init__(self, mesh: DeviceMesh, timeout_s: float) -> None:
        check_mesh(mesh)
        self.mesh = mesh
        self.rank = launcher_rank()
        if mesh.world_size != dist.get_world_size():
            raise LayoutError(f"the mesh has {mesh.world_size} ranks, and {dist.get_world_size()} processes run: start as many as the mesh has ranks")
        self._timeout = timedelta(seconds=timeout_s)
        self.device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device(mesh.device_type)
        data_axes = [axis for axis in mesh.axis_sizes() if axis in ("dp", "fsdp", "ep_fsdp", "ep")]
        self.data = self.group_of(mesh.rank_groups(*data_axes))
        """Ranks that hold other rows; None where there is only this one, as for all groups here."""
        self.sequence = self.group_of(mesh.rank_groups("cp", "ulysses"))
        """Ranks that hold other parts of the same rows."""
        self.shard = self.group_of(mesh.rank_groups("fsdp"))
        """Ranks that hold other shards of the dense weights."""
        self.replicas = self.group_of(mesh.rank_groups(*[axis for axis in mesh.axis_sizes() if axis not in ("fsdp", "pp", "tp")]))
        """Ranks that hold the same shards of the dense weights."""
        self.everyone = self.group_of([tuple(range(mesh.world_size))])
        """All ranks: what each of them has whole."""
        self.experts = self.group_of(mesh.expert_rank_groups("ep"))
        """Ranks that hold other experts, and exchange tokens."""
        self.expert_shard = self.group_of(mesh.expert_rank_groups("ep_fsdp"))
        """Ranks that hold other shards of the same experts."""
        self.expert_whole = self.group_of(mesh.expert_rank_groups("ep_fsdp", "ep"))
        """Ranks that together hold all experts."""
        self.expert_replicas = self.group_of(mesh.expert_rank_groups("expert_dp"))
        """Ranks that hold the same shards of the same experts."""

    @cached_property
    def shard_mesh(self) -> TorchMesh:
        """The ranks over which fully_shard shards the dense weights; of this rank alone where they are not sharded."""
        return self._torch_mesh(self.mesh.rank_groups("fsdp"))

    @cached_property
    def expert_shard_mesh(self) -> TorchMesh:
        """The ranks over which fully_shard shards the experts."""
        return self._torch_mesh(self.mesh.expert_rank_groups("ep_fsdp"))

    def group_of(self, partition: Iterable[tuple[int, ...]]) -> Any:
        """This rank's group of a partition of the ranks; None when it is alone in it. All ranks make all groups, in the same order."""
        found: Any = None
        for ranks in partition:
            if len(ranks) == 1:
                continue
            group = self._make(ranks)
            if self.rank in ranks:
                found = group
        return found

    def _make(self, ranks: tuple[int, ...]) -> Any:
        known = _groups()
        if ranks not in known:
            everyone = len(ranks) == dist.get_world_size()
            known[ranks] = dist.group.WORLD if everyone else dist.new_group(list(ranks), timeout=self._timeout)
        return known[ranks]

    def _torch_mesh(self, partition: Iterable[tuple[int, ...]]) -> TorchMesh:
        found: tuple[tuple[int, ...], Any] | None = None
        for ranks in partition:  # fully_shard wants a group of one, too
            group = self._make(ranks)
            if self.rank in ranks:
                found = ranks, group
        assert found is not None, "a partition has every rank"
        assert _known.meshes is not None
        if found[0] not in _known.meshes:
            _known.meshes[found[0]] = TorchMesh.from_group(found[1], self.mesh.device_type)
        return _known.meshes[found[0]]


def check_mesh(mesh: DeviceMesh) -> None:
    """LayoutError when the mesh has an axis that TransformersModel does not have."""
    for axis, instead in (("tp", "fsdp_size or ulysses_size"), ("pp", "fsdp_size"), ("etp", "ep_size")):
        size = getattr(mesh, f"{axis}_size")
        if size > 1:
            raise LayoutError(f"TransformersModel has no {axis} axis ({axis}_size={size}): use {instead}, or MegatronModel")
    if mesh.device_type not in ("cpu", "cuda"):
        raise LayoutError(f"TransformersModel runs on 'cpu' and 'cuda' devices, not on {mesh.device_type!r}")
