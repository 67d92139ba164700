"""Starting and ending: whatever happens to a driver, no process and no session folder stays behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray

import twinkle_remote as tr
from twinkle_mesh import DeviceGroup, PlacementError
from twinkle_remote._ray_cluster import _remove
from twinkle_remote._scratch import process_stat, remove_stale

COMPONENT = """
import os, subprocess, sys, threading, time
import numpy as np
import twinkle_remote as tr
from twinkle_mesh import DeviceGroup

@tr.remote_class()
class Part:
    def __init__(self):
        self.folder = tr.ScratchFolder("twinkle-part-")

    @tr.remote_function(dispatch="all", collect="first")
    def work(self, seconds=0.0):
        time.sleep(seconds)
        return os.getpid()

    @tr.remote_function(dispatch="all", collect="first")
    def echo(self, x):
        return x

GROUPS = [DeviceGroup("g", 1, "cpu")]
"""
HANGS = (
    COMPONENT
    + """
tr.initialize("ray", groups=GROUPS, object_store_bytes=100 << 20)
part = Part(remote_group="g")
part.work().get()
print("ready", flush=True)
part.work(600).get()
"""
)
ENDS_IN_AN_ERROR = (
    COMPONENT
    + """
import ray
if len(sys.argv) > 1:  # a second driver on the cluster of the first
    cores = len(os.sched_getaffinity(0))
    try:  # the first driver holds a part of a core
        tr.initialize("ray", groups=[DeviceGroup("all", cores, "cpu")], address=sys.argv[1], cpus_per_rank=1.0, start_timeout_s=2)
    except tr.PlacementTimeoutError as error:
        assert f"device group 'all' its {cores} places within 2 s" in str(error), error
    else:
        raise AssertionError("the cluster gave a place that is taken")
    with tr.initialize("ray", groups=GROUPS, address=sys.argv[1]):
        print("second", Part(remote_group="g").work().get())
    sys.exit()
ends = []

def keep_calling():
    try:
        while True:
            first.echo(np.zeros(10_000))
            time.sleep(0.001)
    except tr.RemoteError as error:
        ends.append(error)

