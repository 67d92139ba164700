import itertools
import pickle
import warnings
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_mesh import DeviceGroup, InvalidMeshError, Node, PlacementError, PlacementPlan, RankOutsideMeshError, plan_placement

UUIDS = ("GPU-aa01", "GPU-aa02", "GPU-bb03", "GPU-cc04")


def cluster(*sizes: int, cpus: float = 64) -> list[Node]:
    return [Node(f"10.0.0.{i}", size, cpus) for i, size in enumerate(sizes)]


def where(plan: PlacementPlan, name: str) -> list[tuple[int, tuple[str, ...]]]:
    assert [slot.rank for slot in plan.workers[name]] == list(range(plan.groups[name].num_workers))
    return [(slot.node_index, slot.device_ids) for slot in plan.workers[name]]


def test_groups_with_a_number_of_ranks_have_devices_of_their_own() -> None:
    plan = plan_placement([DeviceGroup("actor", 2, "cuda"), DeviceGroup("sampler", 2, "cuda")], cluster(4))
    assert where(plan, "actor") == [(0, ("0",)), (0, ("1",))]
    assert where(plan, "sampler") == [(0, ("2",)), (0, ("3",))]
    assert plan.device_share("actor") == 1
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_groups_that_list_the_same_ranks_share_these_devices() -> None:
    groups = [DeviceGroup("actor", [4, 5], "cuda"), DeviceGroup("sampler", [5, 4], "cuda"), DeviceGroup("judge", [0], "cuda")]
    plan = plan_placement(groups, cluster(4, 4))
    assert where(plan, "actor") == [(1, ("0",)), (1, ("1",))]
    assert where(plan, "sampler") == [(1, ("1",)), (1, ("0",))]
    assert where(plan, "judge") == [(0, ("0",))]
    assert (plan.device_share("actor"), plan.device_share("sampler"), plan.device_share("judge")) == (0.5, 0.5, 1)


def test_listed_devices_are_kept_from_groups_that_only_count() -> None:
    plan = plan_placement([DeviceGroup("count", 2, "cuda"), DeviceGroup("list", [0, 2], "cuda")], cluster(4))
    assert where(plan, "count") == [(0, ("1",)), (0, ("3",))]
    assert list(plan.workers) == ["count", "list"]


def test_a_group_goes_whole_to_the_node_that_it_fills_best() -> None:
    plan = plan_placement([DeviceGroup("a", 3, "cuda"), DeviceGroup("b", 4, "cuda")], cluster(8, 4, 3))
    assert {node for node, _ in where(plan, "a")} == {2}
    assert {node for node, _ in where(plan, "b")} == {1}


def test_a_group_larger_than_a_node_takes_whole_nodes_first() -> None:
    plan = plan_placement([DeviceGroup("a", 20, "cuda")], cluster(2, 8, 8, 4))
    assert [node for node, _ in where(plan, "a")] == [1] * 8 + [2] * 8 + [3] * 4


def test_the_devices_of_a_worker_are_on_one_node() -> None:
    plan = plan_placement([DeviceGroup("a", 6, "cuda", gpus_per_worker=2)], cluster(3, 3, 3))
    assert where(plan, "a") == [(0, ("0", "1")), (1, ("0", "1")), (2, ("0", "1"))]
    with pytest.raises(PlacementError, match=r"'a' needs 3 worker\(s\) of 2 cuda device\(s\), but only 2 fit.*node 0 \(10.0.0.0\): 3 of 3 cuda"):
        plan_placement([DeviceGroup("a", 6, "cuda", gpus_per_worker=2)], cluster(3, 3))


def test_listed_devices_of_a_worker_on_two_nodes_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"worker 1 \(ranks \[3, 4\]\) are on more than one node"):
        plan_placement([DeviceGroup("a", [1, 2, 3, 4], "cuda", gpus_per_worker=2)], cluster(4, 4))


def test_groups_with_large_workers_are_placed_before_they_are_blocked() -> None:
    groups = [DeviceGroup("a", 3, "cuda"), DeviceGroup("b", 3, "cuda"), DeviceGroup("c", 2, "cuda", gpus_per_worker=2)]
    plan = plan_placement(groups, cluster(4, 4))
    assert list(plan.workers) == ["a", "b", "c"]
    assert len(where(plan, "c")[0][1]) == 2


