"""megatron-core's process groups for a mesh. Imported only once the platform is chosen.

megatron-core keeps one set of groups in a process (``parallel_state``). Models with equal sizes share it, one after the other too.
"""

import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from twinkle_mesh import DeviceMesh

from ._errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes that megatron-core's groups follow from."""

    world_size: int
    tp_size: int
    pp_size: int
    vpp_size: int | None
    cp_size: int
    ep_size: int
    etp_size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Layout":
        """The layout of a mesh."""
        names = ("world_size", "tp_size", "pp_size", "vpp_size", "cp_size", "ep_size", "etp_size")
        return cls(**{name: getattr(mesh, name) for name in names})


@dataclass
class _InUse:
    layout: Layout | None = None
    users: set[int] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=itertools.count)


_in_use = _InUse()


def acquire(mesh: DeviceMesh, *, seed: int, timeout_s: float) -> int:
    """Creates the groups of a mesh, or joins those of another model with the same layout. Collective over all ranks.

    Args:
        mesh: its world size must be that of torch.distributed.
        seed: of the generators of dropout.
        timeout_s: how long a collective may wait for its peers.

    Returns:
        A number for :func:`release`.

    Raises:
        LayoutError: another layout is in use in this process, or the mesh has another number of ranks than the group.
    """
    if mesh.world_size != dist.get_world_size():
        raise LayoutError(f"the mesh has {mesh.world_size} ranks, and {dist.get_world_size()} processes run: start as many as the mesh has ranks.")
    layout = Layout.of(mesh)
    if _in_use.users and _in_use.layout != layout:
        raise LayoutError(
            f"this process already holds a MegatronModel with {_in_use.layout}, and megatron-core has one layout a process: "
            f"close() that model before building one with {layout}, or put the two into different groups."
        )
    # The second: another user of megatron-core in this process may have destroyed the groups.
    if _in_use.layout != layout or not parallel_state.model_parallel_is_initialized():
        _destroy_groups()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp_size,
            pipeline_model_parallel_size=layout.pp_size,
            virtual_pipeline_model_parallel_size=layout.vpp_size,
            context_parallel_size=layout.cp_size,
            expert_model_parallel_size=layout.ep_size,
            expert_tensor_parallel_size=layout.etp_size,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
            create_gloo_process_groups=False,
        )
        _in_use.layout = layout
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    user = next(_in_use.numbers)
    _in_use.users.add(user)
    return user


def _destroy_groups() -> None:
    """Ends the groups of the layout before. megatron-core 0.16.1 only forgets them, and every gloo group keeps three threads, one of which polls."""
    groups = [group for group in parallel_state._global_process_group_list or () if group is not None]  # pyright: ignore[reportPrivateUsage]
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    _in_use.layout = None
    del groups
    _forget_embeddings()
    gc.collect()  # the closed models point to the groups in cycles, and the threads end with the last reference


def _forget_embeddings() -> None:
    """megatron-core 0.16.1 caches rotary tables in ``lru_cache``s on methods, which keep each embedding of a closed model, and its group."""
    for cls in (RotaryEmbedding, YarnRotaryEmbedding):
        for method in vars(cls).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()


def release(user: int) -> None:
    """A model no longer needs the groups."""
    _in_use.users.discard(user)
