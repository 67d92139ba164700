"""Pickling for the way between processes. Needs Ray (its cloudpickle, which sends what was defined in the driver script by value)."""

import importlib.machinery
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from twinkle_remote import _compression
from twinkle_remote._ray_api import cloudpickle

# Buffers from this size on lie beside the pickle, so that Ray stores them and hands them over without copying.
_BUFFER_BYTES = 512
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes})


class Packed:
    """A pickled value: `data`, and the memory of the large arrays in it, which is not copied before Ray stores it.

    codec: how data and buffers are compressed; None: not at all.
    """

    __slots__ = ("buffers", "codec", "data")

    def __init__(self, data: Any, buffers: Sequence[Any] = (), codec: str | None = None) -> None:
        self.data = data
        self.buffers = buffers
        self.codec = codec

    @property
    def size_bytes(self) -> int:
        """How much is stored."""
        return memoryview(self.data).nbytes + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def compressed(self) -> "Packed":
        """The same, compressed with zstd."""
        return Packed(_compression.compress(self.data), [_compression.compress(buffer) for buffer in self.buffers], "zstd")

    def unpack(self) -> Any:
        """The value. Its numpy arrays are read-only views of what Ray stored, its tensors are copies. Raises what unpickling raises."""
        if self.codec is None:
            return pickle.loads(self.data, buffers=self.buffers)
        return pickle.loads(_compression.decompress(self.data), buffers=[_compression.decompress(buffer) for buffer in self.buffers])

    def __reduce__(self) -> tuple[Any, ...]:
        data = pickle.PickleBuffer(self.data) if memoryview(self.data).nbytes >= _BUFFER_BYTES else self.data
        return Packed, (data, tuple(self.buffers), self.codec)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, but tensors travel as plain CPU tensors (no graph, and of a view only what it shows), and arrays and tensors as their memory."""

    def reducer_override(self, obj: Any) -> Any:
        kind = cast("type[Any]", type(obj))
        if kind is np.ndarray:
            if is_plain_array(obj):
                memory: Any = np.ascontiguousarray(obj)
                return view_array, (pickle.PickleBuffer(memory), obj.dtype.str, obj.shape)
            return NotImplemented
        torch = sys.modules.get("torch")
        if torch is not None and kind is getattr(torch, "Tensor", None) and obj.layout is torch.strided and not obj.is_quantized:
            return _reduce_tensor(torch, obj)
        return cloudpickle.Pickler.reducer_override(self, obj)


def is_plain_array(array: Any) -> bool:
    """Whether an array is its memory, dtype and shape: of numbers, and not empty."""
    return array.dtype.kind in "biufc" and array.dtype.isbuiltin == 1 and array.size > 0


def view_array(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """A read-only array over the buffer: what Ray stores is shared."""
    array = np.frombuffer(buffer, dtype=dtype).reshape(shape)
    array.flags.writeable = False
    return array


def pack(value: Any) -> bytes:
    """Pickle `value` in one piece. Raises what pickling raises."""
    return _dump(value, None)


def pack_apart(value: Any) -> Packed:
    """Pickle `value`, large buffers apart. Raises what pickling raises."""
    buffers: list[pickle.PickleBuffer] = []
    if type(value) in (list, tuple) and all(type(item) in _PLAIN_TYPES for item in value):
        return Packed(pickle.dumps(value, 5))
    return Packed(_dump(value, lambda buffer: _stays_inside(buffer, buffers)), buffers)


def dump_plain(value: Any) -> Packed:
    """As `pack_apart`, for values of built-in types and PickleBuffers only: many times faster."""
    buffers: list[pickle.PickleBuffer] = []
    return Packed(pickle.dumps(value, 5, buffer_callback=lambda buffer: _stays_inside(buffer, buffers)), buffers)


def unpack(packed: Any) -> Any:
    """The value of something packed: a Packed, or the bytes of `pack`."""
    return packed.unpack() if isinstance(packed, Packed) else pickle.loads(packed)


def _dump(value: Any, callback: Callable[[Any], bool] | None) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file, protocol=5, buffer_callback=callback).dump(value)
        return file.getvalue()


def _stays_inside(buffer: Any, apart: list[Any]) -> bool:
    if buffer.raw().nbytes < _BUFFER_BYTES:
        return True
    apart.append(buffer)
    return False


def _reduce_tensor(torch: Any, tensor: Any) -> Any:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if not plain.numel():
        return plain.clone().__reduce_ex__(5)
    memory = plain.reshape(-1).view(torch.uint8).numpy()
    return _copy_tensor, (pickle.PickleBuffer(memory), str(plain.dtype).removeprefix("torch."), tuple(plain.shape))


def _copy_tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    tensor: Any = torch.frombuffer(bytearray(buffer), dtype=getattr(torch, dtype))
    return tensor.reshape(shape)


def ship_definitions(cls: type) -> None:
    """Have the module of `cls` pickled by value if other processes could not import it (a test module, say).

    What the driver script itself (`__main__`) defines is always pickled by value.
    """
    name = cls.__module__
    if name == "__main__" or name not in sys.modules or _importable(name):
        return
    cloudpickle.register_pickle_by_value(sys.modules[name])


def _importable(name: str) -> bool:
    """Whether an import statement in a process with the same sys.path would find the module that is loaded here."""
    path = None
    parts = name.split(".")
    spec = None
    for index in range(len(parts)):
        full_name = ".".join(parts[: index + 1])
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(full_name, path, None)
            if spec is not None:
                break
        if spec is None:
            return False
        path = spec.submodule_search_locations
    origin = getattr(sys.modules[name], "__file__", None)
    return spec is None or origin is None or spec.origin == origin or isinstance(spec.loader, importlib.machinery.BuiltinImporter)
