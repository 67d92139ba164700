"""DeviceMesh: how the ranks of one component are laid out over parallel axes.

The order of the axes is megatron-core's default ('tp-cp-ep-dp-pp', tp fastest), so data ranks and process groups equal
those of `megatron.core.parallel_state`.
"""

import operator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Literal
from warnings import warn

from twinkle_mesh._axes import AxisLayout, check_rank
from twinkle_mesh._device_types import normalize_device_type
from twinkle_mesh._errors import InvalidMeshError
from twinkle_mesh._launcher import launcher_rank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

_DENSE_AXES = ("pp", "dp", "fsdp", "cp", "ulysses", "tp")
_DENSE_AXES_WITH_EXPERTS = ("pp", "dp", "ep_fsdp", "ep", "fsdp", "cp", "ulysses", "tp")
_EXPERT_AXES = ("pp", "expert_dp", "ep_fsdp", "ep", "etp")
_SIZES = ("dp_size", "fsdp_size", "tp_size", "pp_size", "ulysses_size", "cp_size", "ep_size", "etp_size", "ep_fsdp_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMesh:
    """The ranks of one component, laid out over parallel axes. Immutable, hashable, and without process state.

    Build it with `from_sizes`, which fills in what follows from the rest. The *dense* axes, outermost first, are pp, dp,
    fsdp, cp, ulysses, tp: their sizes multiply to `world_size`. The *expert* axes pp, expert_dp, ep_fsdp, ep, etp factor
    the same ranks once more, for the weights of mixture-of-experts layers, as megatron-core does.

    `extra_expert_axes` says that ep_fsdp and ep are data axes of their own (dense order pp, dp, ep_fsdp, ep, fsdp, cp,
    ulysses, tp) rather than folded into the others; see `from_sizes`.

    Raises InvalidMeshError (a ValueError) if the sizes do not fit together.
    """

    world_size: int
    dp_size: int
    fsdp_size: int
    tp_size: int
    pp_size: int
    ulysses_size: int
    cp_size: int
    ep_size: int
    etp_size: int
    ep_fsdp_size: int
    vpp_size: int | None = None
    device_type: str = "cuda"
    sequence_parallel: bool = False
    extra_expert_axes: bool = False

    def __post_init__(self) -> None:
        for name in ("world_size", *_SIZES):
            _check_size(name, getattr(self, name))
        if self.vpp_size is not None and (_check_size("vpp_size", self.vpp_size) < 2 or self.pp_size == 1):
            raise InvalidMeshError(
                f"vpp_size={self.vpp_size} with pp_size={self.pp_size}: virtual stages need pp_size >= 2 and vpp_size >= 2 (or None)"
            )
        object.__setattr__(self, "device_type", normalize_device_type(self.device_type))
        if self._dense.world_size != self.world_size:
            raise InvalidMeshError(f"world_size={self.world_size}, but {_product(self._dense)} = {self._dense.world_size}")
        stage = self.world_size // self.pp_size
        expert = self.ep_fsdp_size * self.ep_size * self.etp_size
        if stage % expert:
            hint = ""
            if self.etp_size > 1 and self.etp_size == self.tp_size:
                hint = " (etp_size is tp_size unless you set it, as in megatron-core; etp_size=1 keeps each expert whole)"
            raise InvalidMeshError(
                f"the expert axes ep_fsdp {self.ep_fsdp_size} x ep {self.ep_size} x etp {self.etp_size} = {expert} do not divide "
                f"the {stage} ranks of a pipeline stage, {_product(self._dense)} = {self.world_size}{hint}"
            )

    @classmethod
    def from_sizes(
        cls,
        *,
        world_size: int | None = None,
        dp_size: int | None = 1,
        fsdp_size: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        ulysses_size: int | None = None,
        cp_size: int | None = None,
        ep_size: int | None = None,
        etp_size: int | None = None,
        ep_fsdp_size: int | None = None,
        vpp_size: int | None = None,
        device_type: str = "cuda",
        sequence_parallel: bool = False,
    ) -> "DeviceMesh":
        """Build a mesh from the sizes of its axes. None is 1, but for `world_size` and `etp_size`.

        - `world_size` None: the product of the dense sizes.
        - `world_size` equal to that product: the expert axes fold into the others; ep_fsdp x ep x etp must divide
          the ranks of a pipeline stage.
        - `world_size` equal to that product times ep x ep_fsdp: those two are data axes of their own. Each of their
          ranks reads its own share of a batch, and `dp_size` counts the replicas of an expert group:
          `from_sizes(world_size=8, dp_size=2, ep_size=2, ep_fsdp_size=2)` has 8 data ranks.
        - `etp_size` None: `tp_size`, as in megatron-core.
        - `vpp_size` 1 is None. `sequence_parallel` without tensor parallelism has no effect: it warns and is off.

        Raises InvalidMeshError (a ValueError) showing the factorisations that it tried.
        """
        given = {
            "dp_size": dp_size,
            "fsdp_size": fsdp_size,
            "tp_size": tp_size,
            "pp_size": pp_size,
            "ulysses_size": ulysses_size,
            "cp_size": cp_size,
            "ep_size": ep_size,
            "etp_size": tp_size if etp_size is None else etp_size,
            "ep_fsdp_size": ep_fsdp_size,
        }
        sizes = {name: 1 if size is None else _check_size(name, size) for name, size in given.items()}
        dense = prod(sizes[name + "_size"] for name in _DENSE_AXES)
        experts = sizes["ep_size"] * sizes["ep_fsdp_size"]
        world = dense if world_size is None else _check_size("world_size", world_size)
        if world not in (dense, dense * experts):
            raise InvalidMeshError(_explain(world, sizes, dense, experts))
        if sequence_parallel and sizes["tp_size"] == 1:
            warn("sequence_parallel has no effect without tensor parallelism (tp_size is 1): it is off", stacklevel=2)
            sequence_parallel = False
        return cls(
            world_size=world,
            vpp_size=None if vpp_size == 1 else vpp_size,
            device_type=device_type,
            sequence_parallel=sequence_parallel,
            extra_expert_axes=world != dense,
            **sizes,
        )

    @property
    def data_world_size(self) -> int:
        """How many shares a batch is split into: dp x fsdp (x ep_fsdp x ep where those are axes of their own)."""
        return self.world_size // (self.pp_size * self._inner)

    @property
    def expert_dp_size(self) -> int:
        """How many replicas each expert's weights have: what is left of a stage after ep_fsdp, ep and etp."""
        return self.world_size // (self.pp_size * self.ep_fsdp_size * self.ep_size * self.etp_size)

    def data_rank(self, rank: int) -> int:
        """Which share of a batch `rank` reads, 0 to data_world_size - 1. Ranks that differ in tp, ulysses, cp or pp share one.

        Raises RankOutsideMeshError (a ValueError) for a rank that the mesh does not have.
        """
        return check_rank(rank, self.world_size) // self._inner % self.data_world_size

    def get_slice(self, n: int, rank: int | None = None) -> slice:
        """The part of a batch of `n` items that `rank` reads: `batch[mesh.get_slice(len(batch))]`.

        Over the data ranks the slices partition the batch in order, and their lengths differ by at most one (they may be
        empty). `rank` None is the launcher's (the environment variable RANK, else 0). Takes constant time.

        Raises RankOutsideMeshError (a ValueError) for a rank that the mesh does not have.
        """
        length = operator.index(n)
        if length < 0:
            raise InvalidMeshError(f"a batch cannot have {length} items")
        # data_rank and data_world_size written out: schedulers call this once a rank and a batch.
        inner = self.cp_size * self.ulysses_size * self.tp_size
        shares = self.world_size // (self.pp_size * inner)
        index = check_rank(launcher_rank() if rank is None else rank, self.world_size) // inner % shares
        share, longer = divmod(length, shares)
        start = index * share + min(index, longer)
        return slice(start, start + share + (index < longer))

    def axis_sizes(self) -> dict[str, int]:
        """The dense axes and their sizes, outermost first; they multiply to world_size."""
        return dict(zip(self._dense.names, self._dense.sizes, strict=True))

    def expert_axis_sizes(self) -> dict[str, int]:
        """The expert axes (pp, expert_dp, ep_fsdp, ep, etp) and their sizes; they multiply to world_size."""
        return dict(zip(self._expert.names, self._expert.sizes, strict=True))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` lies on each dense axis, outermost axis first. Raises RankOutsideMeshError."""
        return self._dense.coordinates(rank)

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` lies on each expert axis: pp, expert_dp, ep_fsdp, ep, etp. Raises RankOutsideMeshError."""
        return self._expert.coordinates(rank)

    def rank_groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ along these dense axes only, in order of their first rank.

        The same on every rank: create a process group for each, in this order, on all ranks. For expert weights use
        `expert_rank_groups`. Raises InvalidMeshError for an axis that is not a dense one.
        """
        return self._dense.groups(axes)

    def expert_rank_groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ along these expert axes only (pp, expert_dp, ep_fsdp, ep, etp), in order of first rank.

        `expert_rank_groups('ep')` are the ranks that exchange tokens, `('expert_dp', 'ep_fsdp')` those that hold parts
        or replicas of the same experts. Raises InvalidMeshError for another axis.
        """
        return self._expert.groups(axes)

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The one of `rank_groups(*axes)` that holds `rank`. Raises RankOutsideMeshError or InvalidMeshError."""
        return self._dense.group_of(rank, axes)

    def expert_group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The one of `expert_rank_groups(*axes)` that holds `rank`. Raises RankOutsideMeshError or InvalidMeshError."""
        return self._expert.group_of(rank, axes)

    def representatives(self) -> tuple[int, ...]:
        """One rank for each data rank, in data order: on the last pipeline stage, first of its tp, ulysses and cp peers."""
        first = (self.pp_size - 1) * self.data_world_size * self._inner
        return tuple(range(first, self.world_size, self._inner))

    def is_last_stage(self, rank: int) -> bool:
        """Whether `rank` is on the last pipeline stage, the one that has the loss. Raises RankOutsideMeshError."""
        return check_rank(rank, self.world_size) * self.pp_size // self.world_size == self.pp_size - 1

    def with_device_type(self, device_type: str) -> "DeviceMesh":
        """The same mesh on devices of another type."""
        return replace(self, device_type=device_type)

    def draw(self, *, format: Literal["text", "svg"] = "text") -> str:
        """This mesh as a drawing: the sizes, then which ranks serve each data rank on each pipeline stage.

        format: 'text' is plain ASCII; 'svg' is a whole SVG file that suits light and dark pages. A mesh of any size has a
        drawing: of many stages and data ranks the first and the last are shown.

        Raises InvalidMeshError (a ValueError) for another format.
        """
        check_format(format)
        if format == "svg":
            from twinkle_mesh._mesh_svg import mesh_svg

            return mesh_svg(self)
        from twinkle_mesh._mesh_text import mesh_text

        return mesh_text(self)

    def to_torch_device_mesh(self) -> "TorchDeviceMesh":
        """This mesh as a `torch.distributed.DeviceMesh` of the dense axes whose size is not 1 (one axis 'dp' if all are 1).

        A collective call: every rank makes it, after `init_process_group`. Axes of size 1 are left out because torch
        would create a process group of one for every rank. Raises ImportError without torch.
        """
        try:
            from torch.distributed.device_mesh import init_device_mesh
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError("DeviceMesh.to_torch_device_mesh needs torch: pip install torch", name="torch") from error
        axes = {name: size for name, size in self.axis_sizes().items() if size > 1} or {"dp": 1}
        return init_device_mesh(self.device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    @property
    def _inner(self) -> int:
        # Ranks below the data axes: they read the same tokens.
        return self.cp_size * self.ulysses_size * self.tp_size

    @property
    def _dense(self) -> AxisLayout:
        inner = (self.fsdp_size, self.cp_size, self.ulysses_size, self.tp_size)
        if self.extra_expert_axes:
            return AxisLayout(_DENSE_AXES_WITH_EXPERTS, (self.pp_size, self.dp_size, self.ep_fsdp_size, self.ep_size, *inner))
        return AxisLayout(_DENSE_AXES, (self.pp_size, self.dp_size, *inner))

    @property
    def _expert(self) -> AxisLayout:
        sizes = (self.pp_size, self.expert_dp_size, self.ep_fsdp_size, self.ep_size, self.etp_size)
        return AxisLayout(_EXPERT_AXES, sizes)


def check_format(format: str) -> None:
    """InvalidMeshError unless there are drawings in this format."""
    if format not in ("text", "svg"):
        raise InvalidMeshError(f"format={format!r}: a drawing is 'text' or 'svg'")


def _check_size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidMeshError(f"{name}={value!r}: a size is a whole number of at least 1, or None")
    return value


def _product(layout: AxisLayout) -> str:
    return " x ".join(f"{name} {size}" for name, size in zip(layout.names, layout.sizes, strict=True))


def _explain(world: int, sizes: dict[str, int], dense: int, experts: int) -> str:
    dense_text = " x ".join(f"{name} {sizes[name + '_size']}" for name in _DENSE_AXES)
    tried = f"{dense_text} = {dense}"
    if experts > 1:
        tried += f", nor x ep_fsdp {sizes['ep_fsdp_size']} x ep {sizes['ep_size']} = {dense * experts}"
    message = f"world_size={world} is not {tried}"
    dp = sizes["dp_size"]
    fill = f"dp_size={world * dp // dense} would fill it"
    if world % dense == 0:
        message += f"; a factor of {world // dense} is missing: {fill}, or an axis that was left out"
        if experts > 1 and world % (dense * experts) == 0:
            message += f" (of {world // dense // experts}, dp_size={world * dp // dense // experts}, where ep_fsdp and ep are axes of their own)"
        return message
    if world * dp % dense == 0:
        return f"{message}; {fill}"
    return f"{message}; {dense // dp} (the product without dp) does not divide it"
