"""The Ray that we talk to: one that is started here, with a session folder of its own, or one that runs already."""

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from twinkle_mesh import Node, visible_devices_variable
from twinkle_remote._errors import ClusterConnectionError, RuntimeStateError, StartTimeoutError
from twinkle_remote._ray_api import GcsClient, ray, services
from twinkle_remote._scratch import mark_owner, process_stat, remove_stale

logger = logging.getLogger("twinkle_remote")

DEFAULT_OBJECT_STORE_BYTES = 512 << 20
# Ray 2.60 makes sockets at <folder>/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store; Linux allows 107 bytes.
_MAX_FOLDER_BYTES = 107 - len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
_END_TIMEOUT_S = 10.0
_REMOVE_TIMEOUT_S = 5.0
_PREFIX = "tw-"
_CONNECT_TIMEOUT_S = 10.0
_KNOCK_S = 1.0


def this_machine() -> Node:
    """This machine as a node: its cores, and the GPUs that CUDA_VISIBLE_DEVICES allows (all, if it is not set)."""
    variable = visible_devices_variable("cuda")
    listed = os.environ.get(variable) if variable is not None else None
    ids = [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")] if listed is not None else None
    if ids is None:
        # The driver's own list; sandboxes without it still have the device files.
        found = list(Path("/proc/driver/nvidia/gpus").glob("*")) or list(Path("/dev").glob("nvidia[0-9]*"))
        ids = [str(index) for index in range(len(found))]
    return Node("this machine", num_gpus=len(ids), num_cpus=len(os.sched_getaffinity(0)), gpu_ids=ids)


class Cluster:
    """A connection to Ray. Use `start` or `connect`."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._open = True

    @classmethod
    def start(cls, machine: Node, object_store_bytes: int | None, start_timeout_s: float) -> "Cluster":
        """Start a local Ray for this process. Raises StartTimeoutError."""
        _check_not_connected()
        logging.getLogger("ray").setLevel(logging.ERROR)
        deadline = time.monotonic() + start_timeout_s
        while True:
            cluster = cls(_session_parent())
            try:
                ray.init(
                    address="local",
                    num_cpus=int(machine.num_cpus),
                    num_gpus=machine.num_gpus,
                    object_store_memory=DEFAULT_OBJECT_STORE_BYTES if object_store_bytes is None else object_store_bytes,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(cluster.folder),
                )
                return cluster
            except BaseException as error:
                cluster.close(end_timeout_s=0)
                # Ray 2.60 gives its raylet 30 s, fixed, and then raises a bare Exception; an overloaded machine may need longer.
                if type(error) is not Exception:
                    raise
                if time.monotonic() >= deadline:
                    raise StartTimeoutError(
                        f"the local Ray did not start within {start_timeout_s:g} s ({error}): is the machine overloaded? Raise start_timeout_s"
                    ) from error

    @classmethod
    def connect(cls, address: str, start_timeout_s: float) -> "Cluster":
        """Join a Ray that runs already. Raises ClusterConnectionError if there is none that answers within `start_timeout_s`."""
        _check_not_connected()
        if "://" not in address:
            _check_answers(address, start_timeout_s)
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError) as error:
            raise ClusterConnectionError(
                f"there is no Ray cluster at address={address!r}: start one with 'ray start --head'. Ray says: {error}"
            ) from error
        return cls(None)

    def nodes(self) -> list[Node]:
        """The cluster's living nodes. Raises ClusterConnectionError where two share an address: workers could not be placed on either."""
        nodes: list[Node] = []
        for node in ray.nodes():
            if node["Alive"]:
                resources: dict[str, float] = node["Resources"]
                kind = "npu" if "NPU" in resources else "cuda"
                devices = int(resources.get("NPU" if kind == "npu" else "GPU", 0))
                nodes.append(Node(node["NodeManagerAddress"], num_gpus=devices, num_cpus=resources.get("CPU", 0.0), device_type=kind))
        # The head first, then by address: one cluster gives one plan, whatever the order in which its nodes joined.
        heads = {node["NodeManagerAddress"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]}
        twice = sorted(address for address, count in Counter(node.address for node in nodes).items() if count > 1)
        if twice:
            raise ClusterConnectionError(
                f"several nodes of the cluster have the address {', '.join(twice)}: start each with a --node-ip-address of its own"
            )
        return sorted(nodes, key=lambda node: (node.address not in heads, _numbers_of(node.address)))

    def log_tail(self, pid: int, lines: int = 20) -> str:
        """The last lines that a worker of this machine wrote to stderr; '' if there are none."""
        if self.folder is None:
            return ""
        for path in self.folder.glob(f"session_2*/logs/worker-*-{pid}.err"):
            with contextlib.suppress(OSError):
                return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def close(self, end_timeout_s: float = _END_TIMEOUT_S) -> None:
        """Disconnect; end a Ray that was started here, with all its processes, and remove its folder.

        end_timeout_s: seconds after which processes that have not ended are killed.
        """
        if not self._open:
            return
        self._open = False
        owned = _ray_processes(self.folder) if self.folder is not None else set[tuple[int, str]]()
        ray.shutdown()
        if self.folder is not None:
            _end(owned, end_timeout_s)
            _remove(self.folder)


def _orphans(folder: Path) -> set[tuple[int, str]]:
    """Agents of a raylet that has died before us: children of nobody that we know, they have files of the session open and write new ones."""
    found: set[tuple[int, str]] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or b"ray" not in _command_line(int(entry.name)):
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            uses = any(os.readlink(link).startswith(f"{folder}/") for link in (entry / "fd").iterdir())
            if uses and int(entry.name) != os.getpid() and (stat := process_stat(int(entry.name))) is not None and _adopts(stat[0]):
                found.add((int(entry.name), stat[1]))
    return found


def _adopts(pid: int) -> bool:
    """Whether it is the process that orphans are handed to."""
    return pid == 1 or b"systemd" in _command_line(pid)


def _remove(folder: Path) -> None:
    """Remove a session folder, in which a process that was just started may still write its last lines."""
    _end(_orphans(folder), 0)
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < deadline:
        _end(_orphans(folder), 0)
        time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)