def test_visible_devices_restrict_a_group_on_each_node_and_keep_their_order() -> None:
    plan = plan_placement([DeviceGroup("a", 2, "cuda", visible_devices="3,1")], cluster(4))
    assert where(plan, "a") == [(0, ("3",)), (0, ("1",))]
    assert plan.environment("a", 0) == {"CUDA_VISIBLE_DEVICES": "3"}
    assert {node for node, _ in where(plan_placement([DeviceGroup("a", 4, "cuda", visible_devices="3,1")], cluster(4, 4)), "a")} == {0, 1}


def test_visible_devices_are_the_nodes_own_ids_not_positions() -> None:
    node = Node("n", 2, 8, gpu_ids=(8, 9))
    plan = plan_placement([DeviceGroup("a", 2, "cuda", visible_devices="8,9")], [node])
    assert where(plan, "a") == [(0, ("8",)), (0, ("9",))]
    with pytest.raises(PlacementError, match=r"no node has the device\(s\) 0 of visible_devices='0'.*8 9"):
        plan_placement([DeviceGroup("a", 1, "cuda", visible_devices="0")], [node])


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("GPU-bb03", ["GPU-bb03"]), ("GPU-bb,GPU-aa02", ["GPU-bb03", "GPU-aa02"]), ("2,0", ["GPU-bb03", "GPU-aa01"])],
)
def test_uuids_are_found_whole_shortened_or_by_index(visible: str, expected: list[str]) -> None:
    plan = plan_placement([DeviceGroup("a", len(expected), "cuda", visible_devices=visible)], [Node("n", 4, 8, gpu_ids=UUIDS)])
    assert [slot.device_ids for slot in plan.workers["a"]] == [(device_id,) for device_id in expected]
    assert plan.environment("a", 0) == {"CUDA_VISIBLE_DEVICES": expected[0]}


def test_a_shortened_uuid_that_two_devices_begin_with_is_refused() -> None:
    with pytest.raises(PlacementError, match="GPU-aa of visible_devices"):
        plan_placement([DeviceGroup("a", 1, "cuda", visible_devices="GPU-aa")], [Node("n", 4, 8, gpu_ids=UUIDS)])


def test_a_group_larger_than_its_visible_devices_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"only 2 fit among visible_devices='0,1'.*2 of 4 cuda"):
        plan_placement([DeviceGroup("a", 4, "cuda", visible_devices="0,1")], cluster(4))


def test_a_listed_rank_that_visible_devices_leaves_out_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"lists rank 2, which is device 2 of node 0 .* leaves it out"):
        plan_placement([DeviceGroup("a", [1, 2], "cuda", visible_devices="0,1")], cluster(4))
    plan = plan_placement([DeviceGroup("a", [1, 0], "cuda", visible_devices="0,1")], cluster(4))
    assert where(plan, "a") == [(0, ("1",)), (0, ("0",))]


def test_a_group_whose_visible_devices_are_taken_is_told_by_whom() -> None:
    groups = [DeviceGroup("first", 2, "cuda", visible_devices="0,1"), DeviceGroup("second", 2, "cuda", visible_devices="0,1")]
    with pytest.raises(PlacementError, match=r"'second' .* Taken by first; groups share devices by listing the same ranks"):
        plan_placement(groups, cluster(4))


def test_mig_instances_are_placed_one_to_a_worker() -> None:
    parts = ("MIG-8c1f0000-01", "MIG-8c1f0000-02", "MIG-8c1f0000-03")
    node = Node("n", 3, 8, gpu_ids=parts)
    plan = plan_placement([DeviceGroup("a", 2, "cuda", visible_devices="MIG-8c1f0000-03,MIG-8c1f0000-01"), DeviceGroup("b", 1, "cuda")], [node])
    assert where(plan, "a") == [(0, (parts[2],)), (0, (parts[0],))]
    assert where(plan, "b") == [(0, (parts[1],))]
    assert plan.environment("a", 0) == {"CUDA_VISIBLE_DEVICES": parts[2]}
    # CUDA would show such a worker the first instance only.
    with pytest.raises(PlacementError, match=r"worker 0 would get MIG-8c1f0000-01 MIG-8c1f0000-02 on node 0 \(n\).*one MIG instance at most"):
        plan_placement([DeviceGroup("a", 2, "cuda", gpus_per_worker=2)], [node])
    mixed = Node("n", 3, 8, gpu_ids=("GPU-aa01", "GPU-aa02", parts[0]))
    assert where(plan_placement([DeviceGroup("a", 2, "cuda", gpus_per_worker=2)], [mixed]), "a") == [(0, ("GPU-aa01", "GPU-aa02"))]


