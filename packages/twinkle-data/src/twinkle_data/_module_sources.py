"""Digests of modules: of one's own by their sources, of installed ones by their version."""

import hashlib
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

_INSTALLED = tuple(Path(path).resolve() for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib", "platlib"))


def module_digest(name: str) -> str:
    """Name, version and, of files that were not installed, the sources of a module and of all modules that it refers to."""
    digest = hashlib.sha256()
    pending, seen = [name], set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        module = sys.modules.get(name)
        source = _own_source(module)
        version = _version(name.partition(".")[0])
        for text in (name.encode(), version.encode(), source or b""):
            digest.update(len(text).to_bytes(8, "little") + text)
        if source is not None and module is not None:
            pending += sorted(_referred(module), reverse=True)
    return digest.hexdigest()


@cache
def _version(package: str) -> str:
    """The version of a package, as it says itself and as what installed it says: not every package says one."""
    own = str(getattr(sys.modules.get(package), "__version__", ""))
    if not package or package in sys.stdlib_module_names or package == "__main__":
        return own
    with suppress(metadata.PackageNotFoundError):
        return f"{own} {metadata.version(package)}"
    names = sorted(set(_distributions().get(package, ())))  # of another name; looking at all that is installed takes a while
    return " ".join([own, *(f"{name} {metadata.version(name)}" for name in names)])


@cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _own_source(module: ModuleType | None) -> bytes | None:
    """The bytes of a module's file; None where it has none, or was installed."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    path = Path(file).resolve()
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or any(path.is_relative_to(folder) for folder in _INSTALLED):
        return None
    try:
        return path.read_bytes()
    except OSError:  # in an archive, say
        return None


def _referred(module: ModuleType) -> set[str]:
    """The names of modules that stand in this one, or that what stands in it was defined in."""
    names = (value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) for value in list(vars(module).values()))
    return {name for name in names if isinstance(name, str) and name != module.__name__}
