"""Each package beside all others: what importing it must not load, although it is installed; what it exports; its files."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from isolated import run
from workspace import ROOT, Distribution, read_distributions

NOT_LOADED = {
    "twinkle-mesh": ("torch", "ray", "transformers"),
    "twinkle-remote": ("torch", "ray", "transformers"),
    "twinkle-data": ("torch", "ray", "transformers", "datasets", "reasoning_gym"),
    "twinkle-train": ("ray", "transformers", "megatron", "vllm"),
    "twinkle-sync": ("ray", "transformers", "megatron", "vllm"),
    "twinkle-megatron": ("ray", "vllm"),
    "twinkle-transformers": ("ray", "vllm", "megatron"),
    "twinkle-vllm": ("ray", "vllm", "megatron", "transformers"),
    "twinkle-client": ("torch", "ray", "transformers", "peft", "numpy", "pandas", "fastapi"),
    "twinkle-server": ("torch", "ray", "transformers", "megatron", "vllm"),
    "twinkle-rl": ("torch", "ray", "transformers", "megatron", "vllm", "matplotlib"),
}


def test_importing_it_loads_no_engine(distribution: Distribution, tmp_path: Path) -> None:
    names = NOT_LOADED[distribution.name]
    code = f"import sys, {distribution.module}; print([name for name in {names!r} if name in sys.modules])"
    assert run([sys.executable, "-c", code], cwd=tmp_path).strip() == "[]"


def test_every_exported_name_exists_and_is_documented(distribution: Distribution, tmp_path: Path) -> None:
    # Plain data (a type alias, a constant) has no docstring of its own.
    code = f"""
import inspect, {distribution.module} as module
assert module.__doc__ and len(set(module.__all__)) == len(module.__all__)
for name in module.__all__:
    value = getattr(module, name)
    if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value):
        print(name)
"""
    assert run([sys.executable, "-c", code], cwd=tmp_path).split() == [], "exported without a docstring"


def test_its_plugins_and_commands_load(distribution: Distribution, tmp_path: Path) -> None:
    declared = {"console_scripts": distribution.project.get("scripts", {}), **distribution.project.get("entry-points", {})}
    for group, entries in declared.items():
        for name, value in entries.items():
            installed = [entry for entry in entry_points(group=group, name=name) if entry.dist and entry.dist.name == distribution.name]
            assert [entry.value for entry in installed] == [value]
            module, _, attribute = value.partition(":")
            run([sys.executable, "-c", f"from {module} import {attribute}"], cwd=tmp_path)


def test_it_has_its_files(distribution: Distribution) -> None:
    source = distribution.folder / "src" / distribution.module
    for path in (distribution.folder / "LICENSE", distribution.folder / "README.md", distribution.folder / "CHANGELOG.md", source / "__init__.py"):
        assert path.read_text().strip(), f"{path.name} is empty"
    assert (source / "py.typed").exists()
    assert list((distribution.folder / "tests").glob("test_*.py")), "a package without tests"
    assert (distribution.folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert re.search(rf"^## \[?{re.escape(distribution.version)}\b", (distribution.folder / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_folders_that_its_readme_has_pip_install_are_all_that_it_needs(distribution: Distribution) -> None:
    _, said, text = (distribution.folder / "README.md").read_text().partition("from a clone")
    if not said:
        return
    given = re.findall(r"(?:packages|\.)/(twinkle-[a-z]+)(?:\[([a-z,]+)\])?", text[:1200])
    folders, known = {name for name, _ in given}, read_distributions()
    assert distribution.name in folders
    for name, extras in given:
        project = known[name].project
        needed = [
            *project.get("dependencies", []),
            *(each for extra in filter(None, extras.split(",")) for each in project["optional-dependencies"][extra]),
        ]
        missing = {match[0] for each in needed if (match := re.match(r"twinkle-[a-z]+", each))} - folders
        assert not missing, f"{name}[{extras}] needs {sorted(missing)}, which are on no index"


def test_the_root_has_its_files_and_lists_every_package() -> None:
    for name in ("LICENSE", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        assert (ROOT / name).read_text().strip()
    readme = (ROOT / "README.md").read_text()
    assert [name for name in read_distributions() if name not in readme] == []


def test_test_files_have_names_of_their_own() -> None:
    paths = [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests/**/test_*.py")]
    names = [path.name for path in paths]
    assert sorted(names) == sorted(set(names))


# Written in pieces, so that this file does not match.
PACKAGE_HOSTS = ("pypi" + r"\.org", "python" + "hosted", "npm" + r"js\.", "download" + r"\.pytorch", "deb" + r"\.debian\.org")
MACHINE_PATHS = (r"(?<![\w./])/" + "(?:work|root|home|tmp)" + r"/\w",)


def _tracked_texts() -> list[tuple[str, str]]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    texts: list[tuple[str, str]] = []
    for name in filter(None, listing.stdout.split("\0")):
        try:
            texts.append((name, (ROOT / name).read_text()))
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # an image, or a file deleted and not yet committed
    return texts


@pytest.mark.parametrize("patterns", [PACKAGE_HOSTS, MACHINE_PATHS], ids=["package hosts", "machine paths"])
def test_no_tracked_file_names(patterns: tuple[str, ...]) -> None:
    pattern = re.compile("|".join(patterns))
    found = [
        f"{name}:{number}: {line.strip()[:160]}"
        for name, text in _tracked_texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []
