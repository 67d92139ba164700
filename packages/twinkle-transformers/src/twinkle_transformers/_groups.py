"""The process groups of a mesh, seen from one rank."""

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from twinkle_mesh import DeviceMesh, launcher_rank
from twinkle_train import PeerError

from ._errors import LayoutError

T = TypeVar("T")


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

    @property
    def divides_weights(self) -> bool:
        """Whether no rank has all weights. Rank 0 alone reads checkpoints then, and sends to the others what they need."""
        return self.mesh.fsdp_size * self.mesh.ep_size * self.mesh.ep_fsdp_size > 1

    def on_readers(self, make: Callable[[], T]) -> T | None:
        """What ranks make that read checkpoints; None on the others. Where weights are divided, collective: what rank 0 raises, all ranks raise."""
        made: T | None = None

        def run() -> None:
            nonlocal made
            made = make()

        self.from_readers(run)
        return made

    def from_readers(self, make: Callable[[], T]) -> T:
        """The same, and the others get it from rank 0."""
        if not self.divides_weights:
            return make()
        packed: list[bytes] = [b""]
        failure: Exception | None = None
        if self.rank == 0:
            try:
                packed = [pickle.dumps((make(), None))]
            except Exception as error:  # raised below, once the other ranks know
                failure = error
                packed = [_packed_error(error)]
        dist.broadcast_object_list(packed, src=0, device=self.device)
        made, error = pickle.loads(packed[0])
        if failure is not None:
            raise failure
        if error is not None:
            raise error
        return made

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


def _packed_error(error: Exception) -> bytes:
    """An error as `from_readers` sends it; one that does not pickle as what it says."""
    try:
        packed = pickle.dumps((None, error))
        pickle.loads(packed)
    except Exception:  # whatever the code of its class does
        return pickle.dumps((None, PeerError(f"rank 0 stopped: {type(error).__name__}: {error}")))
    return packed
