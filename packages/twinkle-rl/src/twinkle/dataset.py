"""Datasets under the documented name: `from twinkle.dataset import Dataset`."""

from twinkle_data import Dataset, task_dataset

__all__ = ["Dataset", "task_dataset"]
