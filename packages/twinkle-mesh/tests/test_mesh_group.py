import pickle

import pytest

from twinkle_mesh import DeviceGroup, InvalidMeshError, visible_devices_env, visible_devices_variable


def test_the_documented_group_builds() -> None:
    group = DeviceGroup(name="default", ranks=4, device_type="cuda")
    assert (group.num_devices, group.num_workers, group.visible_devices, group.gpus_per_worker) == (4, 4, None, 1)


def test_workers_are_devices_divided_by_gpus_per_worker() -> None:
    assert DeviceGroup("a", 8, "cuda", gpus_per_worker=4).num_workers == 2
    assert DeviceGroup("a", list(range(8)), "cuda", None, 2).num_workers == 4
    with pytest.raises(InvalidMeshError, match="'a': gpus_per_worker=3 does not divide its 8 devices"):
        DeviceGroup("a", 8, "cuda", gpus_per_worker=3)


def test_listed_ranks_become_immutable_so_that_a_group_is_hashable() -> None:
    ranks = [2, 0]
    group = DeviceGroup("a", ranks, "cuda")
    ranks.append(5)
    assert group.ranks == (2, 0)
    assert {group: 1}[DeviceGroup("a", (2, 0), "GPU")] == 1
    assert pickle.loads(pickle.dumps(group)) == group


def test_visible_devices_may_be_indices_or_uuids() -> None:
    assert DeviceGroup("a", 2, "cuda", visible_devices="8, 9").visible_device_ids == ("8", "9")
    assert DeviceGroup("a", 1, "cuda", visible_devices="GPU-8c1f-aa").visible_device_ids == ("GPU-8c1f-aa",)
    assert DeviceGroup("a", 1, "cuda").visible_device_ids is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "needs a name"),
        ({"ranks": 0}, "at least one device"),
        ({"ranks": -2}, "at least one device"),
        ({"ranks": True}, "at least one device"),
        ({"ranks": []}, "at least one device"),
        ({"ranks": [0, 0]}, "different device indices"),
        ({"ranks": [-1, 0]}, "different device indices"),
        ({"gpus_per_worker": 0}, "gpus_per_worker=0"),
        ({"visible_devices": ""}, "visible_devices=''"),
        ({"visible_devices": "0,,1"}, "different device ids"),
        ({"visible_devices": "0,0"}, "different device ids"),
        ({"device_type": "tpuu"}, "known are"),
        ({"device_type": "cpu", "ranks": [0, 1]}, "write ranks=2"),
        ({"device_type": "CPU", "visible_devices": "0"}, "leave it out"),
        ({"device_type": "cpu", "gpus_per_worker": 2}, "leave it at 1"),
    ],
)
def test_fields_that_cannot_be_are_a_value_error_that_says_why(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeviceGroup(**{"name": "a", "ranks": 4, "device_type": "cuda", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device_type", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("GPU", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")]
)
def test_each_device_type_has_its_visible_devices_variable(device_type: str, variable: str) -> None:
    assert visible_devices_variable(device_type) == variable
    assert visible_devices_env(device_type, ("9", "8")) == {variable: "9,8"}


def test_a_cpu_has_no_visible_devices_variable() -> None:
    assert visible_devices_variable("cpu") is None
    assert visible_devices_env("cpu", ()) == {}
