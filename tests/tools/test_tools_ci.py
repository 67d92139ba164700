"""The workflow of the continuous integration: parsed, and its own lines run over histories of a small repository."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from alone import needs_of, siblings_of
from changed import read_graph, requirement_name
from packaging.requirements import Requirement
from workspace import ROOT, read_distributions

GRAPH = {"mesh": set(), "remote": {"mesh"}, "train": {"remote"}, "glue": {"train"}}


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]


def runs(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t.example", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def commit(folder: Path, *files: str) -> str:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        with (folder / file).open("a") as handle:
            handle.write("# more\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, dependencies in GRAPH.items():
        (tmp_path / "packages" / name).mkdir(parents=True)
        project = f'[project]\nname = "{name}"\ndependencies = {[f"{d}>=0.1,<0.2" for d in sorted(dependencies)]}\n'
        (tmp_path / "packages" / name / "pyproject.toml").write_text(project)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/changed.py", tmp_path / "tools/changed.py")
    (tmp_path / "uv.lock").touch()
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, "README.md")
    return tmp_path


def matrix(jobs: dict[str, Any], repository: Path, base: str) -> list[str]:
    """What the workflow's own step writes as its output, and so the matrix of the package jobs."""
    (step,) = (step for step in jobs["changes"]["steps"] if step.get("id") == "changed")
    output = repository.parent / "github-output"
    output.write_text("")
    environment = {**os.environ, "BASE": base, "GITHUB_OUTPUT": str(output)}
    subprocess.run(["bash", "-e", "-c", step["run"]], cwd=repository, env=environment, check=True, timeout=60)
    key, _, value = output.read_text().strip().partition("=")
    assert jobs["changes"]["outputs"][key] == "${{ steps.changed.outputs.packages }}"
    return json.loads(value)


def test_every_changed_package_and_what_depends_on_it_has_a_job(jobs: dict[str, Any], repository: Path) -> None:
    base = git(repository, "rev-parse", "HEAD")
    commit(repository, "packages/train/src/x.py")
    assert matrix(jobs, repository, base) == ["glue", "train"]
    commit(repository, "packages/remote/src/y.py")
    # All commits since the base count, not the last alone.
    assert matrix(jobs, repository, base) == ["glue", "remote", "train"]


@pytest.mark.parametrize("file", ["uv.lock", "pyproject.toml", "dev", "new-at-the-root", ".ci/run", "tools/x.py", "packages/mesh/src/x.py"])
def test_a_change_of_the_root_the_lock_or_the_lowest_package_means_all(jobs: dict[str, Any], repository: Path, file: str) -> None:
    base = git(repository, "rev-parse", "HEAD")
    commit(repository, file)
    assert matrix(jobs, repository, base) == sorted(GRAPH)


@pytest.mark.parametrize("file", ["docs/a.md", "examples/a.py", "tests/integration/test_a.py"])
def test_what_belongs_to_no_package_has_no_package_job(jobs: dict[str, Any], repository: Path, file: str) -> None:
    base = git(repository, "rev-parse", "HEAD")
    commit(repository, file)
    assert matrix(jobs, repository, base) == []


def test_a_branch_is_compared_with_where_it_left_main(jobs: dict[str, Any], repository: Path) -> None:
    git(repository, "checkout", "-q", "-b", "topic")
    commit(repository, "packages/glue/x.py")
    git(repository, "checkout", "-q", "main")
    newer = commit(repository, "packages/mesh/x.py")
    git(repository, "checkout", "-q", "topic")
    assert matrix(jobs, repository, newer) == ["glue"]


def test_moved_and_deleted_files_touch_where_they_were(jobs: dict[str, Any], repository: Path) -> None:
    base = commit(repository, "packages/train/a.py", "packages/glue/b.py")
    git(repository, "mv", "packages/train/a.py", "packages/glue/a.py")
    git(repository, "commit", "-q", "-m", "move")
    assert matrix(jobs, repository, base) == ["glue", "train"]
    base = git(repository, "rev-parse", "HEAD")
    git(repository, "rm", "-q", "packages/glue/b.py")
    git(repository, "commit", "-q", "-m", "remove")
    assert matrix(jobs, repository, base) == ["glue"]


