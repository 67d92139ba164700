"""Data loading under the documented name: `from twinkle.dataloader import DataLoader`."""

from twinkle_data import DataLoader, DeviceMeshSampler

__all__ = ["DataLoader", "DeviceMeshSampler"]
