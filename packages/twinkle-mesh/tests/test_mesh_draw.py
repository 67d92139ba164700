import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_mesh import DeviceGroup, DeviceMesh, InvalidMeshError, Node, draw_topology, plan_placement


def test_a_mesh_draws_its_sizes_and_its_ranks() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, pp_size=2, tp_size=4, ep_size=2, etp_size=1, vpp_size=2, sequence_parallel=True, device_type="cpu")
    assert mesh.draw().splitlines() == [
        "16 ranks on cpu: pp 2 x dp 2 x tp 4, 2 virtual stages a rank, sequence parallel",
        "  experts: expert_dp 4 x ep 2",
        "           stage 0   stage 1",
        "  data 0   0-3       8-11",
        "  data 1   4-7       12-15",
    ]


def test_a_single_rank_draws_as_one_row() -> None:
    assert DeviceMesh.from_sizes(device_type="cpu").draw() == "1 rank on cpu\n  data 0   0"


def test_axes_that_share_a_row_or_a_cell_are_told_with_their_order() -> None:
    drawn = DeviceMesh.from_sizes(dp_size=2, fsdp_size=3, cp_size=2, tp_size=2, device_type="cpu").draw()
    assert drawn.splitlines()[:2] == [
        "24 ranks on cpu: dp 2 x fsdp 3 x cp 2 x tp 2",
        "  data rank is dp 2 x fsdp 3; cell is cp 2 x tp 2 (the last is the fastest)",
    ]
    own = DeviceMesh.from_sizes(world_size=8, dp_size=2, ep_size=2, ep_fsdp_size=2).draw()
    assert "data rank is dp 2 x ep_fsdp 2 x ep 2 (the last is the fastest)" in own


def test_a_large_mesh_shows_its_first_and_last_data_ranks_and_stages() -> None:
    lines = DeviceMesh.from_sizes(dp_size=64, pp_size=16, tp_size=4).draw().splitlines()
    assert lines[1].split() == ["stage", "0", "stage", "1", "stage", "2", "stage", "3", "stage", "4", "stage", "5", "...", "stage", "15"]
    assert lines[-2] == "  ... 57 more data ranks"
    assert lines[-1].split() == ["data", "63", "252-255", "508-511", "764-767", "1020-1023", "1276-1279", "1532-1535", "...", "4092-4095"]
    assert len(lines) == 10


@given(data=st.data())
def test_what_is_drawn_of_any_mesh_is_what_its_ranks_say(meshes: st.SearchStrategy[DeviceMesh], data: st.DataObject) -> None:
    mesh = data.draw(meshes)
    drawn = mesh.draw()
    assert drawn.isascii()
    rows = re.findall(r"^  data (\d+) +(\S.*)$", drawn, re.MULTILINE)
    assert int(rows[-1][0]) == mesh.data_world_size - 1
    assert len(rows) + sum(int(n) for n in re.findall(r"\.\.\. (\d+) more", drawn)) == mesh.data_world_size
    for data_rank, cells in rows:
        first, last = re.split(r" {3,}", cells)[0], re.split(r" {3,}", cells)[-1]
        for cell, stage in ((first, 0), (last, mesh.pp_size - 1)):
            for rank in (int(number) for number in re.findall(r"\d+", cell)):
                assert mesh.data_rank(rank) == int(data_rank)
                assert mesh.coordinates(rank)["pp"] == stage


def test_a_topology_draws_groups_nodes_meshes_and_the_way_of_a_batch() -> None:
    groups = [DeviceGroup("rollout", 4, "cpu"), DeviceGroup("train", 4, "cuda")]
    components = [
        ("sampler", "rollout", None),
        ("model", "train", DeviceMesh.from_sizes(dp_size=2, pp_size=2)),
    ]
    plan = plan_placement(groups, [Node("10.0.0.1", 4, 8)])
    assert draw_topology(groups, components, plan).splitlines() == [
        "+- group rollout: 4 cpu workers -+",
        "| node 0 (10.0.0.1): workers 0-3 |",
        "|                                |",
        "| sampler: 4 ranks on cpu: dp 4  |",
        "|   data 0   0                   |",
        "|   data 1   1                   |",
        "|   data 2   2                   |",
        "|   data 3   3                   |",
        "+--------------------------------+",
        "",
        "+- group train: 4 cuda devices, 4 workers ----+",
        "| node 0 (10.0.0.1): workers 0-3, devices 0-3 |",
        "|                                             |",
        "| model: 4 ranks on cuda: pp 2 x dp 2         |",
        "|            stage 0   stage 1                |",
        "|   data 0   0         2                      |",
        "|   data 1   1         3                      |",
        "+---------------------------------------------+",
        "",
        "the way of a batch",
        "  driver",
        "    | split in 4",
        "    v",
        "  sampler",
        "    | taken from ranks 0-3; split in 2",
        "    v",
        "  model",
        "    | taken from ranks 2 3",
        "    v",
        "  driver",
    ]


def test_every_line_of_a_box_is_equally_wide_and_ascii() -> None:
    groups = [DeviceGroup("a", 2, "cuda", visible_devices="GPU-aa,GPU-bb"), DeviceGroup("b", 1, "cpu")]
    plan = plan_placement(groups, [Node("a-rather-long-host-name.example", 2, 8, gpu_ids=("GPU-aa01", "GPU-bb02"))])
    drawn = draw_topology(groups, [], plan)
    assert drawn.isascii()
    for box in drawn.split("\n\n"):
        assert len({len(line) for line in box.splitlines()}) == 1
    assert "devices GPU-aa01 GPU-bb02" in drawn
    assert "only devices GPU-aa,GPU-bb" in drawn
    assert "the way" not in drawn


def test_a_group_on_many_nodes_is_shortened() -> None:
    groups = [DeviceGroup("a", 800, "cuda")]
    drawn = draw_topology(groups, [("model", "a", None)], plan_placement(groups, [Node(f"n{i}", 8, 8) for i in range(100)]))
    assert "... 93 more nodes" in drawn
    assert "taken from ranks 0-7 ..." in drawn
    assert len(drawn.splitlines()) < 40


def test_many_groups_components_and_long_ids_are_shortened() -> None:
    groups = [DeviceGroup(f"g{i}", 8, "cuda", gpus_per_worker=8) for i in range(100)]
    nodes = [Node(f"n{i}", 8, 8, gpu_ids=[f"GPU-8c1fab12-0000-4000-a000-{i:06d}{j:06d}" for j in range(8)]) for i in range(100)]
    drawn = draw_topology(groups, [(f"c{i}", f"g{i}", None) for i in range(100)], plan_placement(groups, nodes))
    assert "... 89 more groups" in drawn
    assert "group g99" in drawn
    assert "\n  c99\n" in drawn
    assert "devices GPU-8c1f..0000 GPU-8c1f..0001 ... GPU-8c1f..0007" in drawn
    assert max(map(len, drawn.splitlines())) < 120
    assert len(drawn.splitlines()) < 150


def test_a_component_whose_mesh_does_not_fit_its_group_is_refused() -> None:
    groups = [DeviceGroup("a", 4, "cpu")]
    with pytest.raises(InvalidMeshError, match=r"'m' has a mesh of 2 ranks, but device group 'a' has 4 workers"):
        draw_topology(groups, [("m", "a", DeviceMesh.from_sizes(dp_size=2))])
    with pytest.raises(InvalidMeshError, match=r"'m' is on device group 'b'; there are a"):
        draw_topology(groups, [("m", "b", None)])