@pytest.mark.parametrize("base", ["0" * 40, "f" * 40, ""])
def test_a_base_that_is_not_there_means_all(jobs: dict[str, Any], repository: Path, base: str) -> None:
    assert matrix(jobs, repository, base) == sorted(GRAPH)


def test_the_package_jobs_take_their_matrix_from_that_step_and_install_one_package_each(jobs: dict[str, Any]) -> None:
    job = jobs["package"]
    assert job["needs"] == "changes"
    assert job["if"] == "needs.changes.outputs.packages != '[]'"
    assert job["strategy"]["matrix"] == {"package": "${{ fromJSON(needs.changes.outputs.packages) }}"}
    assert job["strategy"]["fail-fast"] is False
    # --alone makes an environment with the one package; no other line sets up the workspace.
    assert runs(job) == ['./dev test --alone "${{ matrix.package }}"']


def test_one_job_takes_what_needs_more_than_one_package_always(jobs: dict[str, Any]) -> None:
    assert set(jobs) == {"changes", "lint", "package", "integration"}
    assert runs(jobs["integration"]) == ["./dev test tests"]
    assert "if" not in jobs["integration"]
    assert "needs" not in jobs["integration"]


def test_every_job_ends_and_histories_are_fetched(jobs: dict[str, Any]) -> None:
    assert all(0 < job["timeout-minutes"] <= 60 for job in jobs.values())
    assert jobs["changes"]["steps"][0]["with"] == {"fetch-depth": 0}
    # Event data goes through the environment: in a line of shell it could be code.
    assert not [line for job in jobs.values() for line in runs(job) if "github.event" in line]


def test_alone_refuses_a_name_that_is_no_package() -> None:
    result = subprocess.run([sys.executable, str(ROOT / "tools/alone.py"), "twinkle-mehs"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "twinkle-mesh" in result.stderr


def imported(folder: Path) -> dict[str, str]:
    """Top-level modules that the files of a folder import, those in scripts that they write included, with a file that does."""
    found: dict[str, str] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("importorskip") and isinstance(node.args[0], ast.Constant):
                names = [str(node.args[0].value)]
            found.update({name.partition(".")[0]: path.name for name in names})
    return found


def closure(names: set[str]) -> set[str]:
    """These distributions and, as far as they are installed here, what they require without extras."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop().lower()
        if name in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or []
        except ModuleNotFoundError:
            continue
        todo += [requirement_name(line) for line in lines if "extra ==" not in line]
    return found


@pytest.mark.parametrize("name", read_distributions())
def test_what_the_tests_of_a_package_import_is_in_its_needs(name: str) -> None:
    distributions = read_distributions()
    wanted = {requirement_name(line) for line in needs_of(name)} | {name}
    for line in needs_of(name):
        requirement = Requirement(line)
        extras = distributions[requirement.name].project["optional-dependencies"] if requirement.extras else {}
        wanted |= {requirement_name(inner) for extra in requirement.extras for inner in extras[extra]}
    siblings = siblings_of(wanted, read_graph(ROOT))
    there = closure(wanted | {requirement_name(line) for sibling in siblings for line in distributions[sibling].project["dependencies"]})
    modules = {distributions[sibling].module for sibling in siblings}
    modules |= {module for module, owners in packages_distributions().items() if {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} & there}
    local = {path.stem for folder in (ROOT / "tools", distributions[name].folder / "tests") for path in folder.rglob("*.py")}
    missing = {module: file for module, file in imported(distributions[name].folder / "tests").items() if module not in modules | local}
    missing = {module: file for module, file in missing.items() if module not in sys.stdlib_module_names}
    assert missing == {}, f"add them to {name} in [tool.twinkle.test-needs] of the root pyproject.toml"
