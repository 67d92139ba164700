import pickle
from typing import Any

import pytest

from twinkle_mesh import DeviceMesh, InvalidMeshError, RankOutsideMeshError


@pytest.mark.parametrize(
    ("sizes", "data_world_size"),
    [
        ({"dp_size": 4}, 4),
        ({"dp_size": 2, "pp_size": 2, "tp_size": 2}, 2),
        ({"world_size": 8, "dp_size": 4, "ep_size": 2}, 8),
        ({"world_size": 8, "dp_size": 2, "ep_size": 2, "ep_fsdp_size": 2}, 8),
        ({"world_size": 8, "dp_size": 2, "ulysses_size": 4}, 2),
    ],
)
def test_every_documented_mesh_builds(sizes: dict[str, Any], data_world_size: int) -> None:
    mesh = DeviceMesh.from_sizes(**sizes)
    assert mesh.world_size == sizes.get("world_size", mesh.world_size)
    assert mesh.data_world_size == data_world_size
    assert {mesh.data_rank(rank) for rank in range(mesh.world_size)} == set(range(data_world_size))


def test_without_arguments_the_mesh_is_one_rank() -> None:
    mesh = DeviceMesh.from_sizes()
    assert (mesh.world_size, mesh.data_world_size, mesh.get_slice(5)) == (1, 1, slice(0, 5))


def test_sizes_left_out_are_one_and_multiply_to_the_world_size() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=3, pp_size=4)
    assert mesh.world_size == 24
    assert (mesh.fsdp_size, mesh.cp_size, mesh.ulysses_size, mesh.ep_size, mesh.ep_fsdp_size, mesh.vpp_size) == (1, 1, 1, 1, 1, None)


@pytest.mark.parametrize("dp_size", [None, 1])
def test_a_mesh_without_dp_has_the_data_ranks_of_its_other_data_axes(dp_size: int | None) -> None:
    assert DeviceMesh.from_sizes(dp_size=dp_size, tp_size=4).data_world_size == 1
    assert DeviceMesh.from_sizes(dp_size=dp_size, tp_size=4).get_slice(7, 3) == slice(0, 7)
    assert DeviceMesh.from_sizes(dp_size=dp_size, fsdp_size=4).data_world_size == 4


def test_expert_axes_fold_into_the_others_when_the_dense_sizes_fill_the_world() -> None:
    mesh = DeviceMesh.from_sizes(world_size=8, dp_size=8, ep_size=2, ep_fsdp_size=2)
    assert not mesh.extra_expert_axes
    assert mesh.data_world_size == 8
    assert mesh.expert_axis_sizes() == {"pp": 1, "expert_dp": 2, "ep_fsdp": 2, "ep": 2, "etp": 1}
    assert "ep" not in mesh.coordinates(0)


def test_extra_expert_axes_leave_dp_size_as_the_replicas_of_an_expert_group() -> None:
    mesh = DeviceMesh.from_sizes(world_size=8, dp_size=2, ep_size=2, ep_fsdp_size=2)
    assert mesh.extra_expert_axes
    assert mesh.expert_dp_size == mesh.dp_size == 2
    assert mesh.coordinates(5) == {"pp": 0, "dp": 1, "ep_fsdp": 0, "ep": 1, "fsdp": 0, "cp": 0, "ulysses": 0, "tp": 0}
    # ep is the fastest: token exchange stays between neighbours.
    assert mesh.expert_rank_groups("ep") == ((0, 1), (2, 3), (4, 5), (6, 7)) == mesh.rank_groups("ep")


