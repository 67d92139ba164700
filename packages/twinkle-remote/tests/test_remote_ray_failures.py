"""What becomes of components whose workers fail, hang, die or are late. One Ray serves the whole module."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
import ctypes
import json
import os
import resource
import signal
import socket
import threading
import time
from typing import Any

import pytest

pytest.importorskip("ray")

import twinkle_remote as tr
from twinkle_mesh import DeviceGroup
from twinkle_remote import _ray_settle

pytestmark = pytest.mark.timeout(300)  # several start workers anew, which a busy machine makes slow
GROUPS = [DeviceGroup("pair", 2, "cpu"), DeviceGroup("one", 1, "cpu")]


def only_to_rank_0(length, i, args, kwargs, device_mesh):
    return (args[0] if i == 0 else None,), {}


def stuck_here():
    time.sleep(600)


@tr.remote_class()
class Part:
    """Counts what it is told, and fails in many ways."""

    def __init__(self, start=0, remote_group=None, path=None):
        self.rank = int(os.environ["RANK"])
        self.value = start
        self.path = path
        self.restored = 0

    def restore(self):
        self.restored += 1
        if self.path is not None:
            self.value = int(self.path.read_text())

    @tr.remote_function(dispatch="all", lazy_collect=False)
    def pids(self):
        return os.getpid()

    @tr.remote_function(dispatch="all", collect="first")
    def add(self, amount=0):
        self.value += amount
        return self.value, self.restored

    @tr.remote_function(dispatch="all")
    def die(self, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    @tr.remote_function(dispatch="all")
    def fail_while_peers(self, what, seconds, helper: Any = None):
        if self.rank == 0:
            raise KeyError(what)
        if what == "sleep":
            time.sleep(seconds)
        elif what == "call":
            helper.sleep(seconds).get()
        else:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                pass

    @tr.remote_function(dispatch="all")
    def sleep(self, seconds):
        time.sleep(seconds)

    @tr.remote_function(dispatch="all")
    def fail(self):
        raise ZeroDivisionError("upstream")

    @tr.remote_function(dispatch=only_to_rank_0)
    def collective(self, values):
        time.sleep(600)  # stands for a collective in which the ranks wait for one another

    @tr.remote_function(dispatch="all", timeout_s=1.0)
    def late(self):
        if self.rank == 0:
            ctypes.PyDLL(None).sleep(600)  # holds the interpreter
        stuck_here()

    @tr.remote_function(dispatch="all", timeout_s=1.0)
    async def late_coroutine(self):
        await asyncio.sleep(600)

    @tr.remote_function(dispatch="all")
    def use_up_memory(self):
        limit_bytes = 1 << 34
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.RLIM_INFINITY))
        try:
            return len(bytearray(4 * limit_bytes))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture(scope="module")
def runtime():
    with tr.initialize("ray", groups=GROUPS, object_store_bytes=100 << 20, peer_grace_s=0.5) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def part(runtime):
    return Part(remote_group="pair")


@pytest.fixture(scope="module")
def helper(runtime):
    return Part(remote_group="one", on_failure="restart")


@pytest.fixture
def quick_looks(monkeypatch):
    monkeypatch.setattr(_ray_settle, "_LOOK_S", 0.3)


def ended(pid, within_s=20.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_component_restarts_with_its_constructor_and_restore_as_often_as_it_may(runtime, tmp_path):
    path = tmp_path / "checkpoint"
    path.write_text("40")
    part = Part(1, remote_group="pair", path=path, on_failure="restart", max_restarts=1)
    before = part.pids()
    assert part.add(1).get() == (2, 0)
    lost = part.die(1)
    queued = part.add(100)
    with pytest.raises(tr.WorkerDiedError, match="the next call restarts it"):
        lost.get()
    with pytest.raises(tr.ComponentLostError, match=r"Part.add.*was lost with the workers"):
        queued.get()
    assert part.add(2).get() == (42, 1)  # neither the state before nor the queued call: what restore() loads
    assert not {*before} & {*part.pids()}
    assert all(ended(pid) for pid in before)
    assert "restarted 1 time" in repr(part)
    assert [one.restarts for one in runtime.stats().values() if one.restarts] == [1]
    with pytest.raises(tr.WorkerDiedError, match="max_restarts=1: build it anew"):
        part.die(0).get()
    with pytest.raises(tr.ComponentLostError, match="max_restarts=1: build it anew"):
        part.add()


def test_a_restart_that_fails_says_so_and_threads_that_call_restart_once(runtime, tmp_path):
    path = tmp_path / "checkpoint"
    part = Part(remote_group="one", path=path, on_failure="restart")
    with pytest.raises(tr.WorkerDiedError):
        part.die(0).get()
    with pytest.raises(FileNotFoundError, match="checkpoint"):
        part.add()
    path.write_text("7")
    values = []
    threads = [threading.Thread(target=lambda: values.append(part.add().get())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert values == [(7, 1)] * 3
    assert "restarted 2 time" in repr(part)  # once for all three


def test_peers_that_finish_or_work_or_wait_for_a_call_keep_the_component(part, helper, quick_looks):
    pids = part.pids()
    for what, seconds in (("sleep", 1.0), ("work", 4.0), ("call", 4.0)):
        begin = time.monotonic()
        with pytest.raises(KeyError, match=r"ranks \[1\] were still in the call"):
            part.fail_while_peers(what, seconds, helper if what == "call" else None).get()
        assert time.monotonic() - begin < 20
        assert part.pids() == pids
        assert time.monotonic() - begin >= seconds * 0.9  # the call waited behind the peer, which was not ended
    assert part.add(0).get() == (0, 0)


def test_hung_peers_are_ended_and_the_next_call_has_new_workers(runtime, quick_looks):
    part = Part(5, remote_group="pair", on_failure="restart")
    pids = part.pids()
    with pytest.raises(KeyError, match="the next call restarts it"):
        part.fail_while_peers("sleep", 600).get()
    assert part.add().get() == (5, 1)
    assert all(ended(pid) for pid in pids)


def test_the_failure_of_an_argument_that_only_some_ranks_take_reaches_all(part, helper):
    pids = part.pids()
    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="upstream"):
        part.collective(helper.fail()).get()
    assert time.monotonic() - begin < 20
    assert part.pids() == pids


def test_a_call_past_its_deadline_shows_where_its_workers_are(helper):
    part = Part(remote_group="pair")
    pids = part.pids()
    with pytest.raises(tr.CallTimeoutError, match=r"within 1 s.*ranks \[0, 1\] of group 'pair' still run") as caught:
        part.late().get()
    _, native, python = str(caught.value).split("Stack of ranks ")
    assert native.startswith("[0] of Part:\n(does not answer")
    assert python.startswith("[1] of Part:\n  File")
    assert "in late\n" in python
    assert "in stuck_here\n" in python
    assert "ray/_private" not in python
    assert all(ended(pid) for pid in pids)
    with pytest.raises(tr.CallTimeoutError, match=r"Coroutine .*\n(.*\n)*.*in late_coroutine"):
        helper.late_coroutine().get()


def test_an_allocation_that_fails_is_a_memory_error_and_the_worker_lives(part):
    pids = part.pids()
    with pytest.raises(MemoryError) as caught:
        part.use_up_memory().get()
    assert isinstance(caught.value, tr.RemoteCallError)
    assert part.pids() == pids


def test_a_worker_answers_only_questions_with_the_token(part, runtime):
    from twinkle_remote._handle import component_of

    component = component_of(part)
    host, port = component._crew.addresses([0])[0]

    def ask(question):
        with socket.create_connection((host, port), timeout=5) as connection:
            connection.sendall(question + b"\n")
            return connection.recv(1 << 16)

    assert ask(json.dumps({"ask": "stacks", "token": "guess"}).encode()) == b""
    assert ask(b"[]") == b""
    assert ask(b"not json") == b""
    assert json.loads(ask(json.dumps({"ask": "look", "token": runtime.token}).encode()))["waiting"] is False
