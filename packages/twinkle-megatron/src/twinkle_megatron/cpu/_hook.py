"""The import hook: rewrites sources in memory as they load, and only those that need it."""

import importlib.abc
import importlib.machinery
import types
from collections.abc import Sequence

from .._errors import RuleError
from ._rules import CUDA, GENERAL_RULES, PACKAGES, SPECIAL_RULES, SUPPORTED_VERSION


def rewrite(module: str, source: str) -> str:
    """Applies the rules to the source of a module.

    Raises:
        RuleError: a special rule of this module does not match exactly once.
    """
    for rule in SPECIAL_RULES:
        if rule.module != module:
            continue
        found = source.count(rule.old)
        if found != 1:
            raise RuleError(
                f"The rule {rule.name!r} of twinkle_megatron's CPU platform matches {found} times in {module}, not once. It was written for "
                f"megatron-core {SUPPORTED_VERSION}: install that version (pip install megatron-core=={SUPPORTED_VERSION}), unmodified."
            )
        source = source.replace(rule.old, rule.new)
    for rule in GENERAL_RULES:
        source = rule.pattern.sub(rule.replacement, source)
    return source


class _RewritingLoader(importlib.machinery.SourceFileLoader):
    """Compiles the rewritten source. Nothing is written; a source that no rule touches loads as always, from its cached bytecode."""

    def __init__(self, name: str, path: str, standin: types.ModuleType) -> None:
        super().__init__(name, path)
        self._standin = standin

    def get_code(self, fullname: str) -> types.CodeType | None:
        source = self.get_source(fullname)
        if source is None:
            return super().get_code(fullname)
        rewritten = rewrite(fullname, source)
        if rewritten == source:
            return super().get_code(fullname)
        return compile(rewritten, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__[CUDA] = self._standin
        super().exec_module(module)


class RewritingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of megatron.core and mbridge and hands them the rewriting loader."""

    def __init__(self, standin: types.ModuleType) -> None:
        self._standin = standin

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == package or fullname.startswith(package + ".") for package in PACKAGES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _RewritingLoader(fullname, spec.origin, self._standin)
        return spec
