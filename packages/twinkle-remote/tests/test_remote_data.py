"""Batches out to the ranks of a mesh and back, through everything but Ray's transport: messages, cuts, pieces, recipes and collects."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import dataclasses
import pickle
import time
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("ray")
from hypothesis import given, settings
from hypothesis import strategies as st

import twinkle_remote as tr
from twinkle_mesh import DeviceMesh
from twinkle_remote import _ray_sending, _shards
from twinkle_remote._collect import combine, contributors, flatten
from twinkle_remote._dispatch import Part, all_differ, share_out
from twinkle_remote._lazy import ValueSource
from twinkle_remote._packing import Packed, pack_apart, unpack
from twinkle_remote._protocol import MethodSpec
from twinkle_remote._ray_routing import filled_slots, route
from twinkle_remote._ray_wire import read, unpack_arguments
from twinkle_remote._ray_worker import _as_given
from twinkle_remote._shards import Stored, heard, keep


def spec(dispatch="slice_dp", collect="flatten", **options):
    defaults = {"execute": "all", "sync": False, "lazy_collect": True, "timeout_s": None, "allow_empty": True}
    return MethodSpec(name="method", parameters=("x", "y"), dispatch=dispatch, collect=collect, **{**defaults, **options})


@pytest.fixture
def no_ray(monkeypatch):
    """Ray's store is the object itself, as it would come out of another process."""
    monkeypatch.setattr(_shards, "_put", lambda value, above: arrive(pack_apart(value)))
    monkeypatch.setattr(
        _shards,
        "_values",
        lambda pieces, timeout_s: [unpack(getattr(piece, "data", piece) if isinstance(piece, _shards.Inline) else piece) for piece in pieces],
    )
    monkeypatch.setattr(_ray_sending, "ray", SimpleNamespace(put=arrive))


def content(piece):
    return piece.data if isinstance(piece, _shards.Inline) else piece


def arrive(value):
    """Across a process border: plain bytes, or a pickle with buffers that are read-only."""
    if isinstance(value, bytes):
        return value
    buffers = []
    data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[memoryview(bytes(buffer.raw())) for buffer in buffers])


def run(method_spec, mesh, args, kwargs=None, method=lambda x, *rest: x, splits=(1, 2, 3, 4)):
    """Every rank's Result of one call."""
    shares = share_out(method_spec, args, kwargs or {}, mesh.world_size, mesh)
    sender = _ray_sending.Sender(method_spec, 1.0, splits, None, (), shares)
    results = []
    for rank in range(mesh.world_size):
        packed, *following = sender.objects(rank)
        message, _ = read(arrive(packed), following)
        with filled_slots(message, []) as given:
            positional, named = unpack_arguments(message)
        value = method(*positional, **named)
        results.append(heard(keep(value, _as_given(given, positional, named), message.part, message.header.splits, 0.0, 1.0).answer()))
    return results


def stored(results, mesh, collect="flatten"):
    return Stored([results[rank] for rank in contributors(collect, len(results), mesh)], collect, mesh, None)


def same(left, right):
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            same(left[key], right[key])
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, (list, tuple)) and any(isinstance(item, np.ndarray) for item in left):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
    else:
        assert left == right


@st.composite
def meshes(draw):
    sizes = {axis: draw(st.integers(1, 3)) for axis in ("dp_size", "fsdp_size", "tp_size", "pp_size", "cp_size", "ulysses_size")}
    while np.prod(list(sizes.values())) > 24:
        sizes[max(sizes, key=sizes.get)] -= 1
    if draw(st.booleans()):
        return DeviceMesh.from_sizes(**{**sizes, "tp_size": 1, "etp_size": 1})
    return DeviceMesh.from_sizes(**sizes)


