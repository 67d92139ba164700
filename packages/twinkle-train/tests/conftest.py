"""Fixtures: a tiny checkpoint."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3."""
    from twinkle_train.testing import tiny_qwen3

    return tiny_qwen3(tmp_path_factory.mktemp("qwen3"))
