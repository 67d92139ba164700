"""What makes a training checkpoint one of megatron-core's format torch_dist, beside its tensors."""

import json
from pathlib import Path

import torch

_FILE, _COMMON = "metadata.json", "common.pt"
_CONTENT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


def add_megatron_files(folder: Path) -> None:
    """Writes what megatron.core.dist_checkpointing looks for."""
    torch.save({}, folder / _COMMON)
    (folder / _FILE).write_text(json.dumps(_CONTENT) + "\n")
