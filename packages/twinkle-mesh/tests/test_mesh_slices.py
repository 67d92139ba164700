import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_mesh import DeviceMesh, InvalidMeshError


@given(data=st.data(), n=st.integers(0, 500))
def test_slices_partition_any_batch_over_any_mesh(meshes: st.SearchStrategy[DeviceMesh], data: st.DataObject, n: int) -> None:
    mesh = data.draw(meshes)
    batch = list(range(n))
    slices = [mesh.get_slice(n, rank) for rank in mesh.representatives()]
    assert [item for part in slices for item in batch[part]] == batch
    lengths = [len(batch[part]) for part in slices]
    assert max(lengths) - min(lengths) <= 1
    assert sum(lengths) == n


def every_mesh(world_size: int) -> Iterator[DeviceMesh]:
    """Every mesh of this size: all ways to write it as a product over the six dense axes, and all expert axes of their own."""
    names = ("pp_size", "dp_size", "fsdp_size", "cp_size", "ulysses_size", "tp_size", "ep_size", "ep_fsdp_size")

    def factors(rest: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (rest,)
            return
        for size in range(1, rest + 1):
            if rest % size == 0:
                yield from ((size, *others) for others in factors(rest // size, axes - 1))

    for sizes in factors(world_size, len(names)):
        yield DeviceMesh.from_sizes(world_size=world_size, etp_size=1, **dict(zip(names, sizes, strict=True)))


@pytest.mark.parametrize("world_size", range(1, 17))
def test_slices_partition_every_batch_over_every_mesh_of_up_to_sixteen_ranks(world_size: int) -> None:
    for mesh in every_mesh(world_size):
        readers: dict[int, int] = {}
        for rank in range(world_size):
            readers.setdefault(mesh.data_rank(rank), rank)
        assert sorted(readers) == list(range(mesh.data_world_size))
        for n in range(2 * world_size + 2):
            slices = [mesh.get_slice(n, readers[data_rank]) for data_rank in range(mesh.data_world_size)]
            assert slices[0].start == 0
            assert slices[-1].stop == n
            assert all(left.stop == right.start for left, right in itertools.pairwise(slices))
            lengths = [part.stop - part.start for part in slices]
            assert max(lengths) - min(lengths) <= 1
            assert min(lengths) >= 0


@given(data=st.data(), n=st.integers(0, 100))
def test_peers_that_differ_only_in_model_axes_read_the_same_slice(meshes: st.SearchStrategy[DeviceMesh], data: st.DataObject, n: int) -> None:
    mesh = data.draw(meshes)
    for peers in mesh.rank_groups("pp", "cp", "ulysses", "tp"):
        assert len({mesh.data_rank(rank) for rank in peers}) == 1
        assert len({(part.start, part.stop) for part in (mesh.get_slice(n, rank) for rank in peers)}) == 1


@given(data=st.data())
def test_data_ranks_count_the_data_axes_in_order(meshes: st.SearchStrategy[DeviceMesh], data: st.DataObject) -> None:
    mesh = data.draw(meshes)
    data_axes = [axis for axis in mesh.axis_sizes() if axis not in ("pp", "cp", "ulysses", "tp")]
    assert data_axes[0] == "dp"
    for peers in mesh.rank_groups(*data_axes):
        assert [mesh.data_rank(rank) for rank in peers] == list(range(mesh.data_world_size))


@given(data=st.data())
def test_representatives_are_one_rank_a_data_rank_on_the_last_stage(meshes: st.SearchStrategy[DeviceMesh], data: st.DataObject) -> None:
    mesh = data.draw(meshes)
    chosen = mesh.representatives()
    assert [mesh.data_rank(rank) for rank in chosen] == list(range(mesh.data_world_size))
    for rank in chosen:
        where = mesh.coordinates(rank)
        assert where["pp"] == mesh.pp_size - 1
        assert where["tp"] == where["cp"] == where["ulysses"] == 0
        assert mesh.is_last_stage(rank)
    assert sum(mesh.is_last_stage(rank) for rank in range(mesh.world_size)) * mesh.pp_size == mesh.world_size


def test_a_slice_of_a_mesh_with_a_million_ranks_needs_no_walk_over_them() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2**40, tp_size=8, pp_size=2**20)
    last = mesh.world_size - 1
    assert mesh.get_slice(2**41 + 1, last) == slice(2**41 - 1, 2**41 + 1)
    assert mesh.get_slice(2**41 + 1, 0) == slice(0, 3)


def test_the_rank_defaults_to_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=4)
    assert mesh.get_slice(8) == slice(0, 2)
    monkeypatch.setenv("RANK", "2")
    assert mesh.get_slice(8) == slice(4, 6)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(ValueError, match="outside"):
        mesh.get_slice(8)


def test_a_negative_batch_is_refused() -> None:
    with pytest.raises(InvalidMeshError, match="-1 items"):
        DeviceMesh.from_sizes().get_slice(-1)
