"""Pickling for the way between processes. Needs Ray (its cloudpickle, which sends what was defined in the driver script by value)."""

import importlib.machinery
import io
import sys
from typing import Any

from twinkle_remote._ray_api import cloudpickle
from twinkle_remote._sequences import is_tensor


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, but tensors travel as plain CPU tensors: no graph, and of a view only what it shows."""

    def reducer_override(self, obj: Any) -> Any:
        if is_tensor(obj) and type(obj) is sys.modules["torch"].Tensor and not obj.is_sparse and not obj.is_quantized:
            plain = obj.detach().cpu().contiguous()
            if plain.untyped_storage().nbytes() != plain.numel() * plain.element_size():
                plain = plain.clone()
            return plain.__reduce_ex__(5)
        return cloudpickle.Pickler.reducer_override(self, obj)


def pack(value: Any) -> bytes:
    """Pickle `value`. Raises what pickling raises."""
    with io.BytesIO() as file:
        _Pickler(file, protocol=5).dump(value)
        return file.getvalue()


def unpack(packed: Any) -> Any:
    """The value of something packed (bytes or a buffer). Arrays in it are writable copies."""
    return cloudpickle.loads(packed)


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