def test_a_uuid_that_nodes_cannot_know_is_told_with_the_remedy() -> None:
    with pytest.raises(PlacementError, match=r"GPU-aa01.*know their devices by index only: name indices, or list UUIDs in CUDA_VISIBLE_DEVICES"):
        plan_placement([DeviceGroup("a", 1, "cuda", visible_devices="GPU-aa01")], cluster(4))
    with pytest.raises(PlacementError) as caught:
        plan_placement([DeviceGroup("a", 1, "cuda", visible_devices="GPU-zz")], [Node("n", 4, 8, gpu_ids=UUIDS)])
    assert "by index only" not in str(caught.value)


def test_uuids_of_several_nodes_choose_on_each_its_own() -> None:
    nodes = [Node("x", 2, 8, gpu_ids=UUIDS[:2]), Node("y", 2, 8, gpu_ids=UUIDS[2:])]
    plan = plan_placement([DeviceGroup("a", 3, "cuda", visible_devices="GPU-cc04,GPU-aa02,GPU-bb03")], nodes)
    # The node with most of them first; on a node the order that was asked for.
    assert where(plan, "a") == [(1, ("GPU-cc04",)), (1, ("GPU-bb03",)), (0, ("GPU-aa02",))]


def test_groups_of_every_kind_share_two_nodes() -> None:
    groups = [
        DeviceGroup("actor", 8, "cuda"),
        DeviceGroup("sampler", 4, "cuda", gpus_per_worker=2),
        DeviceGroup("judge", [12, 13], "cuda", gpus_per_worker=2),
        DeviceGroup("reference", [12, 13], "cuda"),
        DeviceGroup("debug", 1, "cuda", visible_devices="7"),
        DeviceGroup("data", 3, "cpu"),
    ]
    plan = plan_placement(groups, cluster(8, 8))
    assert list(plan.workers) == [group.name for group in groups]
    # The judge and the reference are on devices 4 and 5 of the second node and share them; all others are alone.
    assert where(plan, "judge") == [(1, ("4", "5"))]
    assert where(plan, "reference") == [(1, ("4",)), (1, ("5",))]
    assert [plan.device_share(group.name) for group in groups] == [1, 1, 0.5, 0.5, 1, 1]
    users = Counter((slot.node_index, device) for slots in plan.workers.values() for slot in slots for device in slot.device_ids)
    assert {place for place, count in users.items() if count > 1} == {(1, "4"), (1, "5")}
    assert where(plan, "debug")[0][1] == ("7",)
    assert plan.environment("sampler", 0)["CUDA_VISIBLE_DEVICES"].count(",") == 1
    assert [plan.environment("data", rank) for rank in range(3)] == [{}] * 3
    # Ranks ascend by node, so that neighbours are neighbours.
    for name in plan.workers:
        order = [node for node, _ in where(plan, name)]
        assert sum(left != right for left, right in itertools.pairwise(order)) == len(set(order)) - 1


