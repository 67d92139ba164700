"""Local mode: the decorators, lazy results, and the checks that need no workers."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

import asyncio
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import twinkle_remote as tr
from twinkle_mesh import DeviceGroup, DeviceMesh
from twinkle_remote._decorators import remote_methods
from twinkle_remote._views import Held


@tr.remote_class()
class Adder:
    def __init__(self, start=0, device_mesh=None, **options):
        self.start = start
        self.device_mesh = device_mesh
        self.options = options
        self.doubled = self.double(start)

    @tr.remote_function(dispatch="slice_dp", collect="flatten")
    def add(self, values):
        return [value + self.start for value in values]

    @tr.remote_function(dispatch="all", lazy_collect=False)
    def double(self, value):
        return 2 * value

    @tr.remote_function(dispatch="all")
    def describe(self, thing):
        return type(thing).__name__, thing

    @tr.remote_function(dispatch="all", collect="mean")
    def mean(self, value):
        return value

    @tr.remote_function(dispatch="all")
    def add_twice(self, values):
        return self.add(self.add(values))

    @tr.remote_function(execute="first")
    def __len__(self):
        return 3

    @tr.remote_function(execute="first")
    def __iter__(self):
        yield from range(3)


@pytest.fixture(autouse=True)
def no_runtime():
    yield
    tr.shutdown()


def test_a_decorated_class_stays_a_class():
    assert isinstance(Adder, type)
    assert Adder.__name__ == "Adder"
    assert isinstance(Adder(), Adder)
    assert pickle.loads(pickle.dumps(Adder(4))).start == 4


def test_without_initialize_the_object_is_in_process_and_keeps_the_users_mesh():
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2)
    adder = Adder(1, device_mesh=mesh, remote_group="anything")
    assert adder.device_mesh is mesh
    assert adder.start == 1
    assert adder.add([1, 2]).get() == [2, 3]
    assert Adder(1, mesh).device_mesh is mesh


def test_execute_first_keeps_the_users_mesh_too():
    @tr.remote_class(execute="first")
    class Loader:
        def __init__(self, **kwargs):
            self.kwargs = kwargs

    mesh = DeviceMesh.from_sizes(dp_size=4)
    with tr.initialize("local", groups=[DeviceGroup("default", 1, "cpu")]):
        assert Loader(remote_group="default", device_mesh=mesh).kwargs == {"device_mesh": mesh.with_device_type("cpu")}


def test_remote_group_is_only_handed_to_a_class_that_names_it():
    @tr.remote_class()
    class Names:
        def __init__(self, remote_group=None):
            self.group = remote_group

    @tr.remote_class()
    class Empty:
        pass

    assert Names(remote_group="g").group == "g"
    assert Adder(remote_group="g", colour="red").options == {"colour": "red"}
    assert isinstance(Empty(remote_group="g"), Empty)


def test_remote_group_is_read_by_position_too():
    @tr.remote_class()
    class Sampler:
        def __init__(self, model_id, device_mesh=None, remote_group=None):
            self.given = model_id, device_mesh, remote_group

    mesh = DeviceMesh.from_sizes(device_type="cpu")
    with tr.initialize("local", groups=[DeviceGroup("g", 1, "cpu")]):
        assert Sampler("m", None, "g").given == ("m", mesh, "g")
        assert Sampler("m", mesh, "g", remote_group="g").given == ("m", mesh, "g")  # what a worker is given
        with pytest.raises(tr.GroupError, match="there are 'g'"):
            Sampler("m", None, "h")


def test_a_result_is_lazy_in_local_mode_and_behaves_like_its_value():
    result = Adder(1).add([1, 2, 3])
    assert isinstance(result, tr.LazyResult)
    assert len(result) == 3
    assert list(result) == [2, 3, 4]
    assert result[1] == 3
    assert result[1:].get() == [3, 4]
    assert 4 in result
    assert result.ready()
    assert result.get(timeout_s=1) == [2, 3, 4]
    assert tr.gather(result, Adder().mean(1.0)) == [[2, 3, 4], 1.0]


def test_a_result_can_be_awaited():
    async def main():
        return await Adder(1).add([1])

    assert asyncio.run(main()) == [2]


def test_an_attribute_of_a_result_says_to_collect_it():
    with pytest.raises(AttributeError, match=r"\.get\(\)"):
        Adder().describe(1).loss  # noqa: B018


def test_lazy_collect_false_and_sync_give_the_value():
    @tr.remote_class()
    class Sync:
        @tr.remote_function(sync=True)
        def value(self):
            return 7

    assert Adder().double(4) == 8
    assert Sync().value() == 7


def test_lazy_results_in_arguments_arrive_as_values_at_any_depth():
    @dataclasses.dataclass
    class Box:
        inside: object

    adder = Adder(1)
    lazy = adder.add([1])
    _, thing = adder.describe({"a": [lazy, (lazy, 3)], "b": Box(lazy)}).get()
    assert thing == {"a": [[2], ([2], 3)], "b": Box([2])}
    untouched = {"a": [1, 2]}
    assert adder.describe(untouched).get()[1] is untouched
    assert Adder(lazy).start == [2]


def test_a_method_that_calls_another_one_gets_its_plain_value():
    adder = Adder(1)
    assert adder.add_twice([1]).get() == [3]
    assert adder.doubled == 2


def test_len_and_iteration_give_python_values():
    assert len(Adder()) == 3
    assert list(Adder()) == [0, 1, 2]


@tr.remote_class(on_failure="restart")
class Stream:
    def __init__(self):
        self.closed = 0

    @tr.remote_function(collect="flatten")
    def double(self, values):
        return [2 * value for value in values]

    @tr.remote_function(prefetch=1)
    def doubles(self, n):
        try:
            for i in range(n):
                yield self.double([i])
        finally:
            self.closed += len(self.double([0]))

    @tr.remote_function()
    def __iter__(self):
        yield from self.doubles(2)

    @property
    @tr.remote_function(lazy_collect=False)
    def count(self):
        return self.closed

    @tr.remote_function()
    async def later(self, value):
        await asyncio.sleep(0.01)
        return await self.same(value), self.double([value])

    @tr.remote_function(lazy_collect=False)
    async def same(self, value):
        return value


def test_generators_run_as_the_components_own_code():
    stream = Stream()
    assert [value for value in stream.doubles(2)] == [[0], [2]]  # noqa: C416  # plain values of its own methods, not LazyResults
    assert list(stream) == [[0], [2]]
    assert stream.closed == 2
    for _ in stream.doubles(5):
        break
    assert stream.closed == 3
    doubles = stream.doubles(5)
    next(doubles)
    assert isinstance(stream.double([1]), tr.LazyResult)  # the control: between its steps, a caller's call is a remote one
    doubles.close()
    assert stream.count == 4


def test_async_methods_run_in_process_with_and_without_a_loop_of_the_caller():
    stream = Stream(on_failure="raise", max_restarts=0)

    async def main():
        return await stream.later(3), stream.same(4)

    assert stream.later(2).get() == (2, [4])
    assert asyncio.run(main()) == ((3, [6]), 4)


def test_an_async_method_that_would_wait_for_its_own_loop_is_told():
    other = Stream()

    @tr.remote_class()
    class Caller:
        @tr.remote_function()
        async def blocks(self):
            return other.same(1)

        @tr.remote_function()
        async def in_a_thread(self):
            return await asyncio.to_thread(other.same, 1)

    with pytest.raises(tr.RuntimeStateError, match="same was called from another component's async method"):
        Caller().blocks()
    assert Caller().in_a_thread().get() == 1


def test_wrong_failure_policies_are_refused():
    with pytest.raises(tr.RemoteTypeError, match="'raise' and 'restart'"):
        tr.remote_class(on_failure="again")
    with pytest.raises(tr.RemoteTypeError, match="max_restarts=-1"):
        tr.remote_class(max_restarts=-1)
    with pytest.raises(tr.DecorationError, match="prefetch=1 is for methods that yield"):
        tr.remote_function(prefetch=1)(lambda self: None)
    with pytest.raises(tr.DecorationError, match="async generator"):

        @tr.remote_function()
        async def stream(self):
            yield 1


class SlowSource:
    """A value that takes a while, and remembers how long it was given."""

    def __init__(self, wait_s):
        self.wait_s = wait_s
        self.limits = []

    def ready(self):
        return False

    def open(self, timeout_s):
        self.limits.append(timeout_s)
        time.sleep(self.wait_s)
        return Held(1)

    def calls(self):
        return [self]

    def wait_all(self, sources, timeout_s):
        time.sleep(self.wait_s)


def test_get_does_not_wait_longer_for_another_thread_than_it_was_told():
    lazy = tr.LazyResult(SlowSource(3.0))
    other = threading.Thread(target=lazy.get)
    other.start()
    while not lazy.source.limits:
        time.sleep(0.01)
    begin = time.monotonic()
    with pytest.raises(tr.CallTimeoutError, match="another thread"):
        lazy.get(timeout_s=0.1)
    assert time.monotonic() - begin < 2.5
    other.join()
    assert lazy.get(timeout_s=0.1) == 1


def test_gather_fetches_within_what_is_left_of_its_time():
    source = SlowSource(0.2)
    assert tr.gather(tr.LazyResult(source), timeout_s=10.0) == [1]
    assert 0 < source.limits[0] <= 9.9


def test_stats_count_what_ran_in_process():
    with tr.initialize("local", groups=[DeviceGroup("g", 1, "cpu")]) as runtime:
        adder = Adder(1, remote_group="g")
        adder.add([1])
        with pytest.raises(TypeError):
            adder.add(None)
        stats = runtime.stats()["Adder"]
        assert (stats.group, stats.workers) == (None, 1)
        assert (stats.methods["add"].calls, stats.methods["add"].failures) == (2, 1)
        assert "group g: 1 cpu worker" in runtime.draw()


def test_an_override_from_a_plain_class_is_remote_and_one_that_is_no_method_is_not():
    class Mixin:
        def add(self, values):
            return ["mixin", *super().add(values)]

    class Mixed(Mixin, Adder):
        pass

    without = type("Without", (Adder,), {"add": None, "describe": staticmethod(len)})
    added = Mixed(1).add([1])
    assert isinstance(added, tr.LazyResult)
    assert added.get() == ["mixin", 2]
    assert "add" in remote_methods(Mixed)
    assert not {"add", "describe"} & remote_methods(without).keys()
    with pytest.raises(tr.DecorationError, match="staticmethod has no object"):

        @tr.remote_class()
        class Static:
            @staticmethod
            @tr.remote_function()
            def method(x):
                """There is nothing that could be remote."""


def test_a_subclass_is_a_remote_class_and_its_overrides_are_remote():
    class Child(Adder):
        def __init__(self, factor):
            super().__init__(start=1)
            self.factor = factor

        def add(self, values):
            return [value * self.factor for value in super().add(values)]

    child = Child(10, remote_group="g")
    assert isinstance(child.add([1]), tr.LazyResult)
    assert child.add([1]).get() == [20]


def test_wrong_decorations_are_refused():
    with pytest.raises(tr.DecorationError, match="known are 'slice', 'all', 'slice_dp' or a function"):
        tr.remote_function(dispatch="scatter")
    with pytest.raises(tr.DecorationError, match="'last_pp' or a function"):
        tr.remote_function(collect="max")
    with pytest.raises(tr.DecorationError, match="'all', 'first'"):
        tr.remote_class(execute="second")
    with pytest.raises(tr.DecorationError, match="decorates classes"):
        tr.remote_class()(len)
    with pytest.raises(tr.DecorationError, match="decorates methods"):
        tr.remote_function()(property(len))
    with pytest.raises(tr.DecorationError, match="__slots__"):

        @tr.remote_class()
        class Slotted:
            __slots__ = ("a",)


def test_a_device_mesh_of_another_type_is_refused():
    with pytest.raises(tr.RemoteTypeError, match="device_mesh"):
        Adder(device_mesh=4)
    with pytest.raises(tr.RemoteTypeError, match="remote_group"):
        Adder(remote_group=4)


def test_initialize_checks_groups_and_state():
    with pytest.raises(tr.RemoteTypeError, match="'local' and 'ray'"):
        tr.initialize("cluster")  # type: ignore[arg-type]
    with pytest.raises(tr.GroupError, match="2 workers, but this is one process"):
        tr.initialize("local", groups=[DeviceGroup("g", 2, "cpu")])
    with pytest.raises(tr.GroupError, match="two device groups"):
        tr.initialize("local", groups=[DeviceGroup("g", 1, "cpu")] * 2)
    with tr.initialize("local", groups=[DeviceGroup("g", 1, "cpu")]) as runtime:
        assert tr.current_runtime() is runtime
        assert runtime.mode == "local"
        assert runtime.slices_in_loader
        assert isinstance(runtime, tr.Runtime)
        with pytest.raises(tr.RuntimeStateError, match="already initialised"):
            tr.initialize("local")
        with pytest.raises(tr.GroupError, match="there are 'g'"):
            Adder(remote_group="h")
        with pytest.raises(tr.GroupError, match="has 2 ranks, but device group 'g' has 1 workers"):
            Adder(remote_group="g", device_mesh=DeviceMesh.from_sizes(dp_size=2))
    assert tr.current_runtime() is not runtime


def test_mode_ray_without_ray_names_the_install_line():
    code = """
