"""./dev on a small workspace of its own: real uv, real virtual environments, nothing to download."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from workspace import ROOT, find_uv

UV = find_uv()
pytestmark = pytest.mark.skipif(UV is None, reason="needs uv: run through ./dev test")

PYPROJECT = """
[project]
name = "small-workspace"
version = "0"
requires-python = "==3.11.*"
[project.optional-dependencies]
cpu = []
cuda = []
[tool.uv]
package = false
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A workspace without dependencies, in a folder with a space in its name."""
    assert UV is not None
    root = tmp_path / "a workspace"
    (root / "packages/one").mkdir(parents=True)
    (root / ".tools").mkdir()
    (root / ".tools/uv").symlink_to(Path(UV).resolve())
    shutil.copy(ROOT / "dev", root / "dev")
    (root / "tools/bench").mkdir(parents=True)
    for name in ("relock.py", "workspace.py", "bench/__main__.py"):
        shutil.copy(ROOT / "tools" / name, root / "tools" / name)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "packages/one/pyproject.toml").write_text('[project]\nname = "one"\nversion = "0"\n')
    subprocess.run([UV, "lock", "--quiet", "--offline"], cwd=root, check=True, timeout=60)
    return root


def _dev(workspace: Path, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "UV_OFFLINE": "1", **environment}
    return subprocess.run(
        [str(workspace / "dev"), *arguments], cwd=cwd or workspace, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def _stub(workspace: Path, name: str) -> None:
    """An installed command that prints where it runs and what it is given."""
    path = workspace / ".venv/bin" / name
    path.unlink(missing_ok=True)  # python is a link to the interpreter itself
    path.write_text('#!/bin/sh\npwd\necho "$0" "$@"\n')
    path.chmod(0o755)


def test_setup_makes_the_environment_once(workspace: Path) -> None:
    first = _dev(workspace, "setup")
    assert first.returncode == 0, first.stderr
    assert "setting up .venv for cpu" in first.stderr
    marker = workspace / ".venv/marker"
    marker.touch()
    second = _dev(workspace, "setup")
    assert second.returncode == 0, second.stderr
    assert "setting up" not in second.stderr
    assert marker.exists()


def test_setup_runs_again_when_the_platform_or_a_requirement_changes(workspace: Path) -> None:
    assert "for cpu" in _dev(workspace, "setup", "cpu").stderr
    assert "setting up .venv for cuda" in _dev(workspace, "setup", "cuda").stderr
    # Without an argument it stays with the last platform.
    assert "for cuda" in _dev(workspace, "setup").stderr
    (workspace / "packages/one/pyproject.toml").write_text('[project]\nname = "one"\nversion = "1"\n')
    assert "setting up .venv for cuda" in _dev(workspace, "setup").stderr


def test_an_index_in_the_environment_does_not_make_the_lock_stale(workspace: Path) -> None:
    result = _dev(
        workspace, "setup", UV_INDEX="https://index.example/simple", UV_DEFAULT_INDEX="https://other.example/simple", UV_FIND_LINKS="/nowhere"
    )
    assert result.returncode == 0, result.stderr


def test_a_uv_of_another_release_is_not_used(workspace: Path, tmp_path: Path) -> None:
    right = (workspace / ".tools/uv").resolve()
    (workspace / ".tools/uv").unlink()
    (workspace / ".tools/uv").write_text("#!/bin/sh\necho uv 0.1.0\n")
    (workspace / ".tools/uv").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").symlink_to(right)
    result = _dev(workspace, "setup", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert result.returncode == 0, result.stderr
    assert "installing uv" not in result.stderr


def test_a_stale_lock_is_an_error_that_names_the_remedy(workspace: Path) -> None:
    pyproject = workspace / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("cpu = []", 'cpu = ["packaging"]'))
    result = _dev(workspace, "setup")
    assert result.returncode == 1
    assert "run ./dev lock" in result.stderr


def test_run_hands_its_arguments_to_twinkle_in_the_callers_folder(workspace: Path, tmp_path: Path) -> None:
    assert _dev(workspace, "setup").returncode == 0
    _stub(workspace, "twinkle")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = str(workspace / ".venv/bin/twinkle")
    assert _dev(workspace, "run", cwd=elsewhere).stdout.splitlines() == [str(elsewhere), f"{command} grpo"]
    assert _dev(workspace, "run", "grpo", "--seed", "1", cwd=elsewhere).stdout.splitlines() == [str(elsewhere), f"{command} grpo --seed 1"]


def test_test_runs_pytest_in_the_root_and_full_takes_every_test(workspace: Path, tmp_path: Path) -> None:
    assert _dev(workspace, "setup").returncode == 0
    _stub(workspace, "python")
    lines = _dev(workspace, "test", "--full", "-k", "a b", cwd=tmp_path).stdout.splitlines()
    assert lines[0] == str(workspace)
    assert lines[1].endswith("-m pytest -m full or not full -k a b")


def test_setup_refuses_an_unknown_platform(workspace: Path) -> None:
    result = _dev(workspace, "setup", "tpu")
    assert result.returncode == 1
    assert "cpu or cuda" in result.stderr


def test_an_unknown_command_shows_the_help_and_fails(workspace: Path) -> None:
    result = _dev(workspace, "tset")
    assert result.returncode == 2
    assert "unknown command 'tset'" in result.stderr
    assert "Usage" in result.stderr


def test_help_says_what_the_machine_needs(workspace: Path) -> None:
    result = _dev(workspace, "help", cwd=Path("/"))
    assert result.returncode == 0
    for word in ("setup", "run", "test", "lint", "bench", "lock", "python3.11", "gcc", "apt-get install"):
        assert word in result.stdout


def test_bench_lists_the_benchmarks_and_runs_one(workspace: Path) -> None:
    (workspace / "tools/bench/twice.py").write_text('"""Doubles a number."""\nimport sys\nprint(2 * int(sys.argv[1]))\n')
    (workspace / "tools/bench/_helper.py").write_text("")
    listing = _dev(workspace, "bench")
    assert listing.returncode == 0
    assert "twice  Doubles a number." in listing.stdout
    assert "_helper" not in listing.stdout
    assert _dev(workspace, "bench", "twice", "21").stdout == "42\n"
    unknown = _dev(workspace, "bench", "thrice")
    assert unknown.returncode == 2
    assert "no benchmark 'thrice'" in unknown.stderr


def test_lock_leaves_a_lock_that_is_right_alone(workspace: Path) -> None:
    before = (workspace / "uv.lock").read_text()
    result = _dev(workspace, "lock")
    assert result.returncode == 0, result.stderr
    assert "up to date" in result.stdout
    assert (workspace / "uv.lock").read_text() == before
