"""Datasets under the documented names: `from twinkle.dataset import Dataset, PackingDataset`."""

from twinkle_data import (
    Dataset,
    IterableDataset,
    IterablePackingDataset,
    PackingDataset,
    concatenate,
    mix,
    prompt_dataset,
    task_dataset,
)

__all__ = [
    "Dataset",
    "IterableDataset",
    "IterablePackingDataset",
    "PackingDataset",
    "concatenate",
    "mix",
    "prompt_dataset",
    "task_dataset",
]