BATCHES = {
    "numbers": lambda n: list(range(n)),
    "tuple": lambda n: tuple(f"item {i}" for i in range(n)),
    "tuple of lists": lambda n: tuple([i, i] for i in range(n)),
    "list of dicts": lambda n: [{"a": i, "b": [i] * i} for i in range(n)],
    "tuple of dicts": lambda n: tuple({"a": [i]} for i in range(n)),
    "array": lambda n: np.arange(n),
    "matrix": lambda n: np.arange(n * 400.0).reshape(n, 400),
    "transposed": lambda n: np.arange(n * 3.0).reshape(3, n).T,
    "objects": lambda n: np.array([None, *[{"i": i} for i in range(n)]], dtype=object)[1:],
    "rows of arrays": lambda n: [np.full(i % 5 * 100, i) for i in range(n)],
    "columns": lambda n: {"a": np.arange(n * 300).reshape(n, 300), "b": [str(i) for i in range(n)], "c": {"d": np.arange(n) % 3 == 0}},
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_that_is_split_over_a_mesh_and_collected_comes_back(no_ray, kind):
    @settings(max_examples=25, deadline=None)
    @given(mesh=meshes(), n=st.integers(0, 30))
    def check(mesh, n):
        batch = BATCHES[kind](n)
        results = run(spec(), mesh, (batch,))
        whole = stored(results, mesh)
        same(whole.whole().run(None), batch)
        # And in the parts that another mesh takes of it, as in that of a consumer.
        parts = [whole.recipe(*part_bounds(n, 3, index)).run(None) for index in range(3)]
        if n and kind != "columns":
            assert sum(map(len, parts)) == n

    check()


def test_what_is_sliced_over_all_workers_is_collected_from_all(no_ray):
    mesh = DeviceMesh.from_sizes(pp_size=2, dp_size=2, tp_size=2)
    batch = list(range(8))
    shares = share_out(spec("slice"), (batch,), {}, 8, mesh)
    results = run(spec("slice"), mesh, (batch,))
    ranks = contributors("flatten", 8, mesh, no_copies=all_differ(shares))
    assert Stored([results[rank] for rank in ranks], "flatten", mesh, None).whole().run(None) == batch
    assert contributors("sum", 8, mesh, no_copies=True) == tuple(range(8))
    assert contributors("last_pp", 8, mesh, no_copies=True) == (4, 5, 6, 7)
    # The control: what all workers got alike, and what was cut over the data ranks, is taken once.
    for other, args in (("slice", (3,)), ("all", (batch,)), ("slice_dp", (batch,))):
        assert not all_differ(share_out(spec(other), args, {}, 8, mesh))


def part_bounds(n, parts, index):
    bounds = Part(index, parts, None).bounds(n)
    return bounds.start, bounds.stop


def test_every_rank_of_a_data_group_gets_the_same_part_and_sizes_differ_by_at_most_one(no_ray):
    mesh = DeviceMesh.from_sizes(pp_size=2, dp_size=3, tp_size=2)
    for n in range(3, 20):
        seen = [stored([result], mesh, "first").whole().run(None) for result in run(spec(collect="none"), mesh, (list(range(n)),))]
        assert seen == [list(range(n))[mesh.get_slice(n, rank)] for rank in range(mesh.world_size)]
        assert max(map(len, seen)) - min(map(len, seen)) <= 1


def test_fewer_items_than_data_ranks_is_an_error_with_the_numbers_unless_allowed(no_ray):
    mesh = DeviceMesh.from_sizes(dp_size=4, tp_size=2)
    for batch in ([1, 2, 3], np.arange(3), (1, 2, 3)):
        with pytest.raises(tr.DispatchError, match=r"method: x has 3 item\(s\) for 4 data ranks"):
            share_out(spec(allow_empty=False), (batch,), {}, 8, mesh)
        assert len(share_out(spec(allow_empty=True), (batch,), {}, 8, mesh)) == 8
    with pytest.raises(tr.DispatchError, match=r"x\['a'\], x\['b'\] has 3 item\(s\) for 4 data ranks"):
        share_out(spec(allow_empty=False), ({"a": np.arange(3), "b": [1, 2, 3]},), {}, 8, mesh)


def test_a_dict_of_columns_is_cut_by_slice_dp_and_a_dict_of_settings_is_not():
    mesh = DeviceMesh.from_sizes(dp_size=2)
    columns, settings_ = {"ids": np.arange(4), "text": list("abcd")}, {"stop": ["x", "y"], "temperature": 1.0}
    shares = share_out(spec(), (columns, settings_), {}, 2, mesh)
    assert [share.args[0]["text"] for share in shares] == [["a", "b"], ["c", "d"]]
    assert [share.args[1] for share in shares] == [settings_] * 2
    assert [share.args[0]["ids"].tolist() for share in share_out(spec("slice"), (columns,), {}, 2, mesh)] == [[0, 1, 2, 3]] * 2
    with pytest.raises(tr.DispatchError, match=r"x\['ids'\] has 4, x\['text'\] has 3"):
        share_out(spec(), ({"ids": np.arange(4), "text": list("abc")},), {}, 2, mesh)


@dataclasses.dataclass(frozen=True)
class Output:
    rows: list
    scores: np.ndarray
    extra: dict
    nothing: None = None


class Pair(NamedTuple):
    left: list
    loss: float


def test_flatten_joins_dataclasses_named_tuples_and_what_is_nested_in_them(no_ray):
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2)

    def method(x):
        return Output(rows=[[i] for i in x], scores=np.array(x), extra={"inner": {"names": tuple(map(str, x))}, "n": len(x)})

    value = stored(run(spec(), mesh, ([1, 2, 3],), method=method), mesh).whole().run(None)
    assert isinstance(value, Output)
    assert (value.rows, value.scores.tolist(), value.nothing) == ([[1], [2], [3]], [1, 2, 3], None)
    assert value.extra == {"inner": {"names": ("1", "2", "3")}, "n": [2, 1]}
    pairs = stored(run(spec(), mesh, ([1, 2, 3],), method=lambda x: Pair(list(x), 0.5)), mesh).whole().run(None)
    assert pairs == Pair([1, 2, 3], [0.5, 0.5])


