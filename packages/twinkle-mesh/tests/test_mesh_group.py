import importlib.metadata
import importlib.util
import pickle

import numpy as np
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
        ({"ranks": True}, "a number of devices or a list"),
        ({"ranks": "4"}, "a number of devices or a list"),
        ({"ranks": 4.0}, "a number of devices or a list"),
        ({"ranks": [0, 1.5]}, "a number of devices or a list"),
        ({"ranks": None}, "a number of devices or a list"),
        ({"ranks": []}, "at least one device"),
        ({"ranks": [0, 0]}, "different device indices"),
        ({"ranks": [-1, 0]}, "different device indices"),
        ({"name": None}, "needs a name, not None"),
        ({"gpus_per_worker": 0}, "gpus_per_worker=0"),
        ({"gpus_per_worker": True}, "gpus_per_worker=True"),
        ({"gpus_per_worker": "2"}, "gpus_per_worker='2'"),
        ({"visible_devices": ["0", "1"]}, "one string of device ids, as '0,1'"),
        ({"visible_devices": "MIG-1,MIG-2", "ranks": 2, "gpus_per_worker": 2}, "one MIG instance at most"),
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


VARIABLES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "GPU": "CUDA_VISIBLE_DEVICES",
    "rocm": "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "hpu": "HABANA_VISIBLE_MODULES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
}


@pytest.mark.parametrize(("device_type", "variable"), VARIABLES.items())
def test_each_device_type_has_its_visible_devices_variable(device_type: str, variable: str) -> None:
    assert visible_devices_variable(device_type) == variable
    assert visible_devices_env(device_type, ("9", "8")) == {variable: "9,8"}


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.parametrize(("device_type", "module"), [("cuda", "nvidia_gpu"), ("npu", "npu"), ("xpu", "intel_gpu"), ("hpu", "hpu")])
def test_the_variables_are_those_that_ray_sets(device_type: str, module: str) -> None:
    # Read, not imported: importing ray takes seconds.
    files = importlib.metadata.files("ray") or ()
    source = next(file for file in files if file.as_posix() == f"ray/_private/accelerators/{module}.py").read_text()
    assert f'"{visible_devices_variable(device_type)}"' in source


@pytest.mark.parametrize("ranks", [np.int64(4), 4])
def test_a_number_of_ranks_may_be_any_whole_number(ranks: int) -> None:
    group = DeviceGroup("a", ranks, "cuda")
    assert (group.ranks, group.num_devices) == (4, 4)
    assert DeviceGroup("a", np.arange(2), "cuda").ranks == DeviceGroup("a", range(2), "cuda").ranks == (0, 1)  # pyright: ignore[reportArgumentType]


def test_a_cpu_has_no_visible_devices_variable() -> None:
    assert visible_devices_variable("cpu") is None
    assert visible_devices_env("cpu", ()) == {}
