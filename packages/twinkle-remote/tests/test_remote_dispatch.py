"""Sharing out arguments and putting results together, without workers."""

# pyright: reportArgumentType=false

from typing import NamedTuple

import numpy as np
import pytest

import twinkle_remote as tr
from twinkle_mesh import DeviceMesh
from twinkle_remote._collect import combine, contributors
from twinkle_remote._dispatch import share_out
from twinkle_remote._protocol import MethodSpec


def spec(dispatch="slice", **options):
    defaults = {
        "name": "method",
        "parameters": ("x", "y"),
        "execute": "all",
        "collect": "none",
        "sync": False,
        "lazy_collect": True,
        "timeout_s": None,
        "allow_empty": False,
    }
    return MethodSpec(dispatch=dispatch, **{**defaults, **options})


DP4 = DeviceMesh.from_sizes(dp_size=4)
DP2_TP2 = DeviceMesh.from_sizes(dp_size=2, tp_size=2)
PP2_DP2 = DeviceMesh.from_sizes(pp_size=2, dp_size=2)


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_slice_cuts_lists_tuples_and_arrays_alike_in_order_and_unevenly(make):
    shares = share_out(spec(), (make([0, 1, 2, 3, 4, 5]),), {}, 4, DP4)
    assert [list(share.args[0]) for share in shares] == [[0, 1], [2, 3], [4], [5]]
    assert all(type(share.args[0]) is type(make([1])) for share in shares)


def test_slice_cuts_tensors():
    torch = pytest.importorskip("torch")
    shares = share_out(spec(), (torch.arange(8).reshape(4, 2),), {}, 2, DeviceMesh.from_sizes(dp_size=2))
    assert [share.args[0].tolist() for share in shares] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_scalars_strings_and_dicts_go_to_all():
    shares = share_out(spec(), ([1, 2], 3), {"name": "abcd", "options": {"k": [1, 2]}}, 2, DeviceMesh.from_sizes(dp_size=2))
    assert [share.args for share in shares] == [([1], 3), ([2], 3)]
    assert all(share.kwargs == {"name": "abcd", "options": {"k": [1, 2]}} for share in shares)


