"""Wheels of every package, and new virtual environments outside the workspace to install them into."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from isolated import Environment, build, uv
from workspace import Distribution, find_uv, read_distributions


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "distribution" in metafunc.fixturenames:
        # Of session scope, so that the tests of one distribution stand together and share its environment.
        distributions = read_distributions()
        metafunc.parametrize("distribution", list(distributions.values()), ids=list(distributions), scope="session")


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder outside the workspace, on the file system of uv's cache, so that installing makes links instead of copies."""
    if find_uv() is None:
        pytest.skip("needs uv: run through ./dev test")
    folder = tmp_path_factory.mktemp("packaging")
    cache = Path(uv("cache", "dir", cwd=folder).strip())
    cache.mkdir(parents=True, exist_ok=True)
    if folder.stat().st_dev == cache.stat().st_dev:
        yield folder
        return
    beside = Path(tempfile.mkdtemp(prefix="twinkle-packaging-", dir=cache.parent))
    try:
        yield beside
    finally:
        shutil.rmtree(beside)


@pytest.fixture(scope="session")
def wheels(outside: Path) -> dict[str, Path]:
    """Distribution name to its wheel."""
    folder = outside / "wheels"
    folder.mkdir()
    return {name: build(distribution, folder) for name, distribution in read_distributions().items()}


@pytest.fixture(scope="session")
def environment(distribution: Distribution, wheels: dict[str, Path], outside: Path) -> Iterator[Environment]:
    """The distribution with its declared dependencies, without extras. The test that installs extras into it comes last."""
    environment = Environment(outside / "environment", wheels[distribution.name].parent, bytecode=outside / "bytecode")
    environment.install(f"{distribution.name}=={distribution.version}")
    yield environment
    shutil.rmtree(environment.folder)