def test_several_results_side_by_side_stay_a_tuple_of_batches(no_ray):
    mesh = DeviceMesh.from_sizes(dp_size=2)
    for n in (2, 3, 4, 7):
        value = stored(run(spec(), mesh, (list(range(n)),), method=lambda x: (x, np.array(x))), mesh).whole().run(None)
        assert value[0] == list(range(n))
        assert value[1].tolist() == list(range(n))
        # The control: as many items as came in a tuple are a tuple batch, not results side by side.
        batch = tuple([i] for i in range(n))
        assert stored(run(spec(), mesh, (batch,)), mesh).whole().run(None) == batch


def test_a_mean_over_uneven_shares_is_the_mean_over_the_items(no_ray):
    mesh = DeviceMesh.from_sizes(dp_size=3, tp_size=2, pp_size=2)
    items = [1.0, 2.0, 3.0, 4.0, 50.0, 60.0, 70.0]  # 3, 2, 2
    results = run(spec(collect="mean"), mesh, (items,), method=lambda x: {"loss": sum(x) / len(x), f"only {x[0]}": x[0]})
    value = stored(results, mesh, "mean").whole().run(None)
    assert value["loss"] == pytest.approx(sum(items) / len(items))
    assert value.keys() == {"loss", "only 1.0", "only 4.0", "only 60.0"}
    assert value["only 4.0"] == 4.0
    # The control: the mean of the ranks' means, which is what counting every rank alike would give.
    assert value["loss"] != pytest.approx((2.0 + 27.0 + 65.0) / 3)
    assert combine("mean", [{"loss": 2.0}, {"loss": 27.0}, {"loss": 65.0}], mesh)["loss"] == pytest.approx((2.0 + 27.0 + 65.0) / 3)


