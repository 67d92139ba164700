import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_mesh import DeviceMesh, InvalidMeshError


def draw_axes(data: st.DataObject, axes: list[str]) -> tuple[str, ...]:
    return tuple(data.draw(st.lists(st.sampled_from(axes), unique=True)))


@given(data=st.data())
def test_rank_groups_partition_the_ranks_in_order(meshes: st.SearchStrategy[DeviceMesh], data: st.DataObject) -> None:
    mesh = data.draw(meshes)
    dense = mesh.rank_groups(*draw_axes(data, list(mesh.axis_sizes())))
    expert = mesh.expert_rank_groups(*draw_axes(data, list(mesh.expert_axis_sizes())))
    for groups in (dense, expert):
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert [group[0] for group in groups] == sorted(min(group) for group in groups)
        assert all(list(group) == sorted(group) for group in groups)
        assert len({len(group) for group in groups}) == 1


@given(data=st.data())
def test_a_group_varies_along_its_axes_and_no_other(meshes: st.SearchStrategy[DeviceMesh], data: st.DataObject) -> None:
    mesh = data.draw(meshes)
    axes = draw_axes(data, list(mesh.axis_sizes()))
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    group = mesh.group_of(rank, *axes)
    assert group in mesh.rank_groups(*axes)
    assert rank in group
    here = mesh.coordinates(rank)
    expected = [
        other for other in range(mesh.world_size) if all(mesh.coordinates(other)[axis] == at for axis, at in here.items() if axis not in axes)
    ]
    assert list(group) == expected


@given(data=st.data())
def test_an_expert_group_varies_along_its_axes_and_no_other(meshes: st.SearchStrategy[DeviceMesh], data: st.DataObject) -> None:
    mesh = data.draw(meshes)
    axes = draw_axes(data, list(mesh.expert_axis_sizes()))
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    group = mesh.expert_group_of(rank, *axes)
    assert group in mesh.expert_rank_groups(*axes)
    here = mesh.expert_coordinates(rank)
    expected = [other for other in range(mesh.world_size) if all(mesh.expert_coordinates(other)[a] == at for a, at in here.items() if a not in axes)]
    assert list(group) == expected


@given(data=st.data())
def test_coordinates_number_the_ranks(meshes: st.SearchStrategy[DeviceMesh], data: st.DataObject) -> None:
    mesh = data.draw(meshes)
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    for where, sizes in ((mesh.coordinates(rank), mesh.axis_sizes()), (mesh.expert_coordinates(rank), mesh.expert_axis_sizes())):
        assert list(where) == list(sizes)
        number = 0
        for axis, size in sizes.items():
            assert 0 <= where[axis] < size
            number = number * size + where[axis]
        assert number == rank


def test_extra_expert_axes_agree_with_the_dense_ones_where_nothing_lies_between() -> None:
    mesh = DeviceMesh.from_sizes(world_size=48, dp_size=2, ep_size=2, ep_fsdp_size=3, tp_size=2, pp_size=2)
    for dense, expert in (("dp", "expert_dp"), ("ep_fsdp", "ep_fsdp"), ("ep", "ep"), ("tp", "etp"), ("pp", "pp")):
        assert mesh.rank_groups(dense) == mesh.expert_rank_groups(expert)


def test_every_rank_computes_the_same_groups_in_the_same_order() -> None:
    # In processes of their own: a cache or a hash seed must not matter.
    program = (
        "from twinkle_mesh import DeviceMesh; m = DeviceMesh.from_sizes(dp_size=2, tp_size=2, cp_size=2, pp_size=2, ep_size=2, etp_size=1); "
        "print(m.rank_groups('tp', 'dp'), m.rank_groups('dp', 'tp'), m.expert_rank_groups('ep'))"
    )
    outputs: set[str] = set()
    for rank in range(3):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "16", "PYTHONHASHSEED": str(rank)}
        result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True)
        outputs.add(result.stdout)
    assert len(outputs) == 1


def test_groups_of_no_axis_are_single_ranks() -> None:
    assert DeviceMesh.from_sizes(dp_size=3).rank_groups() == ((0,), (1,), (2,))


def test_groups_of_sixteen_thousand_ranks_are_right() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=128, tp_size=8, pp_size=16)
    groups = mesh.rank_groups("dp")
    assert len(groups) == 128
    assert groups[0] == tuple(range(0, 1024, 8))
    assert groups[-1] == tuple(range(16384 - 1024 + 7, 16384, 8)) == mesh.group_of(16383, "dp")


def test_an_axis_that_is_not_there_is_named_with_those_that_are() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=4, ep_size=2)
    with pytest.raises(InvalidMeshError, match=r"no axis 'ep' here; the axes are pp, dp, fsdp, cp, ulysses, tp; 'ep' is .*expert_rank_groups"):
        mesh.rank_groups("ep")
    with pytest.raises(InvalidMeshError, match="the axes are pp, expert_dp, ep_fsdp, ep, etp"):
        mesh.expert_rank_groups("tp")
    with pytest.raises(InvalidMeshError, match="twice"):
        mesh.rank_groups("dp", "dp")
