"""`initialize`: decide where components live."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from twinkle_mesh import DeviceGroup, launcher_world_size
from twinkle_remote import _ray_environment, _state
from twinkle_remote._compression import check_codec
from twinkle_remote._errors import GroupError, MissingRayError, RemoteTypeError
from twinkle_remote._local import LocalRuntime
from twinkle_remote._protocol import Runtime
from twinkle_remote._seconds import check_seconds


def initialize(
    mode: Literal["local", "ray"] = "local",
    groups: Iterable[DeviceGroup] | None = None,
    *,
    cpus_per_rank: float = 0.01,
    start_timeout_s: float = 120,
    call_timeout_s: float = 1800,
    peer_grace_s: float = 10,
    threads_per_worker: int | None = None,
    object_store_bytes: int | None = None,
    address: str | None = None,
    trace: str | Path | None = None,
    compress: Literal["zstd"] | None = None,
    compress_above_bytes: int = 1 << 20,
) -> Runtime:
    """Decide where components live, once, at the beginning of a driver script. Also a context manager, which shuts down at its end.

    mode: 'local': in this process (under torchrun: in each of its processes), or 'ray': on workers of a Ray cluster.
    groups: the device groups that `remote_group=` names.
    cpus_per_rank: cores that a worker process reserves in Ray (a reservation, not a limit). start_timeout_s: seconds for the groups' places and for a
    component's processes to start. call_timeout_s: seconds that a remote call may take, unless its method says.
    peer_grace_s: seconds that workers have to finish a call that has failed on another; those that hang then are ended, those at work go on.
    threads_per_worker: OMP_NUM_THREADS of the workers (default: cores of the node / workers of the group there).
    object_store_bytes: size of the object store of a Ray that is started here (default 512 MiB).
    address: of a running Ray cluster ('auto' finds a local one); without it a local Ray is started, and ended by `shutdown`.
    trace: a file for the timeline of all calls, for Perfetto.
    compress: 'zstd' compresses arguments and results of more than `compress_above_bytes` on a cluster of several nodes; needs
    `twinkle-remote[compress]` on all of them. None: not at all. Within one node nothing is compressed: arrays are handed over without copying.

    Raises RemoteTypeError for arguments of other types or out of range, GroupError for groups that do not fit the mode; in mode
    'ray' MissingRayError, `twinkle_mesh.PlacementError` (the cluster is too
    small; before anything is started), ClusterConnectionError, StartTimeoutError and PlacementTimeoutError.
    """
    _state.check_not_initialized()
    for name, seconds in (("start_timeout_s", start_timeout_s), ("call_timeout_s", call_timeout_s), ("peer_grace_s", peer_grace_s)):
        check_seconds(name, seconds, zero=name == "peer_grace_s")
    check_codec(compress, compress_above_bytes)
    if mode == "local":
        runtime: Runtime = LocalRuntime(groups or (), trace=trace, on_shutdown=_state.forget_runtime)
    elif mode == "ray":
        if launcher_world_size() > 1:
            raise GroupError("initialize('ray') runs in one driver process, but torchrun started several: start the script with plain python")
        _ray_environment.prepare(starts_cluster=address is None)
        try:
            from twinkle_remote._ray_messages import Limits
            from twinkle_remote._ray_runtime import RayRuntime
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise MissingRayError("mode 'ray' needs Ray, which is not installed: pip install 'twinkle-remote[ray]'") from error
        runtime = RayRuntime(
            groups or (),
            cpus_per_rank=cpus_per_rank,
            limits=Limits(start_timeout_s=start_timeout_s, call_timeout_s=call_timeout_s, peer_grace_s=peer_grace_s),
            threads_per_worker=threads_per_worker,
            object_store_bytes=object_store_bytes,
            address=address,
            trace=trace,
            compress_above_bytes=None if compress is None else compress_above_bytes,
            on_shutdown=_state.forget_runtime,
        )
    else:
        raise RemoteTypeError(f"mode={mode!r} is not known; known are 'local' and 'ray'")
    _state.install_runtime(runtime)
    return runtime