def test_a_method_may_say_how_much_its_result_counts():
    with pytest.raises(tr.CollectError, match="at least 0"):
        tr.Weighted(1.0, float("nan"))
    mesh = DeviceMesh.from_sizes(dp_size=2)
    assert combine("mean", [1.0, 4.0], mesh, [1.0, 2.0]) == 3.0
    assert combine("mean", [float("nan"), 4.0], mesh, [0.0, 2.0]) == 4.0
    assert combine("mean", [1.0, 4.0], mesh, [0.0, 0.0]) == 2.5
    assert combine("sum", [1.0, 4.0], mesh, [1.0, 2.0]) == 5.0
    np.testing.assert_allclose(combine("mean", [np.array([0.0]), np.array([3.0])], mesh, [1.0, 2.0]), [2.0])


def test_dataclasses_are_averaged_field_by_field():
    @dataclasses.dataclass
    class Metrics:
        loss: float
        by_name: dict

    value = combine("mean", [Metrics(1.0, {"a": 1.0}), Metrics(4.0, {"b": 2.0})], DeviceMesh.from_sizes(dp_size=2), [2.0, 1.0])
    assert value == Metrics(2.0, {"a": 1.0, "b": 2.0})


def test_a_message_keeps_arrays_apart_and_what_arrives_is_read_only(no_ray):
    mesh = DeviceMesh.from_sizes(dp_size=2)
    batch = np.arange(200_000.0).reshape(100, 2000)
    sender = _ray_sending.Sender(spec(), 1.0, (), None, (), share_out(spec(), (batch,), {}, 2, mesh))
    (packed,) = sender.objects(0)
    assert isinstance(packed, Packed)
    assert len(packed.data) < 1000
    assert np.shares_memory(np.frombuffer(packed.buffers[0]), batch)  # Ray copies it into its store, and nobody else
    message, _ = read(arrive(packed), [])
    (x,), _ = unpack_arguments(message)
    np.testing.assert_array_equal(x, batch[:50])
    with pytest.raises(ValueError, match="read-only"):
        x += 1


def lazy(value):
    return tr.LazyResult(ValueSource(value))


@pytest.mark.parametrize("bounds", [slice(2, 5), slice(None, None, 2), slice(None, None, -1), slice(-3, None), slice(5, 2), slice(6, 0, -2)])
@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_slices_of_a_lazy_result_are_lazy_and_what_python_would_give(no_ray, make, bounds):
    batch = make(list(range(7)))
    mesh = DeviceMesh.from_sizes(dp_size=3)
    cut = lazy(batch)[bounds]
    assert isinstance(cut, tr.LazyResult)
    same(cut.get(), batch[bounds])
    operation = cut.source.operation
    same(operation.over([stored(run(spec(), mesh, (batch,)), mesh)]).whole().run(None), batch[bounds])


def test_concatenation_and_map_of_lazy_results_are_lazy():
    calls = []

    def double(x):
        calls.append(x)
        return 2 * x

    both = lazy([1, 2]) + lazy([3]) + [4]
    mapped = (lazy([0]) + both).map(double)
    zero = [0]
    assert (zero + both).get() == [0, 1, 2, 3, 4]
    assert (len(both), len(mapped), calls) == (4, 5, [])
    assert len(both.source.inner) == 3
    assert mapped[1:3].get() == [2, 4]
    assert calls == [1, 2]
    assert mapped.get() == [0, 2, 4, 6, 8]
    assert lazy((1, 2)).map(double).get() == (2, 4)
    np.testing.assert_array_equal((np.arange(2) + lazy(np.arange(3))).get(), [0, 1, 0, 1, 2])
    with pytest.raises(tr.CollectError, match="mapped over"):
        lazy(3.0).map(double).get()
    with pytest.raises(tr.CollectError, match="different types"):
        (lazy([1]) + lazy((2,))).get()


