"""Datasets under the documented names: `from twinkle.dataset import Dataset, PackingDataset`."""

from twinkle_data import Dataset, IterablePackingDataset, PackingDataset, task_dataset

__all__ = ["Dataset", "IterablePackingDataset", "PackingDataset", "task_dataset"]
