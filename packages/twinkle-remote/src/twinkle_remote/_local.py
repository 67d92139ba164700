"""LocalRuntime: components live in this process; under torchrun, in every process that runs the script."""

import logging
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from twinkle_mesh import DeviceGroup, DeviceMesh, draw_topology, launcher_rank, launcher_world_size
from twinkle_remote._collect import combine
from twinkle_remote._errors import GroupError, RemoteTypeError, RuntimeStateError
from twinkle_remote._placement_arguments import FailurePolicy
from twinkle_remote._protocol import Execute
from twinkle_remote._stats import ComponentStats, Totals
from twinkle_remote._trace import Trace

logger = logging.getLogger("twinkle_remote")


class LocalRuntime:
    """Builds every component in this process. Mode 'torchrun' where torchrun (WORLD_SIZE > 1) started it, else 'local'.

    groups: checked, so that one script suits all modes. trace: see `initialize`. on_shutdown: called once, by `shutdown`.
    Raises GroupError for groups that cannot all be these processes.
    """

    slices_in_loader = True
    plan = None

    def __init__(
        self,
        groups: Iterable[DeviceGroup] | None = None,
        *,
        trace: str | Path | None = None,
        on_shutdown: Callable[["LocalRuntime"], None] | None = None,
    ) -> None:
        self.world_size = launcher_world_size()
        self.mode: Literal["local", "torchrun", "ray"] = "torchrun" if self.world_size > 1 else "local"
        self.groups = named(groups or ())
        self._explicit = groups is not None
        self._on_shutdown = on_shutdown
        self._check_groups()
        self._totals: dict[str, Totals] = {}
        self.trace = None if trace is None else Trace(_path_of_rank(Path(trace)))

    def is_remote(self, group_name: str | None) -> bool:
        if group_name is not None and self._explicit:
            find_group(self.groups, group_name)
        return False

    def mesh_for(self, group_name: str | None, mesh: DeviceMesh | None, execute: Execute) -> DeviceMesh:
        group = find_group(self.groups, group_name) if group_name is not None and self._explicit else None
        if group_name is not None and group is None:
            logger.warning("remote_group=%r: initialize() was not called with groups, so what it names is built in this process", group_name)
        if mesh is None:
            mesh = DeviceMesh.from_sizes(dp_size=self.world_size)
        elif group is not None and execute == "all":
            check_mesh_fits(mesh, group)
        elif self.mode == "torchrun" and execute == "all" and mesh.world_size != self.world_size:
            raise GroupError(f"the mesh has {mesh.world_size} ranks, but torchrun started {self.world_size} processes: make them equal")
        elif mesh.world_size > self.world_size:
            logger.warning(
                "a mesh of %d ranks in %d process(es): this process is only one of them; start with torchrun or initialize('ray', ...)",
                mesh.world_size,
                self.world_size,
            )
        return mesh if group is None else on_devices_of(group, mesh)

    def create(
        self,
        cls: type,
        group_name: str,
        mesh: DeviceMesh,
        execute: Execute,
        policy: FailurePolicy,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> NoReturn:
        raise AssertionError("components of a local runtime are built in process")

    def adopt(self, link: Any) -> NoReturn:
        raise RuntimeStateError("a handle works in the driver that built its component and in workers of the same initialize('ray', ...), not here")

    def record(self, component: str, method: str, start_s: float, end_s: float, *, failed: bool) -> None:
        self._totals.setdefault(component, Totals(component, None)).add_run(method, end_s - start_s, failed=failed)
        if self.trace is not None:
            self.trace.add(component, launcher_rank(), method, start_s, end_s)

    def stats(self) -> dict[str, ComponentStats]:
        return {name: totals.snapshot() for name, totals in self._totals.items()}

    def draw(self, *, format: Literal["text", "svg"] = "text") -> str:
        return draw_topology(self.groups.values(), [], format=format)

    def shutdown(self) -> None:
        try:
            if self.trace is not None:
                self.trace.write_at_end()
        finally:
            if self._on_shutdown is not None:
                self._on_shutdown(self)

    def __enter__(self) -> "LocalRuntime":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _check_groups(self) -> None:
        groups = list(self.groups.values())
        for group in groups:
            if group.num_workers != self.world_size:
                started = "one process" if self.mode == "local" else f"{self.world_size} processes (torchrun)"
                raise GroupError(
                    f"device group {group.name!r} has {group.num_workers} workers, but this is {started}: start the script with "
                    f"'torchrun --nproc-per-node {group.num_workers}', or use initialize('ray', ...)"
                )
        if self.mode == "torchrun" and len({group.ranks if isinstance(group.ranks, int) else tuple(group.ranks) for group in groups}) > 1:
            shown = ", ".join(f"{group.name!r} {group.ranks}" for group in groups)
            raise GroupError(f"under torchrun all groups are the same processes, but these name different ranks: {shown}; use initialize('ray', ...)")


def named(groups: Iterable[DeviceGroup]) -> dict[str, DeviceGroup]:
    """The groups by name. Raises GroupError for two of one name, RemoteTypeError for what is not a list of them."""
    if isinstance(groups, DeviceGroup):
        raise RemoteTypeError("groups is a list of DeviceGroup: put this one into [ ]")
    result: dict[str, DeviceGroup] = {}
    for group in groups:
        if not isinstance(group, DeviceGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RemoteTypeError(f"groups is a list of DeviceGroup, not of {type(group).__name__}: groups=[DeviceGroup('actor', 2, 'cpu')], say")
        if group.name in result:
            raise GroupError(f"two device groups are named {group.name!r}")
        result[group.name] = group
    return result


def find_group(groups: dict[str, DeviceGroup], name: str) -> DeviceGroup:
    """The group of this name. Raises GroupError, naming those that exist."""
    if name not in groups:
        known = ", ".join(repr(known) for known in sorted(groups)) or "none: pass groups=[DeviceGroup(...)] to initialize"
        raise GroupError(f"remote_group={name!r}: there is no such device group; there are {known}")
    return groups[name]


def check_mesh_fits(mesh: DeviceMesh, group: DeviceGroup) -> None:
    """Raises GroupError for a mesh whose size is not the group's."""
    if mesh.world_size != group.num_workers:
        devices = f"{group.num_devices} devices / {group.gpus_per_worker} a worker" if group.gpus_per_worker > 1 else f"ranks={group.num_devices}"
        raise GroupError(
            f"the device mesh has {mesh.world_size} ranks, but device group {group.name!r} has {group.num_workers} workers ({devices}): "
            f"change the mesh's sizes or the group's ranks so that they are equal"
        )


def on_devices_of(group: DeviceGroup, mesh: DeviceMesh) -> DeviceMesh:
    """The mesh on the group's devices. Raises GroupError for a mesh that asks for others; 'cuda', the default, goes with any group."""
    if mesh.device_type not in ("cuda", group.device_type):
        raise GroupError(
            f"the device mesh says device_type={mesh.device_type!r}, but device group {group.name!r} has {group.device_type!r} devices: "
            f"leave the mesh's out, or change the group's"
        )
    return mesh.with_device_type(group.device_type)


def reduce_over_data_ranks(value: Any, how: Literal["mean", "sum"], mesh: DeviceMesh, weight: float | None = None) -> Any:
    """Under torchrun, `value` summed or averaged over one rank of each data group; every rank gets the result. weight: how much it counts in a mean.

    Elsewhere (torch.distributed not initialised, or one data rank) the value as it is.
    """
    torch = sys.modules.get("torch")
    if torch is None or mesh.data_world_size == 1 or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return value
    if torch.distributed.get_world_size() != mesh.world_size:
        raise GroupError(f"the mesh has {mesh.world_size} ranks, but torch.distributed {torch.distributed.get_world_size()}: make them equal")
    try:
        mine = pickle.dumps((_to_cpu(value), weight))
    except Exception as error:  # so that the peers in the collective hear of it
        mine = pickle.dumps((_Unpicklable(repr(error)), None))
    packed: list[bytes] = [b""] * mesh.world_size
    torch.distributed.all_gather_object(packed, mine)
    results = [pickle.loads(packed[rank]) for rank in mesh.representatives()]
    for result, _ in results:
        if isinstance(result, _Unpicklable):
            raise GroupError(f"collect={how!r} could not send a result between ranks: {result.reason}")
    return combine(how, [result for result, _ in results], mesh, [weight for _, weight in results])


class _Unpicklable:
    def __init__(self, reason: str) -> None:
        self.reason = reason


def _to_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return value.detach().cpu() if hasattr(value, "detach") else value


def _path_of_rank(path: Path) -> Path:
    rank = launcher_rank()
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
