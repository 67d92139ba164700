"""RayRuntime: components live on the workers of a Ray cluster, a placement group for each device group."""

import atexit
import contextlib
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from twinkle_mesh import DeviceGroup, DeviceMesh, PlacementPlan, WorkerSlot, plan_placement, visible_devices_variable
from twinkle_remote import _ray_cluster
from twinkle_remote._dispatch import Share
from twinkle_remote._errors import DecorationError, PlacementTimeoutError, StartTimeoutError, WorkerDiedError
from twinkle_remote._local import check_mesh_fits, find_group, named
from twinkle_remote._packing import ship_definitions
from twinkle_remote._protocol import Execute, MethodSpec
from twinkle_remote._ray_api import PlacementGroupSchedulingStrategy, placement_group, ray, remove_placement_group
from twinkle_remote._ray_calls import wait_for
from twinkle_remote._ray_component import RayComponent
from twinkle_remote._ray_worker import Identity, Worker
from twinkle_remote._trace import Trace

logger = logging.getLogger("twinkle_remote")

_NODE_PIN = 0.001


class RayRuntime:
    """Starts or joins a Ray, reserves the groups' places, and builds components on their workers. Arguments: see `initialize`."""

    mode: Literal["local", "torchrun", "ray"] = "ray"
    slices_in_loader = False

    def __init__(
        self,
        groups: Iterable[DeviceGroup],
        *,
        cpus_per_rank: float,
        start_timeout_s: float,
        call_timeout_s: float,
        threads_per_worker: int | None,
        object_store_bytes: int | None,
        address: str | None,
        trace: str | Path | None,
        on_shutdown: Callable[["RayRuntime"], None],
    ) -> None:
        self.groups = named(groups)
        self.is_open = True
        self.trace = None if trace is None else Trace(trace)
        self._start_timeout_s = start_timeout_s
        self._call_timeout_s = call_timeout_s
        self._threads_per_worker = threads_per_worker
        self._on_shutdown = on_shutdown
        self._places: dict[str, Any] = {}
        self._components: weakref.WeakSet[RayComponent] = weakref.WeakSet()
        self._splits = tuple(sorted({group.num_workers for group in self.groups.values()}))
        if address is None:
            # Planned first: a machine that is too small is told so before anything is started.
            machine = _ray_cluster.this_machine()
            self.plan: PlacementPlan | None = plan_placement(self.groups.values(), [machine], cpus_per_rank=cpus_per_rank)
            self._cluster = _ray_cluster.Cluster.start(machine, object_store_bytes, start_timeout_s)
        else:
            self._cluster = _ray_cluster.Cluster.connect(address)
        atexit.register(self.shutdown)
        try:
            if address is not None:
                self.plan = plan_placement(self.groups.values(), self._cluster.nodes(), cpus_per_rank=cpus_per_rank)
            self._reserve()
        except BaseException:
            self.shutdown()
            raise

    def is_remote(self, group_name: str | None) -> bool:
        if group_name is None:
            return False
        find_group(self.groups, group_name)
        return True

    def mesh_for(self, group_name: str | None, mesh: DeviceMesh | None, execute: Execute) -> DeviceMesh:
        group = None if group_name is None else find_group(self.groups, group_name)
        if mesh is None:
            mesh = DeviceMesh.from_sizes(dp_size=1 if group is None or execute == "first" else group.num_workers)
        elif group is not None and execute == "all":
            check_mesh_fits(mesh, group)
        return mesh if group is None else mesh.with_device_type(group.device_type)

    def create(self, cls: type, group_name: str, mesh: DeviceMesh, execute: Execute, args: Sequence[Any], kwargs: dict[str, Any]) -> RayComponent:
        """Start a process for every rank and build the object in each; raises what its constructor raises."""
        ship_definitions(cls)
        component = RayComponent(self, cls.__name__, group_name, mesh, self._call_timeout_s)
        slots = self._slots(group_name)[: 1 if execute == "first" else None]
        try:
            self._start_workers(component, cls, slots)
            self._build(component, cls, args, {**kwargs, "remote_group": group_name, "device_mesh": mesh})
        except BaseException:
            component.kill("its construction failed")
            raise
        self._splits = tuple(sorted({*self._splits, mesh.data_world_size}))
        return component

    def known_splits(self) -> tuple[int, ...]:
        """Into how many parts batches may be cut: the data ranks of all known meshes and the workers of all groups."""
        return self._splits

    def log_tail(self, pid: int) -> str:
        """The last lines that a worker process wrote to stderr, if they can be read here."""
        return self._cluster.log_tail(pid)

    def shutdown(self) -> None:
        if not self.is_open:
            return
        atexit.unregister(self.shutdown)
        try:
            for component in list(self._components):
                for error in component.unreported_errors():
                    logger.error("a call failed and nobody collected its result:\n%s", error)
            if self.trace is not None:
                self.trace.write()
        finally:
            self.is_open = False
            with contextlib.ExitStack() as last:  # done whatever happens before, last first
                last.callback(self._on_shutdown, self)
                last.callback(self._cluster.close)
                for component in list(self._components):
                    component.kill("shutdown")
                for place in self._places.values():
                    remove_placement_group(place)

    def __enter__(self) -> "RayRuntime":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _slots(self, group_name: str) -> tuple[WorkerSlot, ...]:
        assert self.plan is not None
        return self.plan.workers[group_name]

    def _addresses(self) -> list[str]:
        """The plan's nodes, as Ray calls them."""
        assert self.plan is not None
        nodes = self._cluster.nodes()
        # A plan for this machine alone was made before its Ray had an address.
        return [nodes[0].address] if self._cluster.folder is not None else [node.address for node in self.plan.nodes]

    def _reserve(self) -> None:
        """Reserve the groups' places as planned. Raises PlacementTimeoutError."""
        assert self.plan is not None
        addresses = self._addresses()
        deadline = time.monotonic() + self._start_timeout_s
        for name, group in self.groups.items():
            share = self.plan.device_share(name)
            bundles = [_bundle(group, slot, share, addresses) for slot in self._slots(name)]
            self._places[name] = placement_group(bundles, strategy="PACK")
        for name, place in self._places.items():
            if not place.wait(max(0.0, deadline - time.monotonic())):
                free = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU", "NPU")}
                raise PlacementTimeoutError(
                    f"the cluster did not give device group {name!r} its {self.groups[name].num_workers} places within "
                    f"{self._start_timeout_s:g} s; it has free: {free}. Other jobs may hold the rest: wait for them, "
                    f"make the group smaller, or raise start_timeout_s"
                )

    def _start_workers(self, component: RayComponent, cls: type, slots: Sequence[WorkerSlot]) -> None:
        group = self.groups[component.group_name]
        asked = _worker_env(cls, group.device_type)
        on_node = Counter(slot.node_index for slot in self._slots(group.name))
        seen: Counter[int] = Counter()
        self._components.add(component)
        for slot in slots:
            assert self.plan is not None
            node = self.plan.nodes[slot.node_index]
            environment = _devices_env(self.plan, group, slot) | {
                "RANK": str(slot.rank),
                "WORLD_SIZE": str(len(slots)),
                "LOCAL_RANK": str(seen[slot.node_index]),
                "LOCAL_WORLD_SIZE": str(sum(other.node_index == slot.node_index for other in slots)),
                "OMP_NUM_THREADS": str(self._threads_per_worker or max(1, int(node.num_cpus) // on_node[slot.node_index])),
            }
            if group.device_type == "cpu":
                # Groups share the cores, and a thread that spins at a barrier takes them from whom it waits for: on two cores with one
                # other busy process, a training step of two threads took four times as long.
                environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
            seen[slot.node_index] += 1
            identity = Identity(
                component_id=component.number,
                component=component.class_name,
                group=group.name,
                rank=slot.rank,
                world_size=len(slots),
                groups=self.groups,
            )
            component.actors.append(_spawn(self._places[group.name], slot.rank, environment | asked, identity))
        self._await_processes(component)

    def _await_processes(self, component: RayComponent) -> None:
        references = [actor.hello.remote() for actor in component.actors]
        deadline = time.monotonic() + self._start_timeout_s
        waiting = list(references)
        while waiting:
            arrived, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not arrived:
                ranks = [references.index(reference) for reference in waiting]
                raise StartTimeoutError(
                    f"the worker processes of ranks {ranks} of {component.describe()} did not start within {self._start_timeout_s:g} s: "
                    f"is the machine overloaded? Raise start_timeout_s"
                )
            try:
                ray.get(arrived)
            except ray.exceptions.RayError as error:
                rank = references.index(arrived[0])
                raise WorkerDiedError(f"the worker process of rank {rank} of {component.describe()} could not start: {error}") from error
        component.pids = ray.get(references)

    def _build(self, component: RayComponent, cls: type, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        spec = MethodSpec(
            name="__init__",
            parameters=(),
            dispatch="all",
            execute="all",
            collect="none",
            sync=True,
            lazy_collect=False,
            timeout_s=None,
            allow_empty=False,
        )
        meeting = component.actors[0].meet.remote()
        share = Share((cls, tuple(args), kwargs), {})
        wait_for([component.submit("build", spec, [share] * len(component.actors), extra=(meeting,))], None)


def _bundle(group: DeviceGroup, slot: WorkerSlot, share: float, addresses: Sequence[str]) -> dict[str, float]:
    bundle = {"CPU": slot.num_cpus, f"node:{addresses[slot.node_index]}": _NODE_PIN}
    if slot.device_ids:
        bundle["GPU" if group.device_type == "cuda" else group.device_type.upper()] = len(slot.device_ids) if share == 1 else share
    return bundle


def _devices_env(plan: PlacementPlan, group: DeviceGroup, slot: WorkerSlot) -> dict[str, str]:
    """What makes the worker see the plan's devices. A bundle only counts them, and several components of a group share them, so actors
    reserve no device in Ray and Ray is told to leave the variable alone."""
    environment = plan.environment(group.name, slot.rank)
    variable = visible_devices_variable(group.device_type if slot.device_ids else "cuda")
    if not environment and variable is not None:  # a CPU group sees no accelerator
        environment = {variable: ""}
    return environment | {f"RAY_EXPERIMENTAL_NOSET_{variable}": "1"}


def _worker_env(cls: type, device_type: str) -> dict[str, str]:
    hook: Any = getattr(cls, "__worker_env__", None)
    if hook is None:
        return {}
    environment: Any = hook(device_type)
    if not isinstance(environment, dict) or not all(isinstance(part, str) for item in environment.items() for part in item):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise DecorationError(f"{cls.__name__}.__worker_env__ returns a dict of strings, not {environment!r:.200}")
    if "HOME" in environment:  # Ray 2.60: a worker whose environment sets HOME never starts
        raise DecorationError(f"{cls.__name__}.__worker_env__ cannot set HOME: Ray's workers do not start with it")
    return environment  # pyright: ignore[reportUnknownVariableType]


def _spawn(place: Any, rank: int, environment: dict[str, str], identity: Identity) -> Any:
    return (
        ray.remote(Worker)
        .options(
            num_cpus=0,
            num_gpus=0,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=rank),
            runtime_env={"env_vars": environment},
        )
        .remote(identity)
    )
