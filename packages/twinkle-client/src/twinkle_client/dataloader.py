"""Loaders on a server: `from twinkle_client.dataloader import DataLoader`."""

from ._objects import DataLoader

__all__ = ["DataLoader"]
