"""Digests of data and of functions, by what they hold and what they do: the names of cached results."""

import copyreg
import dataclasses
import hashlib
import pickle
import threading
from collections.abc import Iterator
from enum import Enum
from functools import cached_property, partial, partialmethod, singledispatchmethod
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np

from ._errors import DatasetError
from ._module_sources import module_digest
from ._wording import a_kind

_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_METHODS = (FunctionType, classmethod, staticmethod, property)


def fingerprint(value: Any) -> str:
    """A digest (SHA-256) of a value. Equal digests mean that it holds the same, or, of a function, that it does the same.

    Followed are: a function's code, defaults, attributes, what it closes over and the globals that it uses; functions behind `lru_cache`,
    `partial` and methods; a class's methods, properties and other attributes, its nested classes and its bases; an enum's members; an object's
    class and all that its state holds (as it would be pickled), unless it has a method `fingerprint_parts()`. Modules, functions and classes
    of another package count by the sources of their module and of those that it refers to, where these are your own files, and by name and
    version where they were installed or are Python's. Not followed are files that a function reads, the environment, and names that are looked
    up as texts (`getattr`).
    A changed digest of something unchanged only means that work is done again.

    Raises:
        DatasetError: an object whose state cannot be pickled, or that is nested too deep.
    """
    try:
        return _Digest(value).hexdigest()
    except RecursionError:
        raise DatasetError(f"cannot tell by its content whether {a_kind(value)} has changed: it is nested too deep") from None


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
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
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
        elif type(value) in (dict, MappingProxyType):
            self._all(x for pair in value.items() for x in pair)
        elif type(value) in (list, tuple):
            self._all(value)
        elif type(value) in (set, frozenset):
            self._text(*sorted(fingerprint(item) for item in value))  # pyright: ignore[reportGeneralTypeIssues] # narrowed to the types
        elif isinstance(value, np.ndarray):
            self._text(value.dtype.str, value.shape)
            if value.dtype.hasobject:  # its bytes are addresses
                self._all(value.reshape(-1).tolist())
            else:
                self._hash.update(value.tobytes())
        elif isinstance(value, ModuleType):
            self._text(value.__name__, module_digest(value.__name__))
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
            self._text(value.__module__, value.__qualname__, module_digest(value.__module__ or ""))
        elif isinstance(value, FunctionType) and hasattr(value, "registry") and hasattr(value, "dispatch"):  # functools.singledispatch
            self._all(item for pair in value.registry.items() for item in pair)  # pyright: ignore[reportFunctionMemberAccess]
        elif isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            used = {name: value.__globals__[name] for name in sorted(_names(value.__code__)) if name in value.__globals__}
            self._all([value.__code__, value.__defaults__, value.__kwdefaults__, cells, used, vars(value)])
        elif isinstance(value, type):
            self._text(value.__module__, value.__qualname__)
            self._all([value.__bases__, _attributes(value)])
        elif isinstance(value, (classmethod, staticmethod)):
            self._add(value.__func__)
        elif isinstance(value, property):
            self._all([value.fget, value.fset, value.fdel])
        elif isinstance(value, cached_property):
            self._add(value.func)
        elif isinstance(value, partialmethod):
            self._all([value.func, value.args, value.keywords])
        elif isinstance(value, singledispatchmethod):
            self._add(value.dispatcher)
        elif isinstance(value, _LOCKS):
            pass  # it holds nothing
        elif callable(wrapped := getattr(value, "__wrapped__", None)):  # lru_cache, and others that functools.wraps marks
            self._add(wrapped)
        else:
            return False
        return True

    def _object(self, value: Any) -> None:
        self._add(type(value))
        if dataclasses.is_dataclass(value):
            self._all(getattr(value, field.name) for field in dataclasses.fields(value))
            self._all(x for pair in _beside_fields(value).items() for x in pair)
        elif isinstance(value, Enum):
            self._add(value.name)
        else:
            self._state(value)

    def _state(self, value: Any) -> None:
        """What a pickle of the object would hold, looked into: functions in it are followed."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))  # where pickle looks first: compiled patterns are there
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise _untold(value, error) from error
        if isinstance(reduced, str):  # an object that is found by its name
            self._text(getattr(value, "__module__", ""), reduced)
            return
        _, arguments, *state = reduced
        self._all([arguments, *(list(part) if isinstance(part, Iterator) else part for part in state)])


def _attributes(owner: type) -> dict[str, Any]:
    """What a class itself holds, without what Python or a library puts there."""
    if issubclass(owner, Enum):
        return {**{name: member.value for name, member in owner.__members__.items()}, **_own_methods(owner)}
    return {
        name: item
        for name, item in sorted(vars(owner).items())
        if not isinstance(item, (GetSetDescriptorType, MemberDescriptorType)) and (not _is_special(name) or isinstance(item, _METHODS))
    }


def _beside_fields(value: Any) -> dict[str, Any]:
    """What a dataclass's object holds that is no field of it, without what `cached_property` has computed."""
    known = {field.name for field in dataclasses.fields(value)}
    found = getattr(value, "__dict__", {})
    return {name: item for name, item in found.items() if name not in known and not isinstance(getattr(type(value), name, None), cached_property)}


def _own_methods(owner: type) -> dict[str, Any]:
    return {name: item for name, item in sorted(vars(owner).items()) if isinstance(item, _METHODS)}


def _is_special(name: str) -> bool:
    return name == "_abc_impl" or (name.startswith("__") and name.endswith("__"))


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


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise _untold(value, error) from error


def _untold(value: Any, error: Exception) -> DatasetError:
    return DatasetError(f"cannot tell by its content whether {a_kind(value)} has changed ({error}); work without cache_dir")
