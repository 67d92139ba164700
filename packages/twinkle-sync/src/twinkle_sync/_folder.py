"""A checkpoint folder as a source of weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from twinkle_remote import remote_class

from ._errors import ChannelMisuse
from ._sender import WeightSender


@remote_class()
class CheckpointFolder(WeightSender):
    """The weights of a Hugging Face folder (`*.safetensors`), ready to be sent.

    `CheckpointEngineManager(model=CheckpointFolder(path), sampler=sampler).sync_weights()` puts a saved state into a running sampler.
    ChannelMisuse when the folder has no such files.
    """

    def __init__(self, path: str | Path) -> None:
        self._files = sorted(Path(path).glob("*.safetensors"))
        if not self._files:
            raise ChannelMisuse(f"{path} has no *.safetensors file to send weights from")

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, file by file, in the order in which it is stored."""
        for file in self._files:
            opened: Any = safe_open(str(file), framework="pt")
            with opened as reader:
                for name in reader.offset_keys():
                    yield name, reader.get_tensor(name)