def _numbers_of(address: str) -> tuple[tuple[int, str], ...]:
    """To sort addresses by: 10.0.0.9 comes before 10.0.0.10."""
    return tuple((int(part), "") if part.isdecimal() else (0, part) for part in address.split("."))


def _check_not_connected() -> None:
    if ray.is_initialized():
        raise RuntimeStateError(
            "this process has called ray.init() itself: leave that to initialize('ray', address=...), or call ray.shutdown() first"
        )


def _check_answers(address: str, timeout_s: float) -> None:
    """Raises ClusterConnectionError if no Ray answers there. Ray 2.60 itself tries 20 times, each of which may take long, and hides the reason."""
    where = f"at address={address!r}"
    try:
        found = services.canonicalize_bootstrap_address_or_die(address)
        where += "" if found == address else f" ({found})"
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=min(timeout_s, _CONNECT_TIMEOUT_S)).close()
    except (OSError, ValueError) as error:
        raise ClusterConnectionError(f"there is no Ray cluster {where} ({error}): start one with 'ray start --head'") from error
    failures: list[Exception] = []
    answered = threading.Event()

    def knock() -> None:
        while not answered.is_set():
            try:
                GcsClient(address=found)
            except ray.exceptions.RayError as error:
                failures.append(error)
                if _is_refusal(error) or given_up.wait(_KNOCK_S):
                    return
            else:
                answered.set()

    given_up = threading.Event()
    thread = threading.Thread(target=knock, name="twinkle-knock", daemon=True)
    thread.start()
    thread.join(timeout_s)
    given_up.set()
    if answered.is_set():
        return
    if failures and _is_refusal(failures[-1]):
        raise ClusterConnectionError(
            f"the Ray cluster {where} asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's. "
            f"One that another script has started with initialize('ray') is that script's own; start one to share with 'ray start --head'"
        )
    reason = f"; it says: {failures[-1]}" if failures else ""
    raise ClusterConnectionError(
        f"what listens {where} did not answer as a Ray cluster does within {timeout_s:g} s{reason}. Is that the address that "
        f"'ray start --head' printed? On a slow machine, raise start_timeout_s"
    )


def _is_refusal(error: Exception) -> bool:
    return "AuthToken" in str(error)


def _session_parent() -> Path:
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) + len(f"/{_PREFIX}12345678") <= _MAX_FOLDER_BYTES:
            remove_stale(Path(parent), _PREFIX)
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # no ScratchFolder: before it goes, the processes that use it have to end
            mark_owner(folder)
            return folder
    raise RuntimeStateError(
        f"the folder for temporary files, {tempfile.gettempdir()}, has too long a name for Ray's sockets: set TMPDIR to a shorter one"
    )


def _ray_processes(folder: Path) -> set[tuple[int, str]]:
    """The processes of the Ray that was started with `folder`: our children that name it, and their descendants. With their start times."""
    children: dict[int, list[int]] = {}
    started: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (stat := process_stat(int(entry.name))) is not None:
            parent, start = stat
            children.setdefault(parent, []).append(int(entry.name))
            started[int(entry.name)] = start
    found = [pid for pid in children.get(os.getpid(), []) if os.fsencode(folder) in _command_line(pid)]
    for pid in found:  # grows while we walk
        found.extend(children.get(pid, []))
    return {(pid, started[pid]) for pid in found}


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _end(processes: set[tuple[int, str]], timeout_s: float) -> None:
    """Wait until the processes have ended; end those by force that do not."""
    deadline = time.monotonic() + timeout_s
    killed = False
    while left := {(pid, start) for pid, start in processes if (stat := process_stat(pid)) is not None and stat[1] == start}:
        if time.monotonic() > deadline:
            if killed:
                return
            for pid, _ in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed, deadline = True, time.monotonic() + _REMOVE_TIMEOUT_S
        time.sleep(0.02)