import sys
sys.modules["ray"] = None  # an import of it now fails as if it were not installed
import twinkle_remote
try:
    twinkle_remote.initialize("ray")
except twinkle_remote.MissingRayError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'twinkle-remote[ray]'" in done.stdout


def test_held_port_is_bound_while_it_is_handed_over():
    import os
    import socket

    port = tr.held_port()
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((port.host, port.port))
        with socket.create_connection((port.host, port.port), timeout=5):
            pass
    finally:
        os.close(port.listen_fd)
    assert tr.rendezvous() is None
    assert not tr.in_worker()


def test_the_trace_is_chrome_json(tmp_path):
    path = tmp_path / "run.json"
    with tr.initialize("local", trace=path):
        Adder(1).add([1, 2])
    document = json.loads(path.read_text())
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["add"]
    assert all(isinstance(span["ts"], int) and span["dur"] > 0 for span in spans)
    with pytest.raises(OSError, match="no-such-folder"):
        tr.initialize("local", trace=tmp_path / "no-such-folder" / "run.json")


def test_a_trace_that_cannot_be_written_at_the_end_is_logged_and_hides_no_error(tmp_path, caplog):
    folder = tmp_path / "traces"
    folder.mkdir()
    runtime = tr.initialize("local", trace=folder / "run.json")

    def script():
        with runtime:
            (folder / "run.json").unlink()
            folder.rmdir()
            raise KeyError("of the script")

    with pytest.raises(KeyError, match="of the script"):
        script()
    assert "could not be written" in caplog.text
    assert tr.current_runtime() is not runtime


def test_importing_the_package_imports_neither_ray_nor_torch():
    code = "import sys, twinkle_remote; print(sorted({'ray', 'torch', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_all_is_sorted_and_every_name_has_a_docstring():
    assert tr.__all__ == sorted(tr.__all__)
    assert all(getattr(tr, name).__doc__ for name in tr.__all__)


@pytest.mark.parametrize("name", [name for name in tr.__all__ if name.endswith("Error")])
def test_errors_take_a_message_and_pickle(name):
    error = getattr(tr, name)("what happened")
    assert isinstance(error, tr.RemoteError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "what happened"


def test_numpy_arrays_pass_through_untouched():
    array = np.arange(3)
    assert Adder().describe(array).get()[1] is array


def test_a_group_that_nobody_named_is_told(caplog):
    @tr.remote_class()
    class Lonely:
        @tr.remote_function(dispatch="all", collect="first", lazy_collect=False)
        def here(self):
            return os.getpid()

    assert Lonely().here() == os.getpid()
    assert "remote_group" not in caplog.text
    assert Lonely(remote_group="actor").here() == os.getpid()  # pyright: ignore[reportCallIssue]
    assert "remote_group='actor': initialize() was not called with groups" in caplog.text
