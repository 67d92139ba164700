"""What a named tensor is, apart from its numbers."""

import math
from dataclasses import dataclass

import torch

from ._errors import TensorNotSupported


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor.

    `dtype` is torch's name without the prefix (`'float32'`, `'bfloat16'`), so that a spec travels as plain JSON.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "TensorSpec":
        """The spec of `tensor`; TensorNotSupported unless it is a dense torch tensor that holds data."""
        if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TensorNotSupported(f"{name}: a weight source yields torch tensors, not {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise TensorNotSupported(f"{name}: only dense tensors that hold data can be sent (layout {tensor.layout}, device {tensor.device})")
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself; TensorNotSupported for a name that torch does not know."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise TensorNotSupported(f"{self.name}: {self.dtype!r} is not a dtype of torch {torch.__version__}")
        return dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes that the tensor's elements take."""
        return self.numel * self.torch_dtype.itemsize
