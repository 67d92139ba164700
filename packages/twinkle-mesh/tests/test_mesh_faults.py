"""Faults that users of training frameworks have met in topology code, end to end. None of them may come back."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from twinkle_mesh import DeviceGroup, DeviceMesh, InvalidMeshError, Node, PlacementError, RankOutsideMeshError, plan_placement


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ({"world_size": 8, "dp_size": 4, "ep_size": 2}, 8),
        ({"world_size": 8, "dp_size": 2, "ep_size": 2, "ep_fsdp_size": 2}, 8),
        ({"world_size": 8, "dp_size": 2, "ulysses_size": 4}, 2),
    ],
)
def test_documented_examples_build_and_split_a_batch(sizes: dict[str, Any], shares: int) -> None:
    mesh = DeviceMesh.from_sizes(**sizes)
    batch = list(range(1001))
    parts = [batch[mesh.get_slice(len(batch), rank)] for rank in mesh.representatives()]
    assert len(parts) == shares
    assert [item for part in parts for item in part] == batch


@pytest.mark.parametrize("sizes", [{"tp_size": 4}, {"dp_size": None, "pp_size": 2, "cp_size": 2}, {"dp_size": None}])
def test_a_mesh_without_a_data_axis_has_one_share_of_everything(sizes: dict[str, Any]) -> None:
    mesh = DeviceMesh.from_sizes(**sizes)
    assert mesh.data_world_size == 1
    assert {mesh.get_slice(7, rank).stop - mesh.get_slice(7, rank).start for rank in range(mesh.world_size)} == {7}


@pytest.mark.parametrize("sizes", [{"dp_size": 8, "ep_size": 3}, {"world_size": 8, "dp_size": 8, "ep_fsdp_size": 3}, {"world_size": 8, "ep_size": 3}])
def test_an_expert_size_that_does_not_divide_is_refused_not_rounded(sizes: dict[str, Any]) -> None:
    with pytest.raises(InvalidMeshError, match="3"):
        DeviceMesh.from_sizes(**sizes)


def test_a_rank_outside_the_mesh_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2)
    for rank in (4, -1, np.int64(7)):
        with pytest.raises(RankOutsideMeshError, match=r"outside this mesh of 4 ranks \(0 to 3\)"):
            mesh.get_slice(8, rank)  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "6")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(RankOutsideMeshError, match="rank 6"):
        mesh.get_slice(8)


def test_every_rank_names_all_process_groups_in_one_order() -> None:
    """A rank that created only its own groups would leave the others waiting; so would another order."""
    program = (
        "from twinkle_mesh import DeviceMesh; m = DeviceMesh.from_sizes(dp_size=4, tp_size=2, pp_size=2, ep_size=4, etp_size=1)\n"
        "for axes in (['tp'], ['dp'], ['pp'], ['dp', 'tp']): print(m.rank_groups(*axes))\n"
        "for axes in (['ep'], ['expert_dp'], ['etp']): print(m.expert_rank_groups(*axes))"
    )
    printed: set[str] = set()
    for rank in (0, 7, 15):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "16", "PYTHONHASHSEED": str(rank)}
        printed.add(subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert len(printed) == 1
    assert sum(line.count("(") - 1 for line in printed.pop().splitlines()) == 8 + 4 + 8 + 2 + 4 + 8 + 16


@pytest.mark.timeout(60)
def test_rank_groups_of_a_hundred_thousand_ranks_take_no_more_than_a_walk_over_them() -> None:
    # Quadratic or cubic in the world size, this would take hours.
    mesh = DeviceMesh.from_sizes(dp_size=128, fsdp_size=8, tp_size=8, pp_size=16, ep_size=64, etp_size=1)
    assert mesh.world_size == 131_072
    for axis, size in mesh.axis_sizes().items():
        groups = mesh.rank_groups(axis)
        assert len(groups) * size == mesh.world_size
        assert groups[-1] == mesh.group_of(mesh.world_size - 1, axis)
    for axis, size in mesh.expert_axis_sizes().items():
        groups = mesh.expert_rank_groups(axis)
        assert len(groups) * size == mesh.world_size
        assert groups[-1] == mesh.expert_group_of(mesh.world_size - 1, axis)


def test_visible_devices_are_honoured_or_refused() -> None:
    uuids = ("GPU-8c1fab12-90ab", "GPU-77aa0001-0002")
    nodes = [Node("a", 2, 8, gpu_ids=uuids), Node("b", 4, 8)]
    by_uuid = plan_placement([DeviceGroup("g", 1, "cuda", visible_devices=uuids[1])], nodes)
    assert by_uuid.environment("g", 0) == {"CUDA_VISIBLE_DEVICES": uuids[1]}
    by_index = plan_placement([DeviceGroup("g", 2, "cuda", visible_devices="3,2")], nodes)
    assert [by_index.environment("g", rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["3", "2"]
    with pytest.raises(PlacementError, match="no node has the device"):
        plan_placement([DeviceGroup("g", 1, "cuda", visible_devices="9")], nodes)
    with pytest.raises(PlacementError, match="only 1 fit among visible_devices"):
        plan_placement([DeviceGroup("g", 2, "cuda", visible_devices=uuids[0])], nodes)
