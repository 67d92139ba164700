"""A checkpoint folder as a source of weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from twinkle_remote import remote_class

from ._errors import ChannelMisuse
from ._sender import WeightSender
from ._spec import TensorSpec

# https://github.com/huggingface/safetensors#format
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}


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

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """As the files' headers say, read without the data."""
        specs: list[TensorSpec] = []
        for file in self._files:
            opened: Any = safe_open(str(file), framework="pt")
            with opened as reader:
                for name in reader.offset_keys():
                    part: Any = reader.get_slice(name)
                    specs.append(TensorSpec(name, _DTYPES.get(str(part.get_dtype()), str(part.get_dtype())), tuple(part.get_shape())))
        return tuple(specs)

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, file by file, in the order in which it is stored."""
        for file in self._files:
            opened: Any = safe_open(str(file), framework="pt")
            with opened as reader:
                for name in reader.offset_keys():
                    yield name, reader.get_tensor(name)