def test_len_and_truth_fetch_nothing(no_ray, monkeypatch):
    mesh = DeviceMesh.from_sizes(dp_size=2)
    whole = stored(run(spec(), mesh, (np.arange(2000.0),)), mesh)
    monkeypatch.setattr(_shards, "_values", None)
    result = tr.LazyResult(SimpleNamespace(open=lambda timeout_s: whole, calls=list))
    assert len(result) == 2000
    assert result
    assert len(result[::3]) == 667


def test_the_route_task_writes_each_consumer_what_it_takes_alone(no_ray):
    producers, consumers, n = DeviceMesh.from_sizes(dp_size=6, tp_size=2), 4, 50
    results = [result.answer() for result in run(spec(), producers, (list(range(n)),), method=lambda x: [np.full(300, i) for i in x])]
    chosen = [results[rank] for rank in producers.representatives()]
    header = _ray_sending.Header(
        method="m",
        slots=(_ray_sending.Slot(_ray_sending.Leaf(0, 6, "flatten", producers), True),),
        timeout_s=1.0,
    )
    recipes = route(_ray_sending.packed_header(header), [Part(index, consumers, None) for index in range(consumers)], *chosen)
    taken = [one.recipes[0].run(None) for one in recipes]
    assert [int(item[0]) for part in taken for item in part] == list(range(n))
    pieces = [len(one.recipes[0].ranges) for one in recipes]
    assert max(pieces) <= 6  # of some 20
    assert {one.totals for one in recipes} == {(n,)}


class StubActor:
    def __init__(self, sent):
        self.call = SimpleNamespace(remote=lambda *objects: sent.append(objects))


def test_the_objects_sent_for_a_lazy_argument_are_linear_in_the_workers(monkeypatch):
    from twinkle_remote import _ray_calls

    task = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=lambda *objects: sent.append(objects) or list(range(num_returns))))
    monkeypatch.setattr(_ray_sending, "_route_task", lambda: task)
    component = SimpleNamespace(runtime_is_open=lambda: True)
    counts = {}
    for world in (2, 64, 256):
        sent = []
        mesh = DeviceMesh.from_sizes(dp_size=world)
        call = SimpleNamespace(component=component, references=tuple(range(world)), raise_error=lambda: None)
        source = _ray_calls.CallSource.__new__(_ray_calls.CallSource)
        source.call, source.mesh, source.collect_how, source.ranks = call, mesh, "flatten", tuple(range(world))
        sender = _ray_sending.Sender(spec(), 1.0, (), None, (), share_out(spec(), (tr.LazyResult(source),), {}, world, mesh))
        sent.extend(sender.objects(rank) for rank in range(world))
        counts[world] = sum(map(len, sent))
    assert counts[64] <= 4 * 64 + 2
    assert counts[256] <= 4 * 256 + 2
    assert counts[2] == 2 * (1 + 2)


def linear_s(make, call, size):
    value = make(size)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        call(value)
        seconds.append(time.process_time() - start)
    return min(seconds)


def test_dispatch_and_flatten_are_linear():
    def dispatch(world):
        mesh = DeviceMesh.from_sizes(dp_size=world // 8, tp_size=8)
        shares = share_out(spec(), ({name: np.arange(world * 4).reshape(world, 4) for name in "abcde"},), {}, world, mesh)
        sender = _ray_sending.Sender(spec(), 1.0, (), None, (), shares)
        for rank in range(world):
            sender.objects(rank)

    def results(count):
        return [{name: np.zeros(1) for name in "abcde"} for _ in range(count)]

    for make, call, small, large in ((lambda size: size, dispatch, 512, 4096), (results, flatten, 512, 4096)):
        # Eight times the size; quadratic code would take 64 times as long.
        assert linear_s(make, call, large) < 24 * max(linear_s(make, call, small), 1e-3)
