"""Datasets on a server: `from twinkle_client.dataset import Dataset`."""

from ._objects import Dataset

__all__ = ["Dataset"]
