"""Digests of data and of functions, by what they hold and what they do: the names of cached results."""

import dataclasses
import hashlib
import pickle
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from ._errors import DatasetError


def fingerprint(value: Any) -> str:
    """A digest (SHA-256) of a value. Equal digests mean that it holds the same, or, of a function, that it does the same.

    A function counts by its code, its defaults, what it closes over and the globals that it uses; functions and classes of other
    packages than its own count by name and version. An object counts by its class and its pickled state, unless it has a method
    `fingerprint_parts()`. A changed digest of something unchanged only means that work is done again.

    Raises:
        DatasetError: an object that cannot be pickled.
    """
    return _Digest(value).hexdigest()


def rows_fingerprint(rows: Any) -> str:
    """A digest of rows by their content."""
    if isinstance(known := getattr(rows, "fingerprint", None), str):
        return known
    digest = hashlib.sha256()
    for index in range(len(rows)):
        text = _pickled(rows[index])
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


class _Digest:
    def __init__(self, value: Any) -> None:
        self._hash = hashlib.sha256()
        self._home = _package(value)
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # an id is a name only as long as its object lives
        self._add(value)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def _text(self, *texts: object) -> None:
        for text in texts:
            encoded = str(text).encode(errors="surrogatepass")
            self._hash.update(len(encoded).to_bytes(8, "little") + encoded)

    def _add(self, value: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            self._text(type(value).__name__, repr(value))
            return
        if id(value) in self._seen:
            self._text("again", self._seen[id(value)])
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        self._text(type(value).__qualname__)
        if callable(parts := getattr(value, "fingerprint_parts", None)) and not isinstance(value, type):
            self._add(parts())
        elif isinstance(value, Mapping):
            self._all(x for pair in value.items() for x in pair)
        elif isinstance(value, (list, tuple)):
            self._all(value)
        elif isinstance(value, (set, frozenset)):
            self._text(*sorted(fingerprint(item) for item in value))
        elif isinstance(value, np.ndarray):
            self._text(value.dtype.str, value.shape)
            self._hash.update(value.tobytes())
        elif isinstance(value, ModuleType):
            self._text(value.__name__, _version(value.__name__))
        elif not self._code(value):
            self._object(value)

    def _all(self, values: Any) -> None:
        for value in values:
            self._add(value)
        self._text("end")

    def _code(self, value: Any) -> bool:
        """Functions, classes and what is made of them."""
        if isinstance(value, CodeType):
            self._all([value.co_code, value.co_consts, value.co_names, value.co_varnames, value.co_flags])
        elif isinstance(value, partial):
            self._all([value.func, value.args, value.keywords])
        elif isinstance(value, MethodType):
            self._all([value.__func__, value.__self__])
        elif isinstance(value, BuiltinFunctionType) or (isinstance(value, (type, FunctionType)) and _package(value) != self._home):
            self._text(value.__module__, value.__qualname__, _version(value.__module__ or ""))
        elif isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            used = {name: value.__globals__[name] for name in sorted(_names(value.__code__)) if name in value.__globals__}
            self._all([value.__code__, value.__defaults__, value.__kwdefaults__, cells, used])
        elif isinstance(value, type):
            own = {name: item for name, item in vars(value).items() if isinstance(item, (FunctionType, classmethod, staticmethod, property))}
            self._text(value.__module__, value.__qualname__)
            self._all([value.__bases__, {name: _functions(item) for name, item in own.items()}])
        else:
            return False
        return True

    def _object(self, value: Any) -> None:
        self._add(type(value))
        if dataclasses.is_dataclass(value):
            self._all(getattr(value, field.name) for field in dataclasses.fields(value))
        else:
            self._add(_pickled(value))


def _functions(item: Any) -> list[Any]:
    return [item.fget, item.fset, item.fdel] if isinstance(item, property) else [getattr(item, "__func__", item)]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _package(value: Any) -> str:
    target: Any = value.func if isinstance(value, partial) else getattr(value, "__func__", value)
    home = target if isinstance(target, (type, FunctionType, BuiltinFunctionType)) else type(target)
    return (home.__module__ or "").partition(".")[0]


def _version(module: str) -> str:
    return str(getattr(sys.modules.get(module.partition(".")[0]), "__version__", ""))


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DatasetError(f"cannot tell by its content whether a {type(value).__name__} has changed ({error}); work without cache_dir") from error
