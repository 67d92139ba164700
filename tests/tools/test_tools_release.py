"""Releasing a package of a small workspace: real git, real uv, real wheels."""

from __future__ import annotations

import datetime
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from release import ReleaseError, check_archives, check_request, ranges_of, release, tag_name
from workspace import find_uv, read_distributions

# uv builds and installs; a loaded machine takes long.
pytestmark = pytest.mark.timeout(600)

DAY = datetime.date(2026, 1, 2)
needs_uv = pytest.mark.skipif(find_uv() is None, reason="needs uv: run through ./dev test")
ROOT_PROJECT = """[project]
name = "small-workspace"
version = "0"
requires-python = "==3.11.*"
[tool.uv]
package = false
[tool.uv.workspace]
members = ["packages/*"]
"""
PROJECT = """[project]
name = "{name}"
version = "0.1.0"
readme = "README.md"
requires-python = ">=3.11"
dependencies = {dependencies}
[tool.uv.sources]
{sources}
[build-system]
requires = ["uv_build>=0.8,<1"]
build-backend = "uv_build"
[tool.uv.build-backend]
module-name = "{module}"
"""


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t.example", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "change")


@pytest.fixture
def workspace(template: Path, tmp_path: Path) -> Path:
    """Two packages: small-high depends on small-low in the range >=0.1,<0.2. A checkout of the test's own."""
    return Path(shutil.copytree(template, tmp_path / "checkout"))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("release") / "checkout"
    for name, dependencies in (("small-low", []), ("small-high", ["small-low>=0.1,<0.2"])):
        module = name.replace("-", "_")
        source = root / "packages" / name / "src" / module
        source.mkdir(parents=True)
        (source / "__init__.py").write_text('"""A module."""\n\n__all__ = ["NUMBER"]\nNUMBER = 1\n')
        (source / "py.typed").touch()
        (root / "packages" / name / "README.md").write_text("# Small\n")
        (root / "packages" / name / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- New.\n\n## 0.1.0\n\n- First.\n")
        sources = "small-low = { workspace = true }" if dependencies else ""
        text = PROJECT.format(name=name, module=module, dependencies=dependencies, sources=sources)
        (root / "packages" / name / "pyproject.toml").write_text(text)
    (root / "pyproject.toml").write_text(ROOT_PROJECT)
    (root / ".gitignore").write_text("/dist/\n.tools/\n")
    uv = find_uv()
    if uv is not None:
        subprocess.run([uv, "lock", "--quiet", "--offline"], cwd=root, check=True, timeout=300)
    git(root, "init", "-q", "-b", "main")
    commit(root)
    return root


def test_a_tag_names_its_package() -> None:
    assert tag_name("twinkle-mesh", "0.1.1") == "twinkle-mesh-v0.1.1"
    for name in read_distributions():
        subprocess.run(["git", "check-ref-format", f"refs/tags/{tag_name(name, '0.1.1')}"], check=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("small-mid", "0.1.1", "no package small-mid; there are small-high, small-low"),
        ("small-low", "0.1.0", "is at 0.1.0; 0.1.0 does not grow"),
        ("small-low", "0.0.9", "does not grow"),
        ("small-low", "0.1.1.dev1", None),
        ("small-low", "next", "'next' is not a version"),
        ("small-low", "0.1.01", "write the version as 0.1.1"),
        ("small-low", "0.2.0", r"small-high asks for small-low>=0.1,<0.2, which does not admit 0.2.0: widen its range"),
        ("small-high", "0.2.0", None),
    ],
)
def test_a_version_that_cannot_be_released_is_refused(workspace: Path, name: str, version: str, message: str | None) -> None:
    if message is None:
        assert check_request(workspace, name, version).name == name
        return
    with pytest.raises(ReleaseError, match=message):
        check_request(workspace, name, version)


def test_a_tree_that_is_not_clean_is_refused(workspace: Path) -> None:
    (workspace / "packages/small-high/new.txt").touch()
    with pytest.raises(ReleaseError, match=r"not clean(.|\n)*packages/small-high/new.txt"):
        check_request(workspace, "small-low", "0.1.1")


def test_an_existing_tag_is_refused_and_a_siblings_tag_is_not(workspace: Path) -> None:
    git(workspace, "tag", "small-high-v0.1.1")
    check_request(workspace, "small-low", "0.1.1")
    git(workspace, "tag", "small-low-v0.1.1")
    with pytest.raises(ReleaseError, match=r"the tag small-low-v0\.1\.1 exists"):
        check_request(workspace, "small-low", "0.1.1")


