"""Resolve the workspace into uv.lock, and keep the names of package hosts out of it.

    ./dev lock                      # keep the locked versions where the requirements still allow them
    ./dev lock --upgrade            # take the newest versions
    ./dev lock --upgrade-package X  # only of X

uv writes the address of every file into its lock. Each machine may reach the same files through another index, so this
writes only what identifies them: the registry becomes `wheelhouse`, an address becomes the file's name, hash and size stay.
uv 0.13 reads that form: `uv lock --check`, `uv tree` and `uv export` work, also offline. Only a bare `uv sync` does not: it
would look for the files in a folder `wheelhouse`; `./dev setup` exports and installs instead.

Nothing is built while resolving: packages that exist as sources only have their metadata in pyproject.toml
([[tool.uv.dependency-metadata]]), for exactly the version that is locked. (uv's --no-build would refuse such packages.)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from workspace import ROOT, find_uv

REGISTRY = re.compile(r'\{ registry = "[a-z]+://[^"]*" \}')
FILE_ADDRESS = re.compile(r'\burl = "[a-z]+://[^"]*/([^/"#?]+)(?:[#?][^"]*)?"')
# An index or a folder of wheels from the environment would change what the lock says about its sources.
INDEX_VARIABLES = (
    "UV_INDEX",
    "UV_INDEX_URL",
    "UV_DEFAULT_INDEX",
    "UV_EXTRA_INDEX_URL",
    "UV_FIND_LINKS",
    "UV_NO_INDEX",
    "UV_TORCH_BACKEND",
)


class RelockError(RuntimeError):
    """The lock could not be made, or says what it must not."""


def without_hosts(lock_text: str) -> str:
    """The lock with file names in place of addresses. Idempotent; raises RelockError if an address of another form is left."""
    text = FILE_ADDRESS.sub(r'path = "\1"', REGISTRY.sub('{ registry = "wheelhouse" }', lock_text))
    left = sorted({line.strip() for line in text.splitlines() if "://" in line})
    if left:
        raise RelockError(f"{len(left)} lines still name a host, in a form that tools/relock.py does not know: {left[0]}")
    return text


def metadata_problems(pyproject: dict[str, Any], lock: dict[str, Any]) -> list[str]:
    """One line for each source-only package whose metadata pyproject.toml lacks, or gives for another version than the locked one."""
    given = {entry["name"]: entry["version"] for entry in pyproject["tool"]["uv"].get("dependency-metadata", [])}
    locked: dict[str, set[str]] = {name: set() for name in given}
    source_only: set[str] = set()
    for package in lock["package"]:
        if package["name"] in given:
            locked[package["name"]].add(package["version"])
        if "sdist" in package and not package.get("wheels"):
            source_only.add(package["name"])
    problems = [f"{name} is locked from sources: give its metadata in [[tool.uv.dependency-metadata]]" for name in sorted(source_only - set(given))]
    for name, version in sorted(given.items()):
        if locked[name] != {version}:
            taken = ", ".join(sorted(locked[name])) or "no version"
            problems.append(f"{name}: pyproject.toml has the metadata of {version}, the lock takes {taken}")
    return problems


def relock(root: Path, uv: str, arguments: list[str]) -> bool:
    """Lock the workspace at `root` again; True if uv.lock changed. On failure the old lock stays."""
    lock_path = root / "uv.lock"
    before = lock_path.read_text() if lock_path.exists() else None
    environment = {name: value for name, value in os.environ.items() if name not in INDEX_VARIABLES}
    try:
        subprocess.run([uv, "lock", "--python", sys.executable, *arguments], cwd=root, env=environment, check=True)
        text = without_hosts(lock_path.read_text())
        problems = metadata_problems(tomllib.loads((root / "pyproject.toml").read_text()), tomllib.loads(text))
        if problems:
            raise RelockError("; ".join(problems))
    except (subprocess.CalledProcessError, RelockError):
        if before is not None:
            lock_path.write_text(before)
        raise
    with tempfile.NamedTemporaryFile("w", dir=root, prefix=".uv.lock.", delete=False) as handle:
        handle.write(text)
    os.replace(handle.name, lock_path)
    return text != before


def main() -> int:
    uv = find_uv()
    if uv is None:
        print("relock: uv was not found: run ./dev lock, which installs it", file=sys.stderr)
        return 1
    try:
        changed = relock(ROOT, uv, sys.argv[1:])
    except subprocess.CalledProcessError as error:
        return error.returncode
    except RelockError as error:
        print(f"relock: {error}", file=sys.stderr)
        return 1
    print("uv.lock changed" if changed else "uv.lock is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
