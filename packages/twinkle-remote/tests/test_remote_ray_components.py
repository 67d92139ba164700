"""What a component can be on Ray: built by other components, passed between them, with generators, properties and async methods."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
import gc
import os
import signal
import time
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("ray")

import twinkle_remote as tr
from twinkle_mesh import DeviceGroup

GROUPS = [DeviceGroup("pair", 2, "cpu"), DeviceGroup("one", 1, "cpu")]


@tr.remote_class()
class Counter:
    def __init__(self, start=0, device_mesh=None):
        self.rank = int(os.environ["RANK"])
        self.value = start
        self.steps = 0
        self.closed = 0
        self.ticks = 0

    @tr.remote_function(dispatch="all")
    def pid(self):
        return os.getpid()

    @tr.remote_function(dispatch="slice_dp", collect="flatten")
    def plus(self, values):
        return [self.value + value for value in values]

    @tr.remote_function(dispatch="all", collect="sum", lazy_collect=False)
    def fail(self):
        raise LookupError("deep down")

    @tr.remote_function(dispatch="all", collect="first")
    def state(self):
        return {"steps": self.steps, "closed": self.closed, "ticks": self.ticks}

    @tr.remote_function(dispatch="all", execute="first", prefetch=2)
    def ahead(self, n):
        for i in range(n):
            self.steps += 1
            yield i

    @tr.remote_function(dispatch="slice_dp", collect="flatten")
    def pieces(self, batch, size):
        try:
            for start in range(0, len(batch), size):
                self.steps += 1
                yield self.plus(batch[start : start + size])  # a plain call of its own method
        finally:
            self.closed += 1

    @tr.remote_function(dispatch="all", execute="first")
    def breaks(self):
        yield 1
        raise LookupError("in the middle")

    @property
    @tr.remote_function(dispatch="all", collect="first", lazy_collect=False)
    def total(self):
        return self.value

    @property
    @tr.remote_function(dispatch="all", lazy_collect=False)
    def missing(self):
        raise AttributeError("not there yet")

    @tr.remote_function(dispatch="all", collect="first")
    async def together(self, n):
        async def one(i):
            await asyncio.sleep(0.2)
            return i

        begin = time.monotonic()
        values = await asyncio.gather(*(one(i) for i in range(n)))
        return values, await self.twice(3), time.monotonic() - begin

    @tr.remote_function(dispatch="all", collect="first")
    async def twice(self, value):
        return 2 * value

    @tr.remote_function(dispatch="all")
    async def start_ticking(self):
        async def tick():
            while True:
                self.ticks += 1
                await asyncio.sleep(0.01)

        self.task = asyncio.get_running_loop().create_task(tick())


@tr.remote_class()
class Breaks:
    def __init__(self, why):
        raise TypeError(why)


class Doubled(Counter):
    @property
    def total(self):
        return 2 * self.value


@tr.remote_class()
class Boss:
    """Builds and uses other components."""

    def __init__(self):
        self.workers: Any = None

    @tr.remote_function(dispatch="all", collect="first")
    def hire(self, start):
        self.workers = Counter(start, remote_group="pair")
        return isinstance(self.workers, Counter), self.workers.plus([1, 2, 3]).get(), self.workers.pid().get()

    @tr.remote_function(dispatch="all", collect="first", lazy_collect=False)
    def lend(self):
        return {"workers": self.workers}

    @tr.remote_function(dispatch="all", collect="first")
    def use(self, counter, values):
        lazy = counter.plus(values)
        return list(counter.plus(lazy)), counter.total, [list(piece) for piece in counter.pieces(values, 1)]

    @tr.remote_function(dispatch="all", collect="first")
    def keep(self, counter):
        self.workers = counter

    @tr.remote_function(dispatch="all", collect="first")
    def use_kept(self):
        return self.workers.total

    @tr.remote_function(dispatch="all", collect="first")
    def run_into_failure(self, counter):
        return counter.fail()

    @tr.remote_function(dispatch="all", collect="first")
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def runtime():
    with tr.initialize("ray", groups=GROUPS, object_store_bytes=100 << 20, peer_grace_s=0.5) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def counter(runtime):
    return Counter(10, remote_group="pair")


@pytest.fixture(scope="module")
def boss(runtime):
    return Boss(remote_group="one")


def eventually(holds, within_s=20.0):
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_handle_works_in_the_worker_that_it_is_passed_to(counter, boss):
    assert boss.use(counter, [1, 2, 3, 4]).get() == ([21, 22, 23, 24], 10, [[11, 13], [12, 14]])
    assert list(counter.plus([1, 2])) == [11, 12]  # and goes on to work here
    with pytest.raises(LookupError, match="deep down") as caught:
        boss.run_into_failure(counter).get()
    assert "Counter.fail" in str(caught.value)
    assert "Boss.run_into_failure" in str(caught.value)


def test_a_component_built_by_a_worker_lives_on_its_group_and_ends_with_the_worker(runtime):
    boss = Boss(remote_group="one")
    is_counter, values, pids = boss.hire(100).get()
    assert is_counter
    assert values == [101, 102, 103]
    assert len(set(pids)) == 2
    lent = boss.lend()["workers"]
    assert isinstance(lent, Counter)
    assert list(lent.plus([1, 2])) == [101, 102]
    with pytest.raises(tr.WorkerDiedError):
        boss.die().get()
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    with pytest.raises((tr.WorkerDiedError, tr.ComponentLostError)):
        lent.plus([1, 2]).get()


def test_a_handle_in_a_worker_is_lost_when_its_component_restarts(runtime, boss):
    counter = Counter(1, remote_group="one", on_failure="restart")
    boss.keep(counter).get()
    assert boss.use_kept().get() == 1
    os.kill(counter.pid().get(), signal.SIGKILL)
    assert eventually(lambda: fails(counter))
    assert counter.total == 1
    with pytest.raises((tr.WorkerDiedError, tr.ComponentLostError)):
        boss.use_kept().get()
    boss.keep(counter).get()
    assert boss.use_kept().get() == 1


def fails(counter):
    try:
        counter.pid().get()
    except tr.WorkerDiedError:
        return True
    return False


def test_generators_iterate_across_processes_and_end(counter):
    pieces = counter.pieces([1, 2, 3, 4], 1)
    assert [list(piece) for piece in pieces] == [[11, 13], [12, 14]]
    assert list(pieces) == []
    uneven = counter.pieces([1, 2, 3], 1)
    assert list(next(uneven)) == [11, 13]
    with pytest.raises(tr.CollectError, match=r"ranks \[1\] .*have all ranks yield as often"):
        next(uneven)
    broken = counter.breaks()
    assert next(broken).get() == 1
    with pytest.raises(LookupError, match="in the middle"):
        next(broken)
    assert list(broken) == []


def test_prefetch_runs_ahead_by_so_many_steps_and_no_more(counter):
    before = counter.state().get()["steps"]
    steps = counter.ahead(10)
    assert counter.state().get()["steps"] == before  # a generator begins with the first step
    assert next(steps).get() == 0
    assert counter.state().get()["steps"] == before + 3
    assert [step.get() for step in steps] == list(range(1, 10))
    assert counter.state().get()["steps"] == before + 10


def test_a_generator_that_is_closed_or_dropped_is_closed_on_the_workers(counter):
    closed = counter.state().get()["closed"]
    pieces = counter.pieces([1, 2, 3, 4], 1)
    next(pieces)
    pieces.close()
    assert counter.state().get()["closed"] == closed + 1
    assert list(pieces) == []
    for piece in counter.pieces([1, 2, 3, 4], 1):
        list(piece)
        break
    gc.collect()
    assert eventually(lambda: counter.state().get()["closed"] == closed + 2)


def test_properties_are_read_from_the_workers(counter, runtime):
    assert counter.total == 10
    with pytest.raises(tr.RemoteAttributeError, match="cannot be set"):
        counter.total = 3
    with pytest.raises(AttributeError, match="not there yet"):
        counter.missing  # noqa: B018
    assert Doubled(4, remote_group="one").total == 8


def test_async_methods_run_on_a_loop_that_goes_on_between_calls(counter):
    values, twice, seconds = counter.together(20).get()
    assert values == list(range(20))
    assert twice == 6
    assert 0.2 <= seconds < 4.0  # one after another it would be 4 s
    counter.start_ticking().get()
    first = counter.state().get()["ticks"]
    assert eventually(lambda: counter.state().get()["ticks"] > first)


def test_stats_and_trace_tell_what_calls_took(runtime):
    counter = Counter(0, remote_group="pair")
    batch = [np.zeros(100_000) for _ in range(4)]
    counter.plus(counter.plus(batch)).get()
    with pytest.raises(LookupError):
        counter.fail()
    stats = list(runtime.stats().values())[-1]
    assert (stats.group, stats.workers, stats.restarts) == ("pair", 2, 0)
    plus = stats.methods["plus"]
    size_bytes = 4 * 800_000
    assert (plus.calls, plus.failures) == (2, 0)
    assert size_bytes <= plus.fetched_bytes < 1.05 * size_bytes
    assert 2 * size_bytes <= plus.stored_bytes < 2.05 * size_bytes
    assert size_bytes <= plus.collected_bytes < 1.05 * size_bytes
    assert plus.run_s > 0
    assert plus.collect_s > 0
    assert stats.methods["fail"].failures == 1


def test_arguments_that_do_not_fit_are_refused_before_a_worker_hears_of_them(runtime, counter):
    started = len(runtime.stats())
    with pytest.raises(tr.RemoteTypeError, match=r"Counter: .*'begin'; it takes \(start=0, device_mesh=None\)"):
        Counter(begin=1, remote_group="pair")
    assert len(runtime.stats()) == started
    calls = counter.plus([1, 2]).get() and sum(method.calls for one in runtime.stats().values() for method in one.methods.values())
    with pytest.raises(tr.RemoteTypeError, match=r"Counter.plus: missing a required argument: 'values'"):
        counter.plus()
    with pytest.raises(tr.RemoteTypeError, match="unexpected keyword argument 'value'"):
        counter.plus([1, 2], value=[1])
    assert calls == sum(method.calls for one in runtime.stats().values() for method in one.methods.values())


def test_a_component_that_was_not_built_is_not_drawn(runtime, counter):
    with pytest.raises(TypeError, match="at once") as caught:  # whose traceback holds what was half built
        Breaks("at once", remote_group="one")
    assert "Breaks" not in runtime.draw()
    assert "Counter" in runtime.draw()
    assert caught.value.__traceback__ is not None


def test_draw_shows_groups_nodes_and_components(runtime, counter):
    drawn = runtime.draw()
    for part in ("group pair: 2 cpu workers", "node 0", "Counter:", "the way of a batch"):
        assert part in drawn
    picture = ElementTree.fromstring(runtime.draw(format="svg"))
    shown = " ".join(picture.itertext())
    for part in ("group pair: 2 cpu workers", "node 0", "Counter"):
        assert part in shown
    with pytest.raises(ValueError, match="format"):
        runtime.draw(format="png")
