"""Names that are loaded when they are first used, so that `import twinkle` loads no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from twinkle._errors import MissingExtraError


def lazy_exports(module: str, exports: Mapping[str, str], extras: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a module's `__getattr__`.

    Args:
        module: the module's `__name__`.
        exports: public name to the import name of the package that defines it.
        extras: import name of a package to the extra of twinkle-rl that installs it.

    The returned function raises MissingExtraError, with the exact install line, when the package itself is not installed; when something that
    the package needs is missing, that error keeps its own name.
    """

    def get(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(load(exports[name], extras), name)

    return get


def load(package: str, extras: Mapping[str, str]) -> Any:
    """Import a layer, or say how to install it."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package or package not in extras:
            raise
        raise MissingExtraError(f"{package} is not installed: pip install 'twinkle-rl[{extras[package]}]'", name=package) from error


EXTRAS = {"twinkle_megatron": "megatron", "twinkle_transformers": "transformers", "twinkle_vllm": "vllm"}