@pytest.mark.parametrize(
    ("device_type", "variable"),
    [
        ("npu", "ASCEND_RT_VISIBLE_DEVICES"),
        ("xpu", "ZE_AFFINITY_MASK"),
        ("hpu", "HABANA_VISIBLE_MODULES"),
        ("mlu", "MLU_VISIBLE_DEVICES"),
        ("musa", "MUSA_VISIBLE_DEVICES"),
        ("rocm", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_other_accelerators_are_planned_with_their_variable(device_type: str, variable: str) -> None:
    nodes = [Node(f"n{i}", 4, 8, device_type=device_type) for i in range(2)]
    groups = [DeviceGroup("a", 4, device_type, gpus_per_worker=2), DeviceGroup("b", [6, 7], device_type), DeviceGroup("c", 1, device_type)]
    plan = plan_placement(groups, nodes)
    assert plan.environment("a", 1) == {variable: "2,3"}
    assert plan.environment("b", 0) == {variable: "2"}
    assert where(plan, "c") == [(1, ("0",))]


def test_npu_groups_go_to_npu_nodes_with_their_variable() -> None:
    nodes = [Node("gpu", 8, 8), Node("npu", 16, 8, device_type="NPU")]
    groups = [DeviceGroup("a", 2, "npu", visible_devices="8,9"), DeviceGroup("b", [0], "NPU"), DeviceGroup("c", 8, "cuda")]
    plan = plan_placement(groups, nodes)
    assert where(plan, "a") == [(1, ("8",)), (1, ("9",))]
    assert where(plan, "b") == [(1, ("0",))]
    assert {node for node, _ in where(plan, "c")} == {0}
    assert plan.environment("a", 1) == {"ASCEND_RT_VISIBLE_DEVICES": "9"}
    with pytest.raises(PlacementError, match=r"needs 1 npu devices, but no node has any: 1 node\(s\) with cuda"):
        plan_placement([DeviceGroup("a", 1, "npu")], nodes[:1])


def test_cpu_ranks_are_processes_that_reserve_a_little_of_a_core() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_placement([DeviceGroup("a", 2, "cpu"), DeviceGroup("b", 2, "CPU")], cluster(0, cpus=4))
    assert where(plan, "a") == where(plan, "b") == [(0, ()), (0, ())]
    assert {slot.num_cpus for slots in plan.workers.values() for slot in slots} == {0.01}
    assert plan.environment("a", 0) == {}
    assert plan.device_share("a") == 1


def test_more_cpu_ranks_than_cores_warn_and_more_than_eight_a_core_are_refused() -> None:
    with pytest.warns(UserWarning, match="16 CPU processes share 2 cores") as caught:
        plan = plan_placement([DeviceGroup("a", 8, "cpu"), DeviceGroup("b", 8, "cpu")], cluster(0, cpus=2))
    assert caught[0].filename == __file__  # the caller's line, not ours
    assert len(plan.workers["b"]) == 8
    with pytest.raises(PlacementError, match=r"'b' needs 9 CPU processes, but only 8 more fit on 2 cores.*2 cores, 8 processes, room for 8"):
        plan_placement([DeviceGroup("a", 8, "cpu"), DeviceGroup("b", 9, "cpu")], cluster(0, cpus=2))


def test_cpu_ranks_fill_every_core_once_before_any_has_two() -> None:
    with pytest.warns(UserWarning, match="share"):
        plan = plan_placement([DeviceGroup("a", 9, "cpu")], [Node("small", 0, 2), Node("large", 0, 4)])
    assert Counter(node for node, _ in where(plan, "a")) == {0: 2, 1: 7}


def test_reservations_never_exceed_a_nodes_cores() -> None:
    plan = plan_placement([DeviceGroup("a", 4, "cpu")], [Node("x", 0, 2), Node("y", 0, 2)], cpus_per_rank=1)
    assert Counter(node for node, _ in where(plan, "a")) == {0: 2, 1: 2}
    with pytest.raises(PlacementError, match="each reserving cpus_per_rank=1"):
        plan_placement([DeviceGroup("a", 5, "cpu")], [Node("x", 0, 2), Node("y", 0, 2)], cpus_per_rank=1)
    with pytest.raises(PlacementError, match=r"lack cores.*lower cpus_per_rank"):
        plan_placement([DeviceGroup("a", 4, "cuda")], cluster(4, cpus=2), cpus_per_rank=1)
    with pytest.raises(PlacementError, match="lower cpus_per_rank"):
        plan_placement([DeviceGroup("a", [0, 1, 2, 3], "cuda")], cluster(4, cpus=2), cpus_per_rank=1)


def test_a_listed_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"lists the cuda device 9, but there are 8 \(0 to 7\)"):
        plan_placement([DeviceGroup("a", [0, 9], "cuda")], cluster(4, 4))


def test_a_long_cluster_is_shortened_in_errors() -> None:
    with pytest.raises(PlacementError) as caught:
        plan_placement([DeviceGroup("a", 9000, "cuda")], cluster(*[8] * 1000))
    assert "and 992 more nodes" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_arguments_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidMeshError, match="two device groups are named 'a'"):
        plan_placement([DeviceGroup("a", 1, "cpu"), DeviceGroup("a", 1, "cpu")], cluster(0))
    with pytest.raises(PlacementError, match="no nodes"):
        plan_placement([DeviceGroup("a", 1, "cpu")], [])
    for cpus in (0, -1, float("nan")):
        with pytest.raises(InvalidMeshError, match="cpus_per_rank"):
            plan_placement([DeviceGroup("a", 1, "cpu")], cluster(0), cpus_per_rank=cpus)
    with pytest.raises(InvalidMeshError, match="not as many different ids"):
        Node("n", 2, 4, gpu_ids=("0",))
    with pytest.raises(InvalidMeshError, match="negative"):
        Node("n", -1, 4)
    plan = plan_placement([DeviceGroup("a", 1, "cpu")], cluster(0))
    with pytest.raises(InvalidMeshError, match="no device group 'b'; there are a"):
        plan.environment("b", 0)
    with pytest.raises(RankOutsideMeshError, match="group 'a' of 1 workers"):
        plan.environment("a", 1)


@given(
    sizes=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    wanted=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 3, 4])), min_size=1, max_size=4),
)
def test_a_plan_is_sound_and_one_is_found_whenever_single_devices_suffice(sizes: list[int], wanted: list[tuple[int, int]]) -> None:
    groups = [DeviceGroup(f"g{i}", workers * size, "cuda", gpus_per_worker=size) for i, (workers, size) in enumerate(wanted)]
    try:
        plan = plan_placement(groups, cluster(*sizes))
    except PlacementError:
        # One group fails only for want of devices or because its workers do not fit the nodes.
        fits = sum(size // groups[0].gpus_per_worker for size in sizes) >= groups[0].num_workers
        assert not (fits and len(groups) == 1)
        assert sum(group.num_devices for group in groups) > sum(sizes) or any(group.gpus_per_worker > 1 for group in groups)
        return
    assert plan == plan_placement(groups, cluster(*sizes))
    used = [(slot.node_index, device) for slots in plan.workers.values() for slot in slots for device in slot.device_ids]
    assert len(used) == len(set(used)) == sum(group.num_devices for group in groups)
    for group in groups:
        assert len(where(plan, group.name)) == group.num_workers
        for slot in plan.workers[group.name]:
            assert len(slot.device_ids) == group.gpus_per_worker
            assert all(int(device) < sizes[slot.node_index] for device in slot.device_ids)


def test_a_plan_for_sixteen_thousand_devices_is_right() -> None:
    nodes = cluster(*[8] * 2048)
    groups = [
        DeviceGroup("actor", 8192, "cuda"),
        DeviceGroup("sampler", 4096, "cuda", gpus_per_worker=8),
        DeviceGroup("judge", list(range(12288, 16384)), "cuda"),
        DeviceGroup("reference", list(range(16383, 12287, -1)), "cuda", gpus_per_worker=4),
    ]
    plan = plan_placement(groups, nodes)
    used = Counter((slot.node_index, device) for slots in plan.workers.values() for slot in slots for device in slot.device_ids)
    assert len(used) == 16384
    assert all(count == (2 if node >= 1536 else 1) for (node, _), count in used.items())
    assert where(plan, "judge")[-1] == (2047, ("7",)) == (where(plan, "reference")[0][0], where(plan, "reference")[0][1][:1])
    assert all(len(set(slot.device_ids)) == 8 for slot in plan.workers["sampler"])
    # Every 8 ranks of the actor are one whole node.
    nodes_of_actor = [node for node, _ in where(plan, "actor")]
    assert all(len(set(nodes_of_actor[start : start + 8])) == 1 for start in range(0, 8192, 8))
    assert (plan.device_share("actor"), plan.device_share("judge")) == (1, 0.5)
