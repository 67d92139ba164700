"""The matrix of per-package jobs: what a change touches, and what depends on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from changed import changed_files, read_graph, touched_packages
from workspace import ROOT

GRAPH = {"mesh": set(), "remote": {"mesh"}, "data": {"remote", "mesh"}, "sync": {"remote"}, "glue": {"data", "sync"}}


@pytest.mark.parametrize(
    ("files", "touched"),
    [
        (["packages/glue/src/x.py"], {"glue"}),
        (["packages/sync/README.md"], {"sync", "glue"}),
        (["packages/mesh/src/x.py"], set(GRAPH)),
        (["packages/data/a.py", "packages/sync/b.py"], {"data", "sync", "glue"}),
        (["uv.lock"], set(GRAPH)),
        (["tools/relock.py"], set(GRAPH)),
        (["README.md"], set(GRAPH)),
        ([".github/workflows/ci.yml"], set(GRAPH)),
        (["docs/architecture.md", "tests/integration/test_x.py", "examples/sft.py"], set()),
        (["packages/README.md"], set()),
        (["packages/removed/src/x.py"], set()),
        ([], set()),
    ],
)
def test_a_change_touches_its_packages_and_their_dependants(files: list[str], touched: set[str]) -> None:
    assert touched_packages(files, GRAPH) == touched


def test_the_graph_has_every_package_and_counts_extras() -> None:
    graph = read_graph(ROOT)
    assert set(graph) == {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    assert graph["twinkle-mesh"] == set()
    assert {"twinkle-megatron", "twinkle-vllm"} <= graph["twinkle-rl"]


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t.example", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_command_compares_commits_and_an_unknown_base_touches_all(tmp_path: Path) -> None:
    for name, dependencies in GRAPH.items():
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\ndependencies = {[f"{d}>=0.1,<0.2" for d in sorted(dependencies)]}\n'
        )
    _git(tmp_path, "init", "-q", "-b", "main")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-q", "-m", "first")
    base = _git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "packages/sync/new.py").write_text("")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-q", "-m", "second")

    def command(commit: str) -> str:
        script = [sys.executable, str(ROOT / "tools/changed.py"), commit]
        return subprocess.run(script, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    assert changed_files(tmp_path, base, "HEAD") == ["packages/sync/new.py"]
    assert command(base) == '["glue", "sync"]'
    assert command("HEAD") == "[]"
    assert command("0" * 40) == '["data", "glue", "mesh", "remote", "sync"]'
