"""Where the workers of each group live, and how their processes are started there."""

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_mesh import DeviceGroup, PlacementPlan, WorkerSlot, visible_devices_variable
from twinkle_remote._errors import DecorationError, StartTimeoutError, WorkerDiedError
from twinkle_remote._ray_api import PlacementGroupSchedulingStrategy, ray
from twinkle_remote._ray_messages import Hello, Identity, Limits

_NODE_PIN = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """The reserved places of all groups. It pickles: workers get it, to build components in other groups.

    addresses: of the plan's nodes, as Ray calls them. reserved: the groups' placement groups. token: see `_control`. compress_above_bytes: None
    also where everything is on one node.
    """

    groups: dict[str, DeviceGroup]
    plan: PlacementPlan
    addresses: tuple[str, ...]
    reserved: dict[str, Any]
    threads_per_worker: int | None
    limits: Limits
    token: str
    compress_above_bytes: int | None

    def slots(self, group_name: str, num_workers: int) -> tuple[WorkerSlot, ...]:
        """The places of the first `num_workers` workers of a group."""
        return self.plan.workers[group_name][:num_workers]

    def ranks_elsewhere(self, group_name: str, address: str) -> frozenset[int]:
        """The ranks of a group that are on other nodes than that of this address."""
        return frozenset(slot.rank for slot in self.plan.workers[group_name] if self.addresses[slot.node_index] != address)


@dataclass(frozen=True, kw_only=True, slots=True)
class Crew:
    """The worker processes of a component, in order of rank: Ray's handles of them and what they said when they were up."""

    actors: tuple[Any, ...]
    hellos: tuple[Hello, ...]

    def kill(self) -> None:
        """End them at once."""
        for actor in self.actors:
            ray.kill(actor)

    def addresses(self, ranks: Sequence[int]) -> list[tuple[str, int]]:
        """The control channels of some ranks."""
        return [(self.hellos[rank].host, self.hellos[rank].control_port) for rank in ranks]


def bundles(plan: PlacementPlan, group: DeviceGroup, addresses: Sequence[str]) -> list[dict[str, float]]:
    """What each worker of a group reserves in Ray: cores, devices, and that it is on its node."""
    share = plan.device_share(group.name)
    return [_bundle(group, slot, share, addresses) for slot in plan.workers[group.name]]


def start_workers(places: Places, reference: Any, cls: type, group_name: str, num_workers: int, *, component_id: str, what: str) -> Crew:
    """Start the worker processes of a component and wait until they are up.

    reference: to `places`, in Ray's store. what: the component, for messages. Raises StartTimeoutError, and WorkerDiedError for processes that
    cannot start or whose node is gone; then none is left.
    """
    slots = places.slots(group_name, num_workers)
    _check_nodes(places, slots, what)
    environments = _environments(places, group_name, slots, worker_env(cls, places.groups[group_name].device_type))
    actors: list[Any] = []
    try:
        for slot, environment in zip(slots, environments, strict=True):
            identity = Identity(
                component_id=component_id,
                component=cls.__name__,
                group=group_name,
                rank=slot.rank,
                world_size=len(slots),
                groups=places.groups,
                limits=places.limits,
                token=places.token,
                places=reference,
            )
            actors.append(_spawn(places.reserved[group_name], slot.rank, environment, identity))
        return Crew(actors=tuple(actors), hellos=tuple(_await_processes(actors, what, places.limits.start_timeout_s)))
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise


def worker_env(cls: type, device_type: str) -> dict[str, str]:
    """What the class asks for in its workers' environment. Raises DecorationError for what cannot be had."""
    hook: Any = getattr(cls, "__worker_env__", None)
    if hook is None:
        return {}
    environment: Any = hook(device_type)
    if not isinstance(environment, dict) or not all(isinstance(part, str) for item in environment.items() for part in item):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise DecorationError(f"{cls.__name__}.__worker_env__ returns a dict of strings, not {environment!r:.200}")
    if "HOME" in environment:  # Ray 2.60: a worker whose environment sets HOME never starts
        raise DecorationError(f"{cls.__name__}.__worker_env__ cannot set HOME: Ray's workers do not start with it")
    return environment  # pyright: ignore[reportUnknownVariableType]


