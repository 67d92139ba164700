"""Kinds of devices, and the environment variable that says which of them a process sees."""

from collections.abc import Iterable

from twinkle_mesh._errors import InvalidMeshError

# None: a type without devices to choose from.
_VISIBLE_DEVICES_VARIABLES: dict[str, str | None] = {
    "cpu": None,
    "cuda": "CUDA_VISIBLE_DEVICES",  # AMD too: torch on ROCm calls its devices cuda and HIP reads this variable
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "hpu": "HABANA_VISIBLE_MODULES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
}
_ALIASES = {"gpu": "cuda", "rocm": "cuda"}
# The id of a part of an NVIDIA GPU (multi-instance GPU). CUDA shows a process one of these at most.
MIG_PREFIX = "MIG-"


def normalize_device_type(device_type: str) -> str:
    """The name that torch uses for a device type: lower case, and 'cuda' for 'GPU'.

    Raises InvalidMeshError for a type that is not known.
    """
    name = device_type.strip().lower()
    name = _ALIASES.get(name, name)
    if name not in _VISIBLE_DEVICES_VARIABLES:
        known = ", ".join(sorted([*_VISIBLE_DEVICES_VARIABLES, *_ALIASES]))
        raise InvalidMeshError(f"device_type={device_type!r} is not known; known are {known}")
    return name


def visible_devices_variable(device_type: str) -> str | None:
    """The environment variable that limits a process to some devices of this type; None for 'cpu'."""
    return _VISIBLE_DEVICES_VARIABLES[normalize_device_type(device_type)]


def visible_devices_env(device_type: str, device_ids: Iterable[str]) -> dict[str, str]:
    """The environment entries that make a process see exactly `device_ids`, in this order. Empty for 'cpu'."""
    variable = visible_devices_variable(device_type)
    return {} if variable is None else {variable: ",".join(device_ids)}