def test_expert_tensor_parallel_size_follows_tp_unless_it_is_set() -> None:
    assert DeviceMesh.from_sizes(dp_size=2, tp_size=2, ep_size=2).etp_size == 2
    assert DeviceMesh.from_sizes(dp_size=2, tp_size=2, ep_size=4, etp_size=1).expert_dp_size == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 8, "dp_size": 8, "ep_size": 3}, "ep 3"),
        ({"world_size": 8, "dp_size": 4, "ep_size": 3}, r"world_size=8 is not .*dp 4 .* = 4, nor x ep_fsdp 1 x ep 3 = 12"),
        ({"world_size": 8, "dp_size": 2}, "= 2; a factor of 4 is missing: dp_size=8 would fill it, or an axis that was left out"),
        ({"world_size": 8}, "= 1; a factor of 8 is missing: dp_size=8 would fill it"),
        ({"world_size": 16, "dp_size": 2, "tp_size": 2}, "a factor of 4 is missing: dp_size=8"),
        (
            {"world_size": 16, "dp_size": 2, "ep_size": 2},
            r"a factor of 8 is missing: dp_size=16 .* \(of 4, dp_size=8, where ep_fsdp and ep are axes of their own\)",
        ),
        ({"world_size": 4, "dp_size": 8}, "= 8; dp_size=4 would fill it"),
        ({"world_size": 8, "dp_size": 3}, "dp_size=8 would fill it"),
        ({"world_size": 8, "tp_size": 3}, "3 .* does not divide it"),
        ({"world_size": 8, "dp_size": 4, "ep_size": 2, "ep_fsdp_size": 2}, "= 16"),
        ({"tp_size": 4, "ep_size": 4}, "etp_size=1"),
        ({"world_size": 8, "dp_size": 4, "ep_size": 2, "etp_size": 3}, "etp 3"),
        ({"dp_size": 0}, "dp_size=0"),
        ({"tp_size": -1}, "tp_size=-1"),
        ({"tp_size": 2.0}, "tp_size=2.0"),
        ({"tp_size": True}, "tp_size=True"),
        ({"world_size": 0}, "world_size=0"),
        ({"vpp_size": 2}, "pp_size >= 2"),
        ({"pp_size": 2, "vpp_size": 0}, "vpp_size=0"),
        ({"device_type": "gpuu"}, "known are"),
    ],
)
def test_sizes_that_do_not_fit_are_a_value_error_that_says_why(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeviceMesh.from_sizes(**sizes)


def test_a_mesh_built_without_from_sizes_is_checked_too() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=4)
    sizes = {name: getattr(mesh, name) for name in mesh.__dataclass_fields__}
    assert DeviceMesh(**sizes) == mesh
    with pytest.raises(InvalidMeshError, match="world_size=3"):
        DeviceMesh(**{**sizes, "world_size": 3})


def test_one_virtual_stage_is_none() -> None:
    assert DeviceMesh.from_sizes(pp_size=2, vpp_size=1).vpp_size is None
    assert DeviceMesh.from_sizes(pp_size=2, vpp_size=2).vpp_size == 2


def test_sequence_parallel_without_tensor_parallel_warns_and_is_off() -> None:
    with pytest.warns(UserWarning, match="no effect"):
        mesh = DeviceMesh.from_sizes(dp_size=2, sequence_parallel=True)
    assert not mesh.sequence_parallel
    assert DeviceMesh.from_sizes(tp_size=2, sequence_parallel=True).sequence_parallel


def test_a_mesh_is_immutable_hashable_and_pickles() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2)
    with pytest.raises(AttributeError):
        mesh.dp_size = 4  # type: ignore[misc]
    assert {mesh: 1}[DeviceMesh.from_sizes(tp_size=2, dp_size=2)] == 1
    assert pickle.loads(pickle.dumps(mesh)) == mesh


def test_device_types_are_named_as_torch_does() -> None:
    mesh = DeviceMesh.from_sizes(device_type="GPU")
    assert mesh.device_type == "cuda"
    assert mesh.with_device_type("NPU").device_type == "npu"
    assert mesh.with_device_type("cpu") == DeviceMesh.from_sizes(device_type="cpu")


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_mesh_is_refused_everywhere(rank: int) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=4, tp_size=2)
    calls = (
        mesh.data_rank,
        mesh.coordinates,
        mesh.expert_coordinates,
        mesh.is_last_stage,
        lambda r: mesh.get_slice(8, r),
        lambda r: mesh.group_of(r, "tp"),
        lambda r: mesh.expert_group_of(r, "ep"),
    )
    for call in calls:
        with pytest.raises(RankOutsideMeshError, match="outside"):
            call(rank)
