"""Datasets under the documented name: `from twinkle.dataset import Dataset`."""

from twinkle_data import Dataset, IterableDataset, concatenate, mix, prompt_dataset, task_dataset

__all__ = ["Dataset", "IterableDataset", "concatenate", "mix", "prompt_dataset", "task_dataset"]
