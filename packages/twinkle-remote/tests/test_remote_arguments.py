"""Arguments are checked where they are written: before anything is built or sent."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import inspect
import itertools
import os
import subprocess
import sys
import time

import pytest

import twinkle_remote as tr
from twinkle_mesh import DeviceGroup, DeviceMesh
from twinkle_remote import _control
from twinkle_remote._arguments import argument_check
from twinkle_remote._local import LocalRuntime


def _plain(self): ...
def _some(self, a, b=1): ...
def _only_positions(self, a, /, b, c=2): ...
def _only_names(self, a, *, b, c=3): ...
def _rest(self, a, *b, c): ...
def _names_too(self, a, /, **b): ...
def _anything(self, *a, **b): ...
def _same_name(self, a, /, b=0, **c): ...


FUNCTIONS = [_plain, _some, _only_positions, _only_names, _rest, _names_too, _anything, _same_name]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_check_finds_what_python_would_refuse(function):
    check = argument_check(function, function.__name__)
    fine = 0
    for count in range(5):
        for names in itertools.chain.from_iterable(itertools.combinations("abcd", size) for size in range(4)):
            args, kwargs = tuple(range(count)), dict.fromkeys(names, 0)
            try:
                function(None, *args, **kwargs)
            except TypeError:
                with pytest.raises(tr.RemoteTypeError, match=rf"{function.__name__}: .*; it takes \("):
                    check(args, kwargs)
            else:
                check(args, kwargs)
                fine += 1
    assert fine > 0


@tr.remote_class()
class Model:
    def __init__(self, path, layers=2, device_mesh=None, remote_group=None):
        self.path = path

    def __call__(self, inputs):
        return inputs


class Larger(Model):
    def __init__(self, width):
        super().__init__("here")


@tr.remote_class()
class Bare:
    pass


def test_the_signature_of_a_remote_class_is_that_of_its_constructor():
    assert str(inspect.signature(Model)) == "(path, layers=2, device_mesh=None, remote_group=None)"
    assert str(inspect.signature(Larger)) == "(width)"
    assert str(inspect.signature(Bare)) == "()"
    assert str(inspect.signature(Model("x"))) == "(inputs)"


@pytest.mark.parametrize("value", [-1, 0, "3", float("nan"), float("inf"), True, None])
def test_seconds_are_numbers_above_0(value):
    for name in ("start_timeout_s", "call_timeout_s"):
        with pytest.raises(tr.RemoteTypeError, match=f"{name}=.*above 0"):
            tr.initialize("local", **{name: value})
    if value != 0:
        with pytest.raises(tr.RemoteTypeError, match=r"peer_grace_s=.*at least 0"):
            tr.initialize("local", peer_grace_s=value)
    if value is not None:
        with pytest.raises(tr.RemoteTypeError, match=r"timeout_s=.*above 0"):
            tr.remote_function(timeout_s=value)


@pytest.mark.parametrize("value", [-1, "3", float("nan")])
def test_a_time_to_wait_for_a_result_is_a_number(value):
    @tr.remote_class()
    class One:
        @tr.remote_function()
        def one(self):
            return 1

    result = One().one()
    with pytest.raises(tr.RemoteTypeError, match=r"timeout_s=.*at least 0"):
        result.get(timeout_s=value)
    with pytest.raises(tr.RemoteTypeError, match=r"timeout_s=.*at least 0"):
        tr.gather(result, timeout_s=value)
    assert tr.gather(result, timeout_s=0) == [1]


@pytest.mark.parametrize("groups", [DeviceGroup("g", 1, "cpu"), ["g"], [("g", 1)]])
def test_groups_are_a_list_of_device_groups(groups):
    with pytest.raises(tr.RemoteTypeError, match="groups is a list of DeviceGroup"):
        tr.initialize("local", groups=groups)


def test_a_mesh_that_asks_for_other_devices_than_its_group_has_is_refused():
    runtime = LocalRuntime([DeviceGroup("g", 1, "cpu")])
    for mesh in (None, DeviceMesh.from_sizes(dp_size=1), DeviceMesh.from_sizes(dp_size=1, device_type="cpu")):
        assert runtime.mesh_for("g", mesh, "all").device_type in ("cpu", "cuda" if mesh is None else "cpu")
    with pytest.raises(tr.GroupError, match="device_type='npu', but device group 'g' has 'cpu' devices"):
        runtime.mesh_for("g", DeviceMesh.from_sizes(dp_size=1, device_type="npu"), "all")


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="Linux does not say here how long a thread was held up")
def test_a_rank_that_wants_a_processor_and_gets_none_is_not_idle():
    """Nine processes on one core: little processor time, but hardly a moment of rest. Asleep, neither."""
    os.sched_setaffinity(0, {min(affinity := os.sched_getaffinity(0))})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        time.sleep(0.5)

        def share(work, seconds):
            begin, used, held_up = time.monotonic(), time.process_time(), _control._held_up_s()
            while time.monotonic() - begin < seconds:
                work()
            took = time.monotonic() - begin
            used = time.process_time() - used
            return used / took, (used + _control._held_up_s() - held_up) / took

        alone, together = share(lambda: None, 1.5)
        assert alone < 0.5  # the control: by processor time it would soon look idle
        assert together > 0.8
        _, asleep = share(lambda: time.sleep(0.75), 1.5)
        assert asleep < 0.4
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, affinity)