callers = [threading.Thread(target=keep_calling, daemon=True) for _ in range(3)]
with tr.initialize("ray", groups=GROUPS, object_store_bytes=100 << 20):
    first = Part(remote_group="g")
    late = first.work(30)
    again = subprocess.run([sys.executable, __file__, ray.get_runtime_context().gcs_address], capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("second"), again.stdout
    stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    again = subprocess.run(
        [sys.executable, __file__, ray.get_runtime_context().gcs_address], capture_output=True, text=True, timeout=100, env=stranger
    )
    assert "asks for a token: set RAY_AUTH_MODE=token" in again.stderr, again.stderr
    for caller in callers:
        caller.start()
    time.sleep(0.2)
for caller in callers:  # they were in Ray while it was shut down
    caller.join(10)
assert len(ends) == len(callers), ends
assert not ray.is_initialized()
for use in (first.work, late.get):
    try:
        use()
    except tr.RuntimeStateError as error:
        assert "shutdown()" in str(error), error
    else:
        raise AssertionError("a component outlived its runtime")
tr.initialize("ray", groups=GROUPS, object_store_bytes=100 << 20)
Part(remote_group="g").work().get()
print("ready", flush=True)
raise LookupError("the script ends without shutdown()")
"""
)


def session_members(session):
    """The processes of a session that still run, whatever their process group."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                members.append((int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]))
    return members


def left(session, end):
    """What should have ended by now. Two agents of Ray 2.60 look for a killed driver's cluster for a minute before they end, too long for a test."""
    agents = ("ray::DashboardAgent", "ray::RuntimeEnvAgent") if end == signal.SIGKILL else ()
    return [member for member in session_members(session) if not member[1].startswith(agents)]


@pytest.mark.timeout(300)  # the last script starts Ray twice
@pytest.mark.parametrize(
    ("script", "end", "expected"),
    [
        (HANGS, signal.SIGINT, "KeyboardInterrupt"),
        (HANGS, signal.SIGTERM, ""),
        (HANGS, signal.SIGKILL, ""),
        (ENDS_IN_AN_ERROR, None, "LookupError"),
    ],
    ids=["ctrl-c", "sigterm", "sigkill", "error"],
)
def test_nothing_stays_behind(script, end, expected):
    folder = Path(tempfile.mkdtemp(prefix="tr", dir="/tmp"))  # short: Ray's sockets lie in it
    path = folder / "script.py"
    path.write_text(script)
    (folder / "t").mkdir()
    driver = subprocess.Popen(
        [sys.executable, str(path)],
        env=os.environ | {"TMPDIR": str(folder / "t"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Of a shell's background job, pytest among them, Ctrl-C is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert driver.stdout is not None
        lines = []
        for line in driver.stdout:
            lines.append(line)
            if line.startswith("ready"):
                break
        assert driver.poll() is None or end is None, "".join(lines)
        if end is not None:
            assert len(session_members(driver.pid)) > 3  # the control: there is something to leave behind
            # Ctrl-C in a terminal reaches the whole process group, a supervisor's SIGTERM the driver.
            (os.killpg if end == signal.SIGINT else os.kill)(driver.pid, end)
        # Not communicate(): it reads past what the loop has already taken into its buffer. A hang ends with the test's own limit.
        output = "".join(lines) + driver.stdout.read()
        driver.wait(60)
        assert driver.returncode != 0, output
        assert expected in output, output
        assert "Started a local Ray" not in output
        deadline = time.monotonic() + (30 if end == signal.SIGKILL else 5)
        while left(driver.pid, end) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left(driver.pid, end) == [], output
        if end == signal.SIGKILL:  # nobody was left to remove the folder: the next driver does
            for pid, _ in session_members(driver.pid):
                os.kill(pid, signal.SIGKILL)
            for prefix in ("tw-", "twinkle-part-"):
                assert len(list((folder / "t").glob(f"{prefix}*"))) == 1
                remove_stale(folder / "t", prefix)
        assert list((folder / "t").glob("tw*")) == [], output
    finally:
        driver.kill()
        for pid, _ in session_members(driver.pid):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder)


def test_a_group_larger_than_the_machine_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("twinkle_remote._ray_cluster.Cluster.start", lambda *_: pytest.fail("Ray was started"))
    start = time.monotonic()
    with pytest.raises(PlacementError, match="huge"):
        tr.initialize("ray", groups=[DeviceGroup("huge", 100_000, "cpu")])
    with pytest.raises(PlacementError, match="cuda"):
        tr.initialize("ray", groups=[DeviceGroup("gpus", 1000, "cuda")])
    assert time.monotonic() - start < 10
    assert not ray.is_initialized()
    assert tr.current_runtime().mode == "local"


def test_a_folder_for_temporary_files_with_a_long_name_is_not_used(monkeypatch):
    from twinkle_remote._ray_cluster import _session_parent

    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 90)
    folder = _session_parent()
    shutil.rmtree(folder)
    assert folder.parent == Path("/tmp")


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense"])
def test_no_cluster_at_the_address_is_a_quick_error(address):
    start = time.monotonic()
    with pytest.raises(tr.ClusterConnectionError, match="ray start --head"):
        tr.initialize("ray", address=address)
    assert time.monotonic() - start < 15
    assert not ray.is_initialized()


def test_what_listens_but_does_not_answer_is_given_up_in_time():
    with socket.create_server(("0.0.0.0", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(tr.ClusterConnectionError, match="did not answer as a Ray cluster does within 2 s"):
            tr.initialize("ray", address=f"127.0.0.1:{silent.getsockname()[1]}", start_timeout_s=2)
        assert time.monotonic() - start < 10
    assert not ray.is_initialized()


def test_agents_of_a_dead_raylet_do_not_bring_a_session_folder_back(tmp_path):
    """They are nobody's children any more, call themselves ray::..., and write into the folder as long as they live."""
    folder = tmp_path / "tw-session"
    (folder / "logs").mkdir(parents=True)
    agent = f"""
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
with open({str(folder / "logs" / "agent.log")!r}, "w") as log:
    print(os.getpid(), file=log, flush=True)
    while True:
        os.makedirs({str(folder)!r}, exist_ok=True)
        open({str(folder)!r} + "/written", "a").close()
        time.sleep(0.02)
"""
    subprocess.run(["ray::Agent", "-c", agent], executable=sys.executable, check=True, timeout=30)
    deadline = time.monotonic() + 20
    while not (folder / "written").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int((folder / "logs" / "agent.log").read_text())
    bystander = subprocess.Popen(
        ["ray::Reader", "-c", "import sys, time; time.sleep(600)"], executable=sys.executable, stdin=(folder / "written").open()
    )
    try:
        _remove(folder)
        time.sleep(0.2)
        assert not folder.exists()
        assert process_stat(pid) is None
        assert bystander.poll() is None  # the control: one that is somebody's child is left alone
    finally:
        bystander.kill()
        bystander.wait()
