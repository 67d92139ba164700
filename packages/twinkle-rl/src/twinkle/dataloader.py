"""Data loading under the documented name: `from twinkle.dataloader import DataLoader`."""

from twinkle_data import DataLoader, DeviceMeshSampler, RetrySampler

__all__ = ["DataLoader", "DeviceMeshSampler", "RetrySampler"]
