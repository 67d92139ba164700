"""DeviceMeshSampler and DataLoader: slices, order, resuming, refusals, and the loader on Ray."""

import importlib.util
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_data import DataLoader, Dataset, DatasetError, DeviceMeshSampler, LoaderStateError
from twinkle_mesh import DeviceGroup, DeviceMesh
from twinkle_remote import initialize

sizes = st.integers(1, 3)
meshes = st.builds(
    DeviceMesh.from_sizes, dp_size=sizes, fsdp_size=sizes, tp_size=st.integers(1, 2), pp_size=st.integers(1, 2), cp_size=st.integers(1, 2)
)


def drawn(sampler):
    return [batch.tolist() for batch in sampler]


@settings(deadline=None, max_examples=60)
@given(mesh=meshes, data=st.data(), shuffle=st.booleans(), seed=st.integers(0, 9))
def test_the_data_ranks_slices_partition_every_global_batch_in_order(mesh, data, shuffle, seed):
    batch_size = data.draw(st.integers(mesh.data_world_size, 3 * mesh.data_world_size))
    options = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "num_epochs": 2}
    num_rows = data.draw(st.integers(batch_size, 4 * batch_size))
    whole = drawn(DeviceMeshSampler(num_rows, **options))
    ranks = [drawn(DeviceMeshSampler(num_rows, device_mesh=mesh, rank=rank, **options)) for rank in range(mesh.world_size)]
    for step, batch in enumerate(whole):
        assert [row for rank in mesh.representatives() for row in ranks[rank][step]] == batch
        lengths = {len(slices[step]) for slices in ranks}
        assert max(lengths) - min(lengths) <= 1
    for rank, slices in enumerate(ranks):
        assert slices == ranks[mesh.representatives()[mesh.data_rank(rank)]]


@settings(deadline=None)
@given(num_rows=st.integers(1, 30), batch_size=st.integers(1, 8), shuffle=st.booleans(), drop_last=st.booleans(), data=st.data())
def test_resuming_anywhere_equals_not_having_stopped(num_rows, batch_size, shuffle, drop_last, data):
    if drop_last and num_rows < batch_size:
        return
    options = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last, "num_epochs": 3}
    whole = list(DataLoader(list(range(num_rows)), **options))
    stop = data.draw(st.integers(0, len(whole)))
    first = DataLoader(list(range(num_rows)), **options)
    seen = [batch for _, batch in zip(range(stop), first, strict=False)]
    second = DataLoader(list(range(num_rows)), **options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert seen + list(second) == whole
    assert list(second) == whole, "a second iteration begins at the beginning"


def test_every_epoch_has_all_rows_in_another_order():
    batches = list(DataLoader(range(64), batch_size=16, shuffle=True, num_epochs=2))
    first, second = ([row for batch in half for row in batch] for half in (batches[:4], batches[4:]))
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second
    assert first != list(range(64))
    assert batches == list(DataLoader(range(64), batch_size=16, shuffle=True, num_epochs=2))
    assert batches != list(DataLoader(range(64), batch_size=16, shuffle=True, num_epochs=2, seed=1))


def test_the_last_partial_batch_is_dropped_or_kept():
    assert list(DataLoader(range(5), batch_size=2)) == [[0, 1], [2, 3]]
    assert list(DataLoader(range(5), batch_size=2, drop_last=False)) == [[0, 1], [2, 3], [4]]
    assert len(DataLoader(range(5), batch_size=2, drop_last=False, num_epochs=3)) == 9


def test_a_loader_without_end_goes_on_and_has_no_length():
    loader = DataLoader(range(2), batch_size=2, num_epochs=None)
    assert [batch for _, batch in zip(range(5), loader, strict=False)] == [[0, 1]] * 5
    with pytest.raises(TypeError, match="no end"):
        len(loader)


def test_the_dataset_may_be_a_function():
    assert list(DataLoader(lambda: Dataset([1, 2]).map(str), batch_size=2)) == [["1", "2"]]


def test_in_local_mode_this_process_gets_its_data_ranks_slice(monkeypatch):
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    seen = {}
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        seen[rank] = list(DataLoader(range(8), batch_size=4, device_mesh=mesh))
    assert seen[0] == seen[1] == [[0, 1], [4, 5]]
    assert seen[2] == seen[3] == [[2, 3], [6, 7]]
    monkeypatch.setenv("RANK", "0")
    assert list(DataLoader(range(8), batch_size=4, device_mesh=DeviceMesh.from_sizes(tp_size=4))) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (4, {"batch_size": 0}, "batch_size is 0"),
        (4, {"batch_size": 2, "num_epochs": 0}, "num_epochs is 0"),
        (0, {"batch_size": 2}, "has no rows"),
        (4, {"batch_size": 5}, "4 rows fill no batch of 5"),
        (4, {"batch_size": 1, "device_mesh": DeviceMesh.from_sizes(dp_size=2)}, "batch_size is 1, less than the 2 data ranks"),
        (
            5,
            {"batch_size": 4, "drop_last": False, "device_mesh": DeviceMesh.from_sizes(dp_size=2)},
            "the last batch of an epoch has 1, less than the 2 data ranks",
        ),
    ],
)
def test_settings_that_starve_a_rank_are_refused(rows, options, message):
    with pytest.raises(DatasetError, match=message):
        DataLoader(range(rows), **options)


@pytest.mark.parametrize(("option", "value"), [("batch_size", 3), ("shuffle", False), ("seed", 1)])
def test_a_position_of_other_settings_is_refused(option, value):
    options = {"batch_size": 4, "shuffle": True, "seed": 0}
    state = DataLoader(range(12), **options).state_dict()
    with pytest.raises(LoaderStateError, match=f"{option} was .* is {value}"):
        DataLoader(range(12), **{**options, option: value}).load_state_dict(state)
    with pytest.raises(LoaderStateError, match="num_rows was 12, is 13"):
        DataLoader(range(13), **options).load_state_dict(state)


def test_a_damaged_position_is_refused():
    loader = DataLoader(range(4), batch_size=2)
    with pytest.raises(LoaderStateError, match=r"lacks \['epoch'"):
        loader.load_state_dict({"batch": 1})
    with pytest.raises(LoaderStateError, match="damaged: epoch 0, batch 2"):
        loader.load_state_dict({**loader.state_dict(), "batch": 2})


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra of twinkle-remote")
@pytest.mark.timeout(300)
def test_on_ray_one_worker_gives_out_whole_batches_and_resumes():
    mesh = DeviceMesh.from_sizes(dp_size=2, device_type="cpu")
    options = {"batch_size": 4, "shuffle": True, "num_epochs": 2, "device_mesh": mesh}
    whole = list(DataLoader(range(12), **{**options, "device_mesh": None}))
    with initialize("ray", groups=[DeviceGroup(name="data", ranks=2, device_type="cpu")]):
        loader = DataLoader(lambda: Dataset(range(12)), remote_group="data", **options)
        assert len(loader) == 6
        seen = [list(batch) for _, batch in zip(range(4), loader, strict=False)]
        state = loader.state_dict()
        assert [list(batch) for batch in loader] == whole
        loader.load_state_dict(state)
        assert seen + [list(batch) for batch in loader] == whole
        with pytest.raises(LoaderStateError, match="batch_size was 3, is 4"):
            loader.load_state_dict({**state, "batch_size": 3})
        assert list(DataLoader(range(12), **options)) == whole, "in the driver's process batches are whole too"
