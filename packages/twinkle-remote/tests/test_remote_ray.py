"""Components on real Ray workers. One Ray serves the whole module."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false, reportGeneralTypeIssues=false

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import pickle
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("ray")

import twinkle_remote as tr
from twinkle_mesh import DeviceGroup, DeviceMesh
from twinkle_remote import _ray_sending, _shards
from twinkle_remote._protocol import MethodSpec
from twinkle_remote._ray_calls import CallSource, PendingCall, own_limit_s

GROUPS = [DeviceGroup("pair", 2, "cpu"), DeviceGroup("quad", 4, "cpu"), DeviceGroup("one", 1, "cpu")]
DP2_TP2 = DeviceMesh.from_sizes(dp_size=2, tp_size=2)


class Odd(Exception):
    """Cannot be made from its args, as many exceptions in the wild."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}")
        self.detail = detail


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("no way")
        self.handle = threading.Lock()


@dataclasses.dataclass
class Box:
    inside: object


class Counting:
    """A function with a state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, item):
        self.calls += 1
        return item, self.calls


def to_rank_of_two(length, i, args, kwargs, device_mesh):
    return (args[0] if i == 1 else "nothing",), {"seen": (length, i, device_mesh.world_size)}


def longest(all_results, device_mesh):
    return max(all_results, key=len), device_mesh.world_size


@tr.remote_class()
class Part:
    """What the tests need of a component: echoes, counters and faults."""

    def __init__(self, device_mesh=None, remote_group=None, fault=None, **options):
        if fault is not None:
            raise ValueError(fault)
        self.mesh = device_mesh
        self.options = options
        self.remote_group = remote_group
        self.rank = int(os.environ["RANK"])
        self.fetched_bytes = 0

    @classmethod
    def __worker_env__(cls, device_type):
        return {"TWINKLE_TEST_DEVICE": device_type}

    @tr.remote_function(dispatch="all")
    def identity(self):
        return {
            "pid": os.getpid(),
            "rank": self.rank,
            "env": {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "TWINKLE_TEST_DEVICE")},
            "master": (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]),
            "rendezvous": tr.rendezvous(),
            "worker": tr.in_worker(),
            "slices": tr.current_runtime().slices_in_loader,
            "mesh": self.mesh,
            "group": self.remote_group,
            "options": self.options,
        }

    @tr.remote_function(dispatch="slice_dp", collect="flatten")
    def echo(self, x):
        return x

    @tr.remote_function(dispatch="slice_dp")
    def share(self, x):
        return x

    @tr.remote_function(dispatch="slice_dp")
    def lengths(self, x):
        return len(x)

    @tr.remote_function(dispatch="slice")
    def even(self, x, allow=None):
        return x

    @tr.remote_function(dispatch="slice_dp", collect="flatten")
    def repeat(self, x, times):
        return [item for item in x for _ in range(times)]

    @tr.remote_function(dispatch="all", execute="first")
    def make(self, n, size):
        return [np.full(size, i, dtype=np.uint8) for i in range(n)]

    @tr.remote_function(dispatch="all")
    def see(self, thing):
        return thing

    @tr.remote_function(dispatch="slice_dp", collect="mean", lazy_collect=False)
    def metrics(self, x):
        return {"n": float(len(x)), f"of rank {self.rank}": 1.0}

    @tr.remote_function(dispatch="all", collect="first")
    def first(self):
        return self.rank

    @tr.remote_function(dispatch=to_rank_of_two, collect=longest)
    def custom(self, x, seen=None):
        return f"{x} {seen}"

    @tr.remote_function(dispatch="slice_dp", collect="flatten")
    def zipped(self, x, y):
        assert len(x["rows"]) == len(x["number"]) == len(y)
        return [(int(row[0]), int(number), int(other[0])) for row, number, other in zip(x["rows"], x["number"], y, strict=True)]

    @tr.remote_function(dispatch="slice_dp", collect="flatten")
    def write_into(self, x, copy=False):
        for array in (arrays := [np.array(array) for array in x] if copy else x):
            array += 1
        return arrays

    @tr.remote_function(dispatch="slice", collect="flatten")
    def evenly(self, x):
        return x

    @tr.remote_function(dispatch="slice", collect="sum", lazy_collect=False)
    def total(self, x):
        return sum(x)

    @tr.remote_function(dispatch="slice", collect="flatten")
    def one_by_one(self, x):
        for item in x:
            yield [item]

    @tr.remote_function(dispatch="all", collect="first", prefetch=2)
    def steps(self, bad):
        for step in range(4):
            if step == bad:
                raise ValueError(f"step {step}")
            yield step

    @tr.remote_function(dispatch="all", collect="first")
    def bump(self, items):
        items[-1]["n"] += 1
        return items

    @tr.remote_function(execute="first")
    def __len__(self):
        return 3

    @tr.remote_function(execute="first")
    def __iter__(self):
        for i in range(3):
            yield [i] * 4

    @tr.remote_function(dispatch="all")
    def fail(self, rank, error, hang=False):
        if self.rank == rank:
            if error == "odd":
                raise Odd(3, detail={"a": 1})
            if error == "unpicklable":
                raise Unpicklable
            if error == "file":
                raise FileNotFoundError(2, "no such file", "/nowhere")
            if error == "cancelled":
                raise asyncio.CancelledError
            if error == "exit":
                raise SystemExit(3)
            if error == "kill":
                print("last words", file=__import__("sys").stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError(error)
        if hang:
            time.sleep(600)
        return self.rank

    @tr.remote_function(dispatch="all", timeout_s=1.0)
    def slow(self, rank):
        if self.rank == rank:
            time.sleep(600)

    @tr.remote_function(dispatch="all")
    def sleep(self, seconds):
        time.sleep(seconds)

    @tr.remote_function(dispatch="all")
    def give_a_generator(self):
        return (i for i in range(3))

    @tr.remote_function(dispatch="all")
    def count_traffic(self):
        """From now on, count the bytes that this worker fetches from others."""
        original = _shards._values

        def counting(pieces, timeout_s):
            import ray

            self.fetched_bytes += sum(ray.get(piece).size_bytes for piece in pieces if not isinstance(piece, _shards.Inline))
            return original(pieces, timeout_s)

        _shards._values = counting

    @tr.remote_function(dispatch="all")
    def traffic(self):
        return self.fetched_bytes

    @tr.remote_function(dispatch="all")
    def build_within(self):
        inner = Part(remote_group="pair")
        return type(inner) is Part, inner.echo([1]).get()

    @tr.remote_function(dispatch="all")
    def pin_up(self, address):
        """Answer on a board what is asked there, ten times as much."""
        board = tr.ObjectBoard.join(address, timeout_s=20)
        _, number, _ = board.wait([f"question {self.rank}"], timeout_s=20)
        board.put(f"answer {self.rank}", 10 * number, np.full(1 << 20, number, np.uint8), timeout_s=20)
        board.close()

    def undecorated(self):
        """Not remote."""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.json"
    with tr.initialize("ray", groups=GROUPS, trace=path, object_store_bytes=128 << 20, peer_grace_s=0.5) as runtime:
        runtime.trace_path = path
        yield runtime


@pytest.fixture(scope="module")
def pair(runtime):
    return Part(remote_group="pair", colour="red")


@pytest.fixture(scope="module")
def quad(runtime):
    return Part(remote_group="quad", device_mesh=DP2_TP2)


def pids(part):
    return [one["pid"] for one in as_list(part.identity().get())]


def as_list(value):
    return value if isinstance(value, list) else [value]


def ends(pid, within_s=10.0):
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


def test_every_rank_is_a_process_with_a_launchers_environment(pair, quad):
    seen = pair.identity().get()
    assert [one["rank"] for one in seen] == [0, 1]
    assert len({one["pid"] for one in seen} | {os.getpid()}) == 3
    assert seen[1]["env"] | {"OMP_NUM_THREADS": ""} == {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "",
        "TWINKLE_TEST_DEVICE": "cpu",
    }
    assert int(seen[0]["env"]["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert all(one["worker"] and not one["slices"] for one in seen)
    assert seen[0]["mesh"] == DeviceMesh.from_sizes(dp_size=2, device_type="cpu")
    assert (seen[0]["group"], seen[0]["options"]) == ("pair", {"colour": "red"})
    assert quad.identity().get()[3]["mesh"] == DP2_TP2.with_device_type("cpu")


def test_each_component_has_a_rendezvous_of_its_own(pair, quad):
    ours, theirs = pair.identity().get(), quad.identity().get()
    places = [{(one["rendezvous"].host, one["rendezvous"].port) for one in seen} for seen in (ours, theirs)]
    assert [len(place) for place in places] == [1, 1]
    assert places[0] != places[1]
    assert ours[0]["rendezvous"].listen_fd is not None
    assert ours[1]["rendezvous"].listen_fd is None
    assert [one["rendezvous"].rank for one in theirs] == [0, 1, 2, 3]
    assert ours[0]["master"] == (ours[0]["rendezvous"].host, str(ours[0]["rendezvous"].port))


def test_processes_exchange_values_on_a_board_that_ends_with_the_one_who_opened_it(pair):
    board = tr.ObjectBoard.open(timeout_s=60)
    answered = pair.pin_up(board.address)
    for rank in (1, 0):
        board.put(f"question {rank}", rank + 5, timeout_s=20)
        name, value, shared = board.wait(["answer 7", f"answer {rank}"], timeout_s=20)
        assert (name, value, shared.shape, int(shared.min())) == (f"answer {rank}", 10 * (rank + 5), (1 << 20,), rank + 5)
    answered.get()
    board.drop(["answer 0", "answer 8"])
    assert board.wait(["answer 0"], timeout_s=0.1) is None
    assert board.wait(["answer 0", "answer 1"], timeout_s=0)[0] == "answer 1"
    other = tr.ObjectBoard.join(board.address, timeout_s=20)
    other.close()  # it has not opened it
    assert board.wait(["answer 1"], timeout_s=0) is not None
    board.close()
    with pytest.raises(tr.WorkerDiedError, match="closed it or died"):
        other.wait(["answer 1"], timeout_s=20)
    with pytest.raises(tr.WorkerDiedError, match="there is no board at"):
        tr.ObjectBoard.join(board.address, timeout_s=20)


def test_the_handle_is_an_instance_of_the_class_and_refuses_what_is_not_remote(pair):
    assert isinstance(pair, Part)
    assert "on 2 worker(s) of group 'pair'" in repr(pair)
    with pytest.raises(tr.RemoteAttributeError, match=r"Part.undecorated is not a remote method: decorate it with @remote_function"):
        pair.undecorated()
    with pytest.raises(tr.RemoteAttributeError, match="no remote method 'colour'"):
        pair.colour  # noqa: B018
    with pytest.raises(tr.RemoteAttributeError, match="cannot be set"):
        pair.colour = "blue"
    assert not hasattr(pair, "mesh")


def test_constructor_errors_come_at_once_with_their_type(runtime):
    with pytest.raises(ValueError, match="out of order") as caught:
        Part(remote_group="one", fault="out of order")
    assert isinstance(caught.value, tr.RemoteCallError)
    assert "rank 0 of group 'one'" in str(caught.value)
    with pytest.raises(tr.GroupError, match="has 4 ranks, but device group 'pair' has 2 workers"):
        Part(remote_group="pair", device_mesh=DP2_TP2)
    with pytest.raises(tr.GroupError, match="there are 'one', 'pair', 'quad'"):
        Part(remote_group="none")


def test_without_remote_group_the_object_is_in_process(runtime, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    part = Part()
    assert part.echo([1, 2]).get() == [1, 2]
    part.undecorated()


def test_a_worker_builds_its_own_group_in_process(pair):
    assert pair.build_within().get() == [(True, [1])] * 2


@pytest.mark.parametrize("batch", [[1, 2, 3, 4, 5], (1, 2, 3, 4, 5), np.arange(5), np.arange(5000.0).reshape(5, 1000)])
def test_batches_go_out_by_data_rank_and_come_back_as_they_were(quad, batch):
    back = quad.echo(batch).get()
    assert type(back) is type(batch)
    np.testing.assert_array_equal(back, batch)
    shares = quad.share(batch).get()
    assert [len(share) for share in shares] == [3, 3, 2, 2]
    assert [len(share) for share in quad.even(batch).get()] == [2, 1, 1, 1]


def test_dispatch_errors_come_before_anything_is_sent(quad):
    with pytest.raises(tr.DispatchError, match=r"x has 1 item\(s\) for 2 data ranks"):
        quad.echo([1])
    with pytest.raises(tr.DispatchError, match="x has 4, allow has 5"):
        quad.even([1] * 4, allow=[1] * 5)


def test_what_is_sliced_over_tp_peers_too_is_collected_from_all_of_them(quad, pair):
    assert quad.evenly(list(range(8))).get() == list(range(8))
    assert pair.echo(quad.evenly(quad.evenly(list(range(8))))).get() == list(range(8))
    assert quad.total(list(range(8))) == 28
    assert [list(step) for step in quad.one_by_one(list(range(8)))] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_mean_covers_all_keys_and_counts_tp_peers_once(quad):
    # A mean over items: two of the three are in a share of two.
    assert quad.metrics([1, 2, 3]) == {"n": pytest.approx(5 / 3), "of rank 0": 1.0, "of rank 2": 1.0}


def test_custom_dispatch_and_collect_functions(pair):
    assert pair.custom("hello").get() == ("nothing (2, 0, 2)", 2)


def test_first_and_one_worker(pair, runtime):
    assert pair.first().get() == 0
    one = Part(remote_group="one")
    assert one.share([1, 2]).get() == [1, 2]
    assert one.identity().get()["rank"] == 0


def test_len_and_iteration_cross_processes(pair):
    assert len(pair) == 3
    batches = list(pair)
    assert all(isinstance(batch, tr.LazyResult) for batch in batches)
    assert [list(batch) for batch in batches] == [[i] * 4 for i in range(3)]
    left, right = iter(pair), iter(pair)
    assert list(next(left)) == [0] * 4
    assert list(next(right)) == [0] * 4
    assert list(next(left)) == [1] * 4


def test_a_lazy_result_is_recognised_at_any_depth(pair, quad):
    lazy = pair.echo([1, 2, 3])
    for seen in quad.see({"a": [lazy, (lazy, 5)], "b": Box({"c": lazy})}).get():
        assert seen["a"] == [[1, 2, 3], ([1, 2, 3], 5)]
        assert seen["b"].inside == {"c": [1, 2, 3]}
    assert quad.share([lazy, lazy, 7]).get()[2] == [7]


def test_chained_results_keep_their_order_across_meshes(pair, quad):
    batch = [np.full(1000, i) for i in range(7)]
    for chained in (quad.echo(pair.echo(batch)), pair.echo(quad.echo(pair.echo(batch)))):
        assert [int(item[0]) for item in chained] == list(range(7))
    assert [int(item[0]) for item in pair.repeat(quad.repeat(batch, 2), 3)] == [i for i in range(7) for _ in range(6)]
    matrix = np.arange(8000.0).reshape(8, 1000)
    np.testing.assert_array_equal(pair.echo(quad.echo(matrix)).get(), matrix)


def double(x):
    return 2 * x


@pytest.mark.parametrize("direct", [256, 0])
def test_lazy_results_are_zipped_nested_in_dicts_sliced_joined_and_mapped_across_meshes(pair, quad, monkeypatch, direct):
    monkeypatch.setattr(_ray_sending, "_DIRECT_ANSWERS", direct)  # 0: the recipes are written by a task
    rows = pair.echo([np.full(1000, i) for i in range(7)])
    assert len(rows) == 7
    columns = {"rows": rows, "number": np.arange(7)}
    expected = [(i, i, i) for i in range(7)]
    assert quad.zipped(columns, quad.echo(rows)).get() == expected
    assert pair.zipped(pair.echo(columns), rows).get() == expected
    assert [int(item[0]) for item in quad.echo(rows[5:] + rows[:2] + [np.full(1000, 9)])] == [5, 6, 0, 1, 9]
    assert [int(item[0]) for item in pair.echo(quad.echo(rows)[::-2].map(double))] == [12, 8, 4, 0]
    with pytest.raises(tr.DispatchError, match=r"a LazyResult has 1 item\(s\) for 2 ranks"):
        quad.echo(rows[:1]).get()
    with pytest.raises(KeyError, match="upstream"):
        quad.echo(pair.fail(0, "upstream")).get()


def test_what_comes_with_a_lazy_argument_belongs_to_one_call(pair, quad):
    lazy = pair.echo([1, 2])
    mapped = [quad.see(lazy.map(Counting())).get()[0] for _ in range(2)]
    assert mapped == [[(1, 1), (2, 2)]] * 2
    tail = [3, {"n": 0}]
    joined = [quad.bump(lazy + tail).get() for _ in range(2)]
    assert joined == [[1, 2, 3, {"n": 1}]] * 2


def test_many_calls_leave_no_references_and_little_memory(pair):
    import psutil
    import ray
    from ray._private.internal_api import memory_summary

    def run(calls):
        for index in range(calls):
            pair.first().get() if index % 10 else pair.echo(pair.make(8, 2000)).get()

    def state():
        references = memory_summary(ray.get_runtime_context().gcs_address)
        return psutil.Process().memory_full_info().uss, references.count("LOCAL_REFERENCE") + references.count("PINNED_IN_MEMORY")

    run(100)
    memory, references = state()
    run(300)
    later, kept = state()
    assert later < 1.05 * memory
    assert kept <= references
    # The control: a result that is held is seen.
    held = pair.make(8, 200_000)
    held.get()
    assert state()[1] > kept


def test_lengths_are_checked_when_results_are_lazy(pair, quad):
    with pytest.raises(tr.DispatchError, match=r"a LazyResult has 1 item\(s\) for 2 ranks"):
        pair.echo(pair.make(1, 10)).get()
    with pytest.raises(tr.DispatchError, match="3, 4 items"):
        pair.even(pair.echo([1, 2, 3]), allow=[1, 2, 3, 4]).get()


def test_only_the_shards_that_a_worker_needs_travel_and_none_to_the_driver(runtime, pair, monkeypatch):
    item, n = 100_000, 8
    consumer = Part(remote_group="quad", device_mesh=DP2_TP2)
    consumer.count_traffic().get()
    seen_by_driver = []
    original = _shards._values
    monkeypatch.setattr(_shards, "_values", lambda pieces, timeout_s: seen_by_driver.append(pieces) or original(pieces, timeout_s))
    assert consumer.lengths(pair.make(n, item)).get() == [n / 2] * 4
    assert all(isinstance(piece, _shards.Inline) for pieces in seen_by_driver for piece in pieces)
    fetched = consumer.traffic().get()
    assert all(n / 2 * item <= one < n / 2 * item * 1.02 for one in fetched), fetched
    # The control: without knowing who will read it, the producer stores the batch in one piece, and every worker fetches all of it.
    monkeypatch.setattr(runtime, "_splits", ())
    consumer.lengths(pair.make(n, item)).get()
    more = [after - before for before, after in zip(fetched, consumer.traffic().get(), strict=True)]
    assert all(one >= n * item for one in more), more


@pytest.mark.parametrize("size", [3, 50_000])
def test_arrays_arrive_read_only_as_what_ray_stores_is_shared(pair, size):
    batch = [np.zeros(size) for _ in range(2)]
    with pytest.raises(ValueError, match="read-only"):
        pair.write_into(batch).get()
    with pytest.raises(ValueError, match="read-only"):
        pair.write_into(pair.echo(batch)).get()
    assert pair.write_into([array.tolist() for array in batch], copy=True).get()[0][0] == 1.0


def test_tensors_travel_without_their_graph_or_the_storage_behind_a_view(pair):
    torch = pytest.importorskip("torch")
    base = torch.arange(100_000.0, requires_grad=True)
    back = pair.see(base[:4] * 2).get()[0]
    assert back.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert not back.requires_grad
    from twinkle_remote._packing import pack

    assert len(pack(torch.zeros(100_000)[:4])) < 2000


ECHO = MethodSpec(
    name="echo", parameters=(), dispatch="all", execute="all", collect="none", sync=False, lazy_collect=True, timeout_s=None, allow_empty=False
)


def test_a_short_deadline_does_not_end_a_longer_call_that_it_waits_for():
    queue = []
    part = SimpleNamespace(class_name="Part", restarts=0, calls_before=lambda call: queue[: queue.index(call)])
    queue += [PendingCall(part, ECHO, [None], [], "script.py:1", timeout_s) for timeout_s in (100.0, 7.0, 1.0)]
    assert own_limit_s(queue[2:]) == 100.0
    queue[0].results = [_shards.Result(None, (0, 0), (_shards.inline(None),), 0.0, 0.0)]
    assert own_limit_s(queue[2:]) == 7.0
    assert own_limit_s(queue[1:2]) == 7.0
    upstream = PendingCall(SimpleNamespace(restarts=0, calls_before=lambda call: []), ECHO, [None], [], "script.py:1", 50.0)
    queue[2].upstream = (upstream,)
    assert own_limit_s(queue[2:]) == 50.0


def test_a_finished_result_after_shutdown_is_an_error_unless_its_value_is_at_hand(monkeypatch):
    monkeypatch.setattr(_shards, "_values", lambda pieces, timeout_s: [_shards.unpack(piece.data) for piece in pieces])

    def lazy(piece):
        call = PendingCall(
            SimpleNamespace(class_name="Part", restarts=0, costs=SimpleNamespace(add_collect=lambda *_: None), in_use=contextlib.nullcontext),
            ECHO,
            [None],
            [],
            "script.py:1",
            1.0,
        )
        call.results = [_shards.Result(None, (0, 0), (piece,), 0.0, 0.0)]
        return call, tr.LazyResult(CallSource(call, DeviceMesh.from_sizes(), "none", lambda: False))

    assert lazy(_shards.inline(3))[1].get() == 3
    with pytest.raises(tr.RuntimeStateError, match=r"Part.echo was not collected before shutdown\(\)"):
        lazy("a reference")[1].get()
    call, unfinished = lazy("a reference")
    call.results = [None]
    assert repr(unfinished) == "<LazyResult lost>"


def test_a_small_view_of_a_large_tensor_travels_with_the_description_alone():
    torch = pytest.importorskip("torch")
    assert len(_shards.keep(torch.zeros(100_000)[:4], None, None, (), 0.0, 0.0).answer()) < 1000
    assert not _shards.is_light(torch.zeros(1000))
    assert not _shards.is_light({"sparse": torch.eye(3).to_sparse()})


def test_an_empty_batch_that_is_stored_comes_back_with_its_type(monkeypatch):
    stored = []
    monkeypatch.setattr(_shards, "_put", lambda value, above: stored.append(_shards.pack(value)) or stored[-1])
    monkeypatch.setattr(_shards, "_values", lambda pieces, timeout_s: [_shards.unpack(piece) for piece in pieces])
    result = _shards.keep(np.array([], dtype=object), None, None, (1, 2), 0.0, 0.0)
    assert len(stored) == 1
    for collect in ("flatten", "none"):
        value = _shards.Stored([result], collect, DeviceMesh.from_sizes(), None).whole().run(None)
        assert value.dtype == object
        assert len(value) == 0


def test_a_failure_is_the_original_type_with_all_there_is_to_know(pair):
    with pytest.raises(Odd) as caught:
        pair.fail(1, "odd").get()
    error = caught.value
    assert isinstance(error, tr.RemoteCallError)
    assert error.detail == {"a": 1}
    assert error.args == ("code 3",)
    text = str(error)
    for part in ("code 3", "Part.fail", "rank 1", "group 'pair'", "Remote traceback", "raise Odd(3", f"{__file__}:"):
        assert part in text
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, Odd)
    assert str(again) == text
    with pytest.raises(FileNotFoundError) as file:
        pair.fail(0, "file").get()
    assert (file.value.errno, file.value.filename) == (2, "/nowhere")
    # All ranks answered, so the component lives on.
    assert pair.echo([1, 2]).get() == [1, 2]


def test_exceptions_that_cannot_travel_become_worker_errors(pair):
    with pytest.raises(tr.WorkerError, match="no way"):
        pair.fail(0, "unpicklable").get()
    with pytest.raises(tr.WorkerError, match="SystemExit: 3"):
        pair.fail(0, "exit").get()
    with pytest.raises(tr.WorkerError, match=r"CancelledError\n  raised by Part.fail on rank 1 of group 'pair'"):
        pair.fail(1, "cancelled").get()
    with pytest.raises(TypeError, match="generator"):
        pair.give_a_generator().get()


def test_the_failure_of_a_producer_is_raised_by_what_consumes_it(pair, quad):
    with pytest.raises(KeyError, match="lost") as caught:
        quad.see(pair.fail(0, "lost")).get()
    assert "Part.fail" in str(caught.value)
    assert quad.echo([1, 2]).get() == [1, 2]
    assert pair.echo([1, 2]).get() == [1, 2]


def test_an_uncollected_failure_is_raised_by_the_next_call(pair):
    lost = pair.fail(0, "unseen")
    deadline = time.monotonic() + 20
    while not lost.ready() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(KeyError, match="unseen"):
        pair.first()
    assert pair.first().get() == 0


def test_a_failure_that_somebody_waits_for_is_not_raised_by_another_call(pair):
    steps = pair.steps(2)
    assert next(steps).get() == 0
    pair.sleep(0.2).get()  # the third step has failed by now, two steps ahead
    assert pair.first().get() == 0
    assert next(steps).get() == 1
    with pytest.raises(ValueError, match="step 2"):
        next(steps)

    async def failing():
        with pytest.raises(KeyError, match="awaited"):
            await pair.fail(0, "awaited")

    async def others():
        return [await pair.first() for _ in range(10)]

    async def together():
        return (await asyncio.gather(failing(), others()))[1]

    assert asyncio.run(together()) == [0] * 10


def test_the_workers_of_a_component_that_is_dropped_end_at_once(runtime):
    def use_and_drop():
        part = Part(remote_group="one")
        pid = pids(part)[0]
        part.sleep(0)  # nobody collects this
        with contextlib.suppress(KeyError):
            part.fail(0, "caught").get()
        outlives = part.see(np.arange(1000))
        return pid, outlives

    gc.collect()
    gc.disable()  # what goes in circles stays
    try:
        pid, outlives = use_and_drop()
        assert outlives.get().sum() == 499500
        assert not ends(pid, within_s=0.5)
        del outlives
        assert ends(pid)
    finally:
        gc.enable()


def test_a_failure_is_not_hidden_by_a_hung_peer_and_ends_the_component(runtime):
    part = Part(remote_group="pair")
    processes = pids(part)
    part.fail(1, "stuck", hang=True)
    start = time.monotonic()
    with pytest.raises(KeyError, match=r"ranks \[0\] were still in the call"):
        part.first().get()  # the call raises it, if it has come by then, else its result
    assert time.monotonic() - start < 10
    assert all(ends(pid) for pid in processes)
    with pytest.raises(tr.ComponentLostError, match="build it anew"):
        part.first().get()
    assert Part(remote_group="pair").first().get() == 0


def test_gather_raises_the_first_failure_of_any(pair, quad):
    slow = quad.sleep(3)
    start = time.monotonic()
    with pytest.raises(KeyError, match="quick"):
        tr.gather(slow, pair.fail(0, "quick"))
    assert time.monotonic() - start < 2.5
    slow.get()


def test_a_dead_worker_is_an_error_that_shows_its_last_words(runtime):
    part = Part(remote_group="pair")
    processes = pids(part)
    with pytest.raises(tr.WorkerDiedError, match="rank 1 of Part") as caught:
        part.fail(1, "kill", hang=True).get()
    assert "last words" in str(caught.value)
    assert str(processes[1]) in str(caught.value)
    assert all(ends(pid) for pid in processes)
    with pytest.raises(tr.ComponentLostError):
        part.first().get()


def test_deadlines_name_the_ranks_that_still_run(runtime):
    part = Part(remote_group="pair")
    processes = pids(part)
    hung = part.slow(0)
    with pytest.raises(tr.CallTimeoutError, match=r"Part.slow did not finish within 0.2 s.*ranks \[0\] of group 'pair' still run"):
        hung.get(timeout_s=0.2)
    assert not hung.ready()
    with pytest.raises(tr.CallTimeoutError, match=r"within 1 s.*ranks \[0\].*have been ended"):
        hung.get()
    assert all(ends(pid) for pid in processes)
    with pytest.raises(tr.ComponentLostError):
        part.first()


def test_a_gloo_group_meets_on_the_held_port_and_a_failure_beside_a_collective_surfaces(runtime):
    pytest.importorskip("torch")

    @tr.remote_class()
    class Gloo:
        def __init__(self):
            from datetime import timedelta

            import torch.distributed as dist

            place = tr.rendezvous()
            assert place is not None
            store = dist.TCPStore(
                place.host,
                place.port,
                place.world_size,
                place.rank == 0,
                timedelta(seconds=60),
                wait_for_workers=False,
                master_listen_fd=place.listen_fd,
            )
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
            self.rank = place.rank

        @tr.remote_function()
        def total(self, fail=False):
            import torch
            import torch.distributed as dist

            if fail and self.rank == 1:
                raise ZeroDivisionError("before the collective")
            value = torch.tensor([self.rank + 1.0])
            dist.all_reduce(value)
            return value.item()

    gloo = Gloo(remote_group="pair")
    assert gloo.total().get() == [3.0, 3.0]
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="before the collective"):
        gloo.total(fail=True).get()
    assert time.monotonic() - start < 10


def test_two_components_of_one_group_in_one_expression(runtime):
    parts = [Part(remote_group="one", number=number) for number in range(2)]
    assert [part.identity().get()["options"]["number"] for part in parts] == [0, 1]
    assert len({pids(part)[0] for part in parts}) == 2


def test_the_trace_has_a_span_for_every_call_and_rank(runtime, pair):
    pair.echo([1, 2]).get()
    runtime.trace.write()
    events = json.loads(runtime.trace_path.read_text())["traceEvents"]
    rows = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    last = [event for event in events if event["ph"] == "X" and event["name"] == "echo"][-2:]
    assert sorted(lanes[event["pid"], event["tid"]] for event in last) == ["rank 0", "rank 1"]
    assert all("Part" in rows[event["pid"]] and "(pair)" in rows[event["pid"]] for event in last)
    assert any(rows[event["pid"]] == "driver" and event["name"] == "Part.echo" for event in events if event["ph"] == "X")