def _check_nodes(places: Places, slots: Sequence[WorkerSlot], what: str) -> None:
    """Raises WorkerDiedError if a node of the plan is gone: Ray would look for it until the start times out."""
    alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    gone: dict[str, list[int]] = {}
    for slot in slots:
        if (address := places.addresses[slot.node_index]) not in alive:
            gone.setdefault(address, []).append(slot.rank)
    if gone:
        shown = ", ".join(f"{address} (ranks {ranks})" for address, ranks in gone.items())
        raise WorkerDiedError(f"{what} cannot start: node {shown} is gone. Shut down and initialize again on the nodes that are left")


def _environments(places: Places, group_name: str, slots: Sequence[WorkerSlot], asked: dict[str, str]) -> list[dict[str, str]]:
    group = places.groups[group_name]
    group_on_node = Counter(slot.node_index for slot in places.plan.workers[group_name])
    on_node = Counter(slot.node_index for slot in slots)
    seen: Counter[int] = Counter()
    environments: list[dict[str, str]] = []
    for slot in slots:
        cores = int(places.plan.nodes[slot.node_index].num_cpus)
        environment = _devices_env(places.plan, group, slot) | {
            "RANK": str(slot.rank),
            "WORLD_SIZE": str(len(slots)),
            "LOCAL_RANK": str(seen[slot.node_index]),
            "LOCAL_WORLD_SIZE": str(on_node[slot.node_index]),
            "OMP_NUM_THREADS": str(places.threads_per_worker or max(1, cores // group_on_node[slot.node_index])),
        }
        if group.device_type == "cpu":
            # Groups share the cores, and a thread that spins at a barrier takes them from whom it waits for: on two cores with one
            # other busy process, a training step of two threads took four times as long.
            environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
        seen[slot.node_index] += 1
        environments.append(environment | asked)
    return environments


def _devices_env(plan: PlacementPlan, group: DeviceGroup, slot: WorkerSlot) -> dict[str, str]:
    """What makes the worker see the plan's devices. A bundle only counts them, and several components of a group share them, so actors
    reserve no device in Ray and Ray is told to leave the variable alone."""
    environment = plan.environment(group.name, slot.rank)
    variable = visible_devices_variable(group.device_type if slot.device_ids else "cuda")
    if not environment and variable is not None:  # a CPU group sees no accelerator
        environment = {variable: ""}
    return environment | {f"RAY_EXPERIMENTAL_NOSET_{variable}": "1"}


def _bundle(group: DeviceGroup, slot: WorkerSlot, share: float, addresses: Sequence[str]) -> dict[str, float]:
    bundle = {"CPU": slot.num_cpus, f"node:{addresses[slot.node_index]}": _NODE_PIN}
    if slot.device_ids:
        bundle["GPU" if group.device_type == "cuda" else group.device_type.upper()] = len(slot.device_ids) if share == 1 else share
    return bundle


def _spawn(place: Any, rank: int, environment: dict[str, str], identity: Identity) -> Any:
    from twinkle_remote._ray_worker import Worker  # which can itself start workers, with this module

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


def _await_processes(actors: Sequence[Any], what: str, timeout_s: float) -> list[Hello]:
    references = [actor.hello.remote() for actor in actors]
    deadline = time.monotonic() + timeout_s
    waiting = list(references)
    while waiting:
        arrived, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not arrived:
            ranks = [references.index(reference) for reference in waiting]
            raise StartTimeoutError(
                f"the worker processes of ranks {ranks} of {what} did not start within {timeout_s:g} s: "
                f"is the machine overloaded? Raise start_timeout_s"
            )
        try:
            ray.get(arrived)
        except ray.exceptions.RayError as error:
            rank = references.index(arrived[0])
            raise WorkerDiedError(f"the worker process of rank {rank} of {what} could not start: {error}") from error
    return ray.get(references)
