"""Cached results are named by what the work does: whatever it depends on changes the name, and nothing else does."""

import importlib
import shutil
import sys
import textwrap
import threading
from importlib import metadata
from typing import Any

import pytest

from twinkle_data import Dataset, DatasetError, Template, _module_sources
from twinkle_data._fingerprint import fingerprint
from twinkle_data._transforms import EncodeRows

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
    "subclass of str": """
        class Text(str):
            def __repr__(self): return "text"
        def fn(row, factor=Text("VALUE")): return row * int(factor)
    """,
    "attribute of a function": """
        def fn(row): return row * fn.factor
        fn.factor = VALUE
    """,
    "attribute of a dataclass's object": """
        @dataclasses.dataclass
        class Fn:
            name: str = "a"
            def __call__(self, row): return row * self.factor
        fn = Fn()
        fn.factor = VALUE
    """,
    "array of objects": """
        factors = numpy.array([FACTOR, None], dtype=object)
        FACTOR[0] = VALUE
        def fn(row): return row * factors[0][0]
    """,
    "compiled pattern": """
        pattern = re.compile("VALUE")
        def fn(row): return row * int(pattern.pattern)
    """,
}


FACTOR: list[int] = [0]  # one object, whose address stays


def made(way, value):
    space: dict[str, Any] = {"__name__": "__main__", "FACTOR": FACTOR}
    exec("import dataclasses, enum, functools, re, threading\nimport numpy\n" + textwrap.dedent(WAYS[way]).replace("VALUE", str(value)), space)
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


def test_a_digest_follows_the_version_of_an_installed_package_that_says_none_itself(tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (site / "twinkle_test_lib").mkdir(parents=True)
    (site / "twinkle_test_lib" / "__init__.py").write_text("def scale(row):\n    return row\n")
    digests = []
    for project in ("twinkle_test_lib", "twinkle_test_project"):  # named as its package, or otherwise
        for version in ("1.0", "1.0", "2.0"):
            for old in site.glob("*.dist-info"):
                shutil.rmtree(old)
            info = site / f"{project}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
            (info / "top_level.txt").write_text("twinkle_test_lib\n")
            sys.modules.pop("twinkle_test_lib", None)
            importlib.invalidate_caches()
            forget_versions()  # a process sees one
            space = {"__name__": "__main__", "lib": importlib.import_module("twinkle_test_lib")}
            exec("def fn(row): return lib.scale(row)", space)
            digests.append(fingerprint(space["fn"]))
    assert digests[0] == digests[1] != digests[2]
    assert digests[3] == digests[4] != digests[5]


def test_encodings_are_named_by_the_versions_of_what_encodes(make_tokenizer, monkeypatch):
    def name():
        forget_versions()
        return EncodeRows(template, False, None, None).key()

    template = Template(make_tokenizer("chatml"))
    before = name()
    assert name() == before
    version = metadata.version
    for package in ("twinkle_data", "transformers", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setattr(metadata, "version", lambda asked, package=package: "0.0" if asked == package else version(asked))
            assert name() != before


def forget_versions():
    _module_sources._version.cache_clear()
    _module_sources._distributions.cache_clear()
