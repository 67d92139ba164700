"""Cached results are named by what the work does: whatever it depends on changes the name, and nothing else does."""

import importlib
import sys
import textwrap
import threading
from typing import Any

import pytest

from twinkle_data import Dataset, DatasetError
from twinkle_data._fingerprint import fingerprint

# Each defines fn, which depends on VALUE in some way.
WAYS = {
    "class attribute": """
        class Config:
            factor = VALUE
        def fn(row): return row * Config.factor
    """,
    "attribute of a callable's class": """
        class Fn:
            factor = VALUE
            def __call__(self, row): return row * self.factor
        fn = Fn()
    """,
    "function that an object holds": """
        def scale(row): return row * VALUE
        class Pipe:
            def __init__(self, *steps): self.steps = steps
            def __call__(self, row): return self.steps[0](row)
        fn = Pipe(scale)
    """,
    "function behind lru_cache": """
        @functools.lru_cache
        def scale(row): return row * VALUE
        def fn(row): return scale(row)
    """,
    "enum": """
        class Factor(enum.Enum):
            ONE = VALUE
        def fn(row): return row * Factor.ONE.value
    """,
    "cached property": """
        class Fn:
            @functools.cached_property
            def factor(self): return VALUE
            def __call__(self, row): return row * self.factor
        fn = Fn()
    """,
    "nested class": """
        class Fn:
            class Inner:
                @staticmethod
                def scale(row): return row * VALUE
            def __call__(self, row): return self.Inner.scale(row)
        fn = Fn()
    """,
    "partial in an object": """
        def scale(row, factor): return row * factor
        class Fn:
            lock = threading.Lock()
            def __init__(self): self.scale = functools.partial(scale, factor=VALUE)
            def __call__(self, row): return self.scale(row)
        fn = Fn()
    """,
    "single dispatch": """
        @functools.singledispatch
        def scale(row): return row
        scale.register(int, lambda row: row * VALUE)
        def fn(row): return scale(row)
    """,
    "slots": """
        class Fn:
            __slots__ = ("factor",)
            def __init__(self): self.factor = VALUE
            def __call__(self, row): return row * self.factor
        fn = Fn()
    """,
    "subclass of dict": """
        class Fn(dict):
            def __call__(self, row): return row * VALUE
        fn = Fn()
    """,
}


def made(way, value):
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("import enum, functools, threading\n" + textwrap.dedent(WAYS[way]).replace("VALUE", str(value)), space)
    return space["fn"]


@pytest.mark.parametrize("way", WAYS)
def test_a_digest_follows_what_a_function_depends_on(way, tmp_path):
    assert fingerprint(made(way, 2)) == fingerprint(made(way, 2)) != fingerprint(made(way, 3))
    results = [list(Dataset([1, 2]).map(made(way, value), cache_dir=tmp_path)) for value in (2, 3, 2)]
    assert results == [[2, 4], [3, 6], [2, 4]]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_digest_follows_the_sources_of_your_other_modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    # A cached byte code would be taken for a source of the same size that was changed within its second.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    digests = []
    for value in (2, 2, 3):
        (tmp_path / "twinkle_test_inner.py").write_text(f"def scale(row):\n    return row * {value}\n")
        (tmp_path / "twinkle_test_outer.py").write_text("from twinkle_test_inner import scale\n\ndef twice(row):\n    return 2 * scale(row)\n")
        for name in ("twinkle_test_inner", "twinkle_test_outer"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        outer = importlib.import_module("twinkle_test_outer")
        space = {"__name__": "__main__", "outer": outer, "twice": outer.twice}
        exec("def by_name(row): return twice(row)\ndef by_module(row): return outer.twice(row)", space)
        digests.append([fingerprint(space[name]) for name in ("by_name", "by_module")])
    assert digests[0] == digests[1]
    assert all(before != after for before, after in zip(digests[0], digests[2], strict=True))


def test_what_cannot_be_told_is_refused():
    def with_lock(lock):
        return lambda row: lock and row

    assert fingerprint(with_lock(threading.Lock())) == fingerprint(with_lock(threading.Lock())), "a lock holds nothing"
    with pytest.raises(DatasetError, match="cannot tell by its content whether a generator has changed"):
        fingerprint(with_lock(row for row in range(2)))
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(DatasetError, match="nested too deep"):
        fingerprint(deep)
