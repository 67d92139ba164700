"""Our ranks are megatron-core's: compared with the source of its RankGenerator, for dense and for expert layers."""

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_ranks import ORDER, load_rank_generator

from twinkle_mesh import DeviceMesh


@pytest.fixture(scope="module")
def rank_generator() -> Any:
    generator = load_rank_generator()
    if generator is None:
        pytest.skip("megatron-core is not installed")
    return generator


def as_tuples(groups: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(group) for group in groups)


size = st.integers(1, 4)


@given(dp=size, fsdp=size, tp=size, pp=size, cp=size)
def test_dense_groups_and_data_ranks_equal_megatrons(rank_generator: Any, dp: int, fsdp: int, tp: int, pp: int, cp: int) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=dp, fsdp_size=fsdp, tp_size=tp, pp_size=pp, cp_size=cp)
    theirs = rank_generator(tp=tp, ep=1, dp=dp * fsdp, pp=pp, cp=cp, order=ORDER)
    assert mesh.world_size == theirs.world_size
    for token, axes in {
        "tp": ("tp",),
        "cp": ("cp",),
        "dp": ("dp", "fsdp"),
        "pp": ("pp",),
        "dp-cp": ("dp", "fsdp", "cp"),
        "tp-cp": ("tp", "cp"),
        "tp-pp": ("tp", "pp"),
        "tp-dp-cp": ("tp", "dp", "fsdp", "cp"),
    }.items():
        assert mesh.rank_groups(*axes) == as_tuples(theirs.get_ranks(token))
    for group in theirs.get_ranks("dp"):
        assert [mesh.data_rank(rank) for rank in group] == list(range(dp * fsdp))
    for group in theirs.get_ranks("pp"):
        assert [mesh.is_last_stage(rank) for rank in group] == [False] * (pp - 1) + [True]


@given(data=st.data(), dp=size, tp=size, pp=size, cp=size)
def test_expert_groups_equal_megatrons(rank_generator: Any, data: st.DataObject, dp: int, tp: int, pp: int, cp: int) -> None:
    stage = dp * tp * cp
    etp = data.draw(st.sampled_from([d for d in range(1, stage + 1) if stage % d == 0]))
    ep = data.draw(st.sampled_from([d for d in range(1, stage // etp + 1) if stage // etp % d == 0]))
    mesh = DeviceMesh.from_sizes(dp_size=dp, tp_size=tp, pp_size=pp, cp_size=cp, ep_size=ep, etp_size=etp)
    theirs = rank_generator(tp=etp, ep=ep, dp=stage // etp // ep, pp=pp, cp=1, order=ORDER)
    for token, axes in {
        "ep": ("ep",),
        "tp": ("etp",),
        "dp": ("expert_dp", "ep_fsdp"),
        "pp": ("pp",),
        "tp-ep": ("etp", "ep"),
        "tp-ep-pp": ("etp", "ep", "pp"),
    }.items():
        assert mesh.expert_rank_groups(*axes) == as_tuples(theirs.get_ranks(token))
    for group in theirs.get_ranks("dp"):
        assert [mesh.expert_coordinates(rank)["expert_dp"] for rank in group] == list(range(mesh.expert_dp_size))


@given(dp=size, tp=size, pp=size, ep=size, ep_fsdp=size)
def test_expert_axes_of_their_own_equal_megatrons_with_as_much_data_parallelism(
    rank_generator: Any, dp: int, tp: int, pp: int, ep: int, ep_fsdp: int
) -> None:
    world = prod((dp, tp, pp, ep, ep_fsdp))
    mesh = DeviceMesh.from_sizes(world_size=world, dp_size=dp, tp_size=tp, pp_size=pp, ep_size=ep, ep_fsdp_size=ep_fsdp)
    dense = rank_generator(tp=tp, ep=1, dp=dp * ep * ep_fsdp, pp=pp, cp=1, order=ORDER)
    for group in dense.get_ranks("dp"):
        assert [mesh.data_rank(rank) for rank in group] == list(range(mesh.data_world_size))
    expert = rank_generator(tp=tp, ep=ep, dp=dp * ep_fsdp, pp=pp, cp=1, order=ORDER)
    assert mesh.expert_rank_groups("ep") == as_tuples(expert.get_ranks("ep"))
    assert mesh.expert_rank_groups("expert_dp", "ep_fsdp") == as_tuples(expert.get_ranks("dp"))


def test_another_order_would_be_noticed(rank_generator: Any) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2, pp_size=2)
    theirs = rank_generator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-cp-ep-pp-dp")
    assert mesh.rank_groups("dp") != as_tuples(theirs.get_ranks("dp"))
    assert [mesh.data_rank(rank) for rank in theirs.get_ranks("dp")[0]] != [0, 1]