def test_slice_dp_gives_tp_peers_the_same_share_where_slice_does_not():
    batch = list(range(8))
    by_data_rank = [share.args[0] for share in share_out(spec("slice_dp"), (batch,), {}, 4, DP2_TP2)]
    assert by_data_rank == [batch[DP2_TP2.get_slice(8, rank)] for rank in range(4)]
    assert by_data_rank == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    assert [share.args[0] for share in share_out(spec("slice"), (batch,), {}, 4, DP2_TP2)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_all_gives_everything_to_everyone():
    assert [share.args for share in share_out(spec("all"), ([1, 2],), {}, 4, DP4)] == [([1, 2],)] * 4


def test_fewer_items_than_ranks_is_an_error_unless_allowed():
    with pytest.raises(tr.DispatchError, match=r"method: x has 1 item\(s\) for 4 workers"):
        share_out(spec(), ([1],), {}, 4, DP4)
    with pytest.raises(tr.DispatchError, match=r"y has 1 item\(s\) for 2 data ranks"):
        share_out(spec("slice_dp"), (), {"y": (1,)}, 4, DP2_TP2)
    assert [share.args[0] for share in share_out(spec(allow_empty=True), ([1],), {}, 4, DP4)] == [[1], [], [], []]


def test_batches_of_different_lengths_are_an_error_that_names_them():
    with pytest.raises(tr.DispatchError, match="x has 4, y has 6"):
        share_out(spec(), ([1] * 4,), {"y": (1,) * 6}, 2, DeviceMesh.from_sizes(dp_size=2))


def test_a_dispatch_function_gets_the_documented_arguments():
    seen = []

    def dispatch(length, i, args, kwargs, device_mesh):
        seen.append((length, i, args, kwargs, device_mesh))
        return (args[0] + i,), {"k": i}

    shares = share_out(spec(dispatch), (10,), {"k": 0}, 3, DeviceMesh.from_sizes(dp_size=3))
    assert [(share.args, share.kwargs) for share in shares] == [((10,), {"k": 0}), ((11,), {"k": 1}), ((12,), {"k": 2})]
    assert seen[1] == (3, 1, (10,), {"k": 0}, DeviceMesh.from_sizes(dp_size=3))
    with pytest.raises(tr.DispatchError, match="returns"):
        share_out(spec(lambda *_: None), (), {}, 2, DP4)


def collected(collect, per_rank, mesh):
    return combine(collect, [per_rank[rank] for rank in contributors(collect, len(per_rank), mesh)], mesh)


def test_flatten_takes_one_copy_of_each_data_group_and_loses_nothing():
    per_rank = [[["a"], ["b"]], [["a"], ["b"]], [["c"], ["d"]], [["c"], ["d"]]]
    assert collected("flatten", per_rank, DP2_TP2) == [["a"], ["b"], ["c"], ["d"]]
    # The control: on a mesh without tensor parallelism the same results are four different ones.
    assert len(collected("flatten", per_rank, DP4)) == 8


def test_flatten_reads_the_last_pipeline_stage_in_data_order():
    per_rank = [["early 0"], ["early 1"], ["late 0"], ["late 1"]]
    assert collected("flatten", per_rank, PP2_DP2) == ["late 0", "late 1"]
    assert collected("last_pp", per_rank, PP2_DP2) == ["late 0", "late 1"]
    assert collected("last_pp", [1, 2], DeviceMesh.from_sizes(pp_size=2)) == 2


class Pair(NamedTuple):
    left: list
    right: list


@pytest.mark.parametrize(
    ("results", "joined"),
    [
        ([[1, 2], [3]], [1, 2, 3]),
        ([(1, 2), (3,)], (1, 2, 3)),
        ([([1], [2]), ([3], [4])], ([1, 3], [2, 4])),
        ([Pair([1], [2]), Pair([3], [4])], Pair([1, 3], [2, 4])),
        ([{"a": [1], "b": [2]}, {"a": [3], "c": [4]}], {"a": [1, 3], "b": [2], "c": [4]}),
        ([{"loss": 1.0}, {"loss": 2.0, "only": 3.0}], {"loss": [1.0, 2.0], "only": [3.0]}),
        ([None, None], None),
        ([1.0, 2.0], [1.0, 2.0]),
        (["ab", "c"], ["ab", "c"]),
        ([[], [1]], [1]),
    ],
)
def test_flatten_returns_the_structure_of_one_worker(results, joined):
    value = combine("flatten", results, DeviceMesh.from_sizes(dp_size=2))
    assert value == joined
    assert type(value) is type(joined)


def test_flatten_joins_arrays_and_tensors():
    torch = pytest.importorskip("torch")
    mesh = DeviceMesh.from_sizes(dp_size=2)
    np.testing.assert_array_equal(combine("flatten", [np.arange(4).reshape(2, 2), np.ones((1, 2), int)], mesh), [[0, 1], [2, 3], [1, 1]])
    assert combine("flatten", [torch.arange(2), torch.arange(3)], mesh).tolist() == [0, 1, 0, 1, 2]
    with pytest.raises(tr.CollectError, match="list, tuple"):
        combine("flatten", [[1], (2,)], mesh)


def test_mean_and_sum_cover_the_keys_of_all_ranks():
    mesh = DeviceMesh.from_sizes(dp_size=2)
    results = [{"loss": 1.0, "zero": 4.0}, {"loss": 3.0, "one": 5.0}]
    assert combine("mean", results, mesh) == {"loss": 2.0, "zero": 4.0, "one": 5.0}
    assert combine("sum", results, mesh) == {"loss": 4.0, "zero": 4.0, "one": 5.0}
    assert combine("mean", [None, {"a": [1.0, 2.0]}], mesh) == {"a": [1.0, 2.0]}
    assert combine("sum", [(1, 2), (3, 4)], mesh) == (4, 6)
    np.testing.assert_array_equal(combine("mean", [np.array([1.0, 2.0]), np.array([3.0, 4.0])], mesh), [2.0, 3.0])
    with pytest.raises(tr.CollectError, match="not str"):
        combine("mean", ["a", "b"], mesh)


def test_mean_and_sum_of_small_types_neither_overflow_nor_drift():
    torch = pytest.importorskip("torch")
    mesh = DeviceMesh.from_sizes(dp_size=2)
    for make in (
        lambda x, kind: np.array([x], kind),
        lambda x, kind: torch.tensor([x], dtype=getattr(torch, kind)),
        lambda x, kind: np.dtype(kind).type(x),
    ):
        assert combine("mean", [make(200, "uint8")] * 2, mesh).item() == 200
        assert combine("sum", [make(200, "uint8")] * 2, mesh).item() == 400
        assert combine("mean", [make(True, "bool")] * 2, mesh).item() == 1
        assert combine("sum", [make(True, "bool")] * 3, mesh).item() == 3
        assert combine("sum", [make(2**31 - 1, "int32")] * 2, mesh).item() == 2**32 - 2
        halves = [make(60000, "float16")] * 2
        assert combine("mean", halves, mesh).item() == 60000
        assert combine("mean", halves, mesh, [300.0, 301.0]).dtype == halves[0].dtype
        assert combine("mean", [make(1, "float64"), make(2, "float16")], mesh).item() == 1.5
    many = combine("mean", [torch.tensor(1.0, dtype=torch.bfloat16)] * 128, DeviceMesh.from_sizes(dp_size=128), [1000.0 + i for i in range(128)])
    assert (many.item(), many.dtype) == (1.0, torch.bfloat16)


def test_flatten_keeps_masks_and_records():
    mesh = DeviceMesh.from_sizes(dp_size=2)
    masked = combine("flatten", [np.ma.array([1, 2], mask=[False, True]), np.ma.array([3, 4], mask=[True, False])], mesh)
    assert masked.filled(0).tolist() == [1, 0, 0, 4]
    records = combine("flatten", [np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])] * 2, mesh)
    assert records.a.tolist() == [1, 1]


def test_mean_counts_tp_peers_once():
    assert collected("mean", [1.0, 1.0, 5.0, 5.0], DP2_TP2) == 3.0
    assert collected("sum", [1.0, 1.0, 5.0, 5.0], DP2_TP2) == 6.0


def test_none_first_and_functions():
    assert collected("none", [1, 2, 3, 4], DP2_TP2) == [1, 2, 3, 4]
    assert collected("first", [1, 2, 3, 4], DP2_TP2) == 1
    assert collected(lambda results, mesh: (sum(results), mesh), [1, 2, 3, 4], DP2_TP2) == (10, DP2_TP2)
