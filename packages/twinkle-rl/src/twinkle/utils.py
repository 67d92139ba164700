"""Topology under the documented name: `from twinkle.utils import DeviceMesh`."""

from twinkle_mesh import DeviceGroup, DeviceMesh

__all__ = ["DeviceGroup", "DeviceMesh"]