@needs_uv
@pytest.mark.parametrize(("notes", "message"), [("", "no '## Unreleased' section"), ("## Unreleased\n\n", "section of .* is empty")])
def test_a_release_without_news_is_refused(workspace: Path, notes: str, message: str) -> None:
    (workspace / "packages/small-low/CHANGELOG.md").write_text(f"# Changelog\n\n{notes}## 0.1.0\n\n- First.\n")
    commit(workspace)
    with pytest.raises(ReleaseError, match=message):
        release(workspace, "small-low", "0.1.1", dry_run=False, day=DAY)
    assert git(workspace, "status", "--porcelain") == ""


@needs_uv
def test_a_dry_run_does_everything_and_changes_nothing(workspace: Path) -> None:
    assert release(workspace, "small-high", "0.1.1", dry_run=True, day=DAY) == []
    assert git(workspace, "status", "--porcelain") == ""
    assert not (workspace / "dist").exists()
    assert list((workspace / ".tools").iterdir()) == []


@needs_uv
def test_a_release_bumps_heads_the_changelog_locks_and_builds(workspace: Path) -> None:
    archives = release(workspace, "small-low", "0.1.1", dry_run=False, day=DAY)
    assert [path.name for path in archives] == ["small_low-0.1.1-py3-none-any.whl", "small_low-0.1.1.tar.gz"]
    assert all(path.parent == workspace / "dist" for path in archives)
    assert git(workspace, "status", "--porcelain").split() == [
        *("M", "packages/small-low/CHANGELOG.md"),
        *("M", "packages/small-low/pyproject.toml"),
        *("M", "uv.lock"),
    ]
    assert read_distributions(workspace)["small-low"].version == "0.1.1"
    assert read_distributions(workspace)["small-high"].version == "0.1.0"
    changelog = (workspace / "packages/small-low/CHANGELOG.md").read_text()
    assert changelog == "# Changelog\n\n## 0.1.1 (2026-01-02)\n\n- New.\n\n## 0.1.0\n\n- First.\n"
    assert 'name = "small-low"\nversion = "0.1.1"' in (workspace / "uv.lock").read_text()
    with tarfile.open(archives[1]) as archive:
        assert "small_low-0.1.1/src/small_low/__init__.py" in archive.getnames()
    # The next one needs news, and a commit first.
    with pytest.raises(ReleaseError, match="not clean"):
        release(workspace, "small-low", "0.1.2", dry_run=True, day=DAY)
    commit(workspace)
    with pytest.raises(ReleaseError, match="no '## Unreleased' section"):
        release(workspace, "small-low", "0.1.2", dry_run=True, day=DAY)


@needs_uv
def test_a_package_that_does_not_import_alone_is_not_released(workspace: Path) -> None:
    (workspace / "packages/small-low/src/small_low/__init__.py").write_text("import small_high\n__all__ = []\n")
    commit(workspace)
    with pytest.raises(AssertionError, match="No module named 'small_high'"):
        release(workspace, "small-low", "0.1.1", dry_run=False, day=DAY)
    assert git(workspace, "status", "--porcelain") == ""


def test_archives_of_another_name_or_version_are_refused(workspace: Path, tmp_path: Path) -> None:
    package = read_distributions(workspace)["small-low"]
    with pytest.raises(ReleaseError, match=r"expected a wheel and a source archive of small_low-0\.1\.0, found"):
        check_archives(package, tmp_path)
    (tmp_path / "small_low-0.1.0.tar.gz").touch()
    with zipfile.ZipFile(tmp_path / "small_low-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small_low-0.1.0.dist-info/METADATA", "Name: small-low\nVersion: 0.0.9\n")
    with pytest.raises(ReleaseError, match=r"the wheel says small-low 0.0.9, not small-low 0.1.0"):
        check_archives(package, tmp_path)
    with zipfile.ZipFile(tmp_path / "small_low-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small_low-0.1.0.dist-info/METADATA", "Name: small-low\nVersion: 0.1.0\n")
        wheel.writestr("small_low/__init__.py", "")
    with pytest.raises(ReleaseError, match=r"lacks small_low/py.typed"):
        check_archives(package, tmp_path)


def test_every_package_here_could_take_its_next_patch_release() -> None:
    """Ranges between siblings admit it, and its version line can be found."""
    for package in read_distributions().values():
        major, minor, patch = package.version.split(".")
        assert (package.folder / "pyproject.toml").read_text().count(f'\nversion = "{package.version}"\n') == 1
        for sibling in read_distributions().values():
            for line in ranges_of(sibling, package.name):
                assert Requirement(line).specifier.contains(f"{major}.{minor}.{int(patch) + 1}")
