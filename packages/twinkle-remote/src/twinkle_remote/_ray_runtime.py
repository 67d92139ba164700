"""RayRuntime: components live on the workers of a Ray cluster, a placement group for each device group."""

import atexit
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from twinkle_mesh import DeviceGroup, DeviceMesh, PlacementPlan, plan_placement
from twinkle_remote import _ray_cluster
from twinkle_remote._control import tell_to_leave
from twinkle_remote._errors import PlacementTimeoutError
from twinkle_remote._local import find_group, named
from twinkle_remote._protocol import Execute
from twinkle_remote._ray_api import placement_group, ray, remove_placement_group
from twinkle_remote._ray_host import RayHost
from twinkle_remote._ray_messages import Limits
from twinkle_remote._ray_places import Places, bundles
from twinkle_remote._trace import Trace

logger = logging.getLogger("twinkle_remote")

# Threads that are in a call when their workers are ended hear of it within moments.
_LEAVE_TIMEOUT_S = 10.0
_TIDY_TIMEOUT_S = 2.0  # for workers to remove their temporary files


class RayRuntime(RayHost):
    """The driver's runtime: starts or joins a Ray and reserves the groups' places. Arguments: see `initialize`."""

    def __init__(
        self,
        groups: Iterable[DeviceGroup],
        *,
        cpus_per_rank: float,
        limits: Limits,
        threads_per_worker: int | None,
        object_store_bytes: int | None,
        address: str | None,
        trace: str | Path | None,
        compress_above_bytes: int | None,
        on_shutdown: Callable[["RayRuntime"], None],
    ) -> None:
        super().__init__(named(groups), limits, secrets.token_hex(16), None if trace is None else Trace(trace))
        self._threads_per_worker = threads_per_worker
        self._compress_above_bytes = compress_above_bytes
        self._on_shutdown = on_shutdown
        self._reserved: dict[str, Any] = {}
        if address is None:
            # Planned first: a machine that is too small is told so before anything is started.
            machine = _ray_cluster.this_machine()
            self.plan: PlacementPlan | None = plan_placement(self.groups.values(), [machine], cpus_per_rank=cpus_per_rank)
            self._cluster = _ray_cluster.Cluster.start(machine, object_store_bytes, limits.start_timeout_s)
        else:
            self._cluster = _ray_cluster.Cluster.connect(address, limits.start_timeout_s)
        atexit.register(self.shutdown)
        try:
            if address is not None:
                self.plan = plan_placement(self.groups.values(), self._cluster.nodes(), cpus_per_rank=cpus_per_rank)
            self._places = self._reserve()
            self._places_reference = ray.put(self._places)
        except BaseException:
            self.shutdown()
            raise

    def places(self) -> tuple[Places, Any]:
        return self._places, self._places_reference

    def is_remote(self, group_name: str | None) -> bool:
        if group_name is None:
            return False
        find_group(self.groups, group_name)
        return True

    def mesh_for(self, group_name: str | None, mesh: DeviceMesh | None, execute: Execute) -> DeviceMesh:
        if group_name is None:
            return DeviceMesh.from_sizes(dp_size=1) if mesh is None else mesh
        return self.placed_mesh(group_name, mesh, execute)

    def log_tail(self, pid: int) -> str:
        """The last lines that a worker process wrote to stderr, if they can be read here."""
        return self._cluster.log_tail(pid)

    def shutdown(self) -> None:
        if not self.is_open:
            return
        atexit.unregister(self.shutdown)
        try:
            for component in list(self._components.values()):
                for error in component.unreported_errors():
                    logger.error("a call failed and nobody collected its result:\n%s", error)
            if self.trace is not None:
                self.trace.write_at_end()
        finally:
            self.is_open = False
            with contextlib.ExitStack() as last:  # done whatever happens before, last first
                last.callback(self._on_shutdown, self)
                last.callback(self._cluster.close)
                last.callback(self.gate.wait_until_alone, _LEAVE_TIMEOUT_S)
                tell_to_leave([address for component in self._components.values() for address in component.living()], self.token, _TIDY_TIMEOUT_S)
                for component in (*self._components.values(), *self._borrowed.values()):
                    component.close()
                for place in self._reserved.values():
                    remove_placement_group(place)

    def __enter__(self) -> "RayRuntime":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _reserve(self) -> Places:
        """Reserve the groups' places as planned. Raises PlacementTimeoutError."""
        assert self.plan is not None
        # A plan for this machine alone was made before its Ray had an address.
        addresses = [node.address for node in (self._cluster.nodes() if self._cluster.folder is not None else self.plan.nodes)]
        deadline = time.monotonic() + self.limits.start_timeout_s
        for name, group in self.groups.items():
            self._reserved[name] = placement_group(bundles(self.plan, group, addresses), strategy="PACK")
        for name, place in self._reserved.items():
            if not place.wait(max(0.0, deadline - time.monotonic())):
                free = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU", "NPU")}
                raise PlacementTimeoutError(
                    f"the cluster did not give device group {name!r} its {self.groups[name].num_workers} places within "
                    f"{self.limits.start_timeout_s:g} s; it has free: {free}. Other jobs may hold the rest: wait for them, "
                    f"make the group smaller, or raise start_timeout_s"
                )
        used = {addresses[slot.node_index] for slots in self.plan.workers.values() for slot in slots}
        one_node = not used - {ray.util.get_node_ip_address()}
        return Places(
            groups=self.groups,
            plan=self.plan,
            addresses=tuple(addresses),
            reserved=dict(self._reserved),
            threads_per_worker=self._threads_per_worker,
            limits=self.limits,
            token=self.token,
            compress_above_bytes=None if one_node else self._compress_above_bytes,
        )
