"""Which packages a change touches, with every package that depends on one of them: the matrix of the per-package jobs.

    python tools/changed.py BASE [HEAD]      # a JSON list of distribution names, in alphabetical order

A file below packages/<dist>/ touches that package. A file that everything is built or checked with touches all of them: the lock and whatever else
lies at the root, tools/, .github/ and .ci/. Files below docs/, examples/ and tests/ touch none here: the integration job runs always. If BASE is no
commit of this clone (a new branch, a forced push), all are touched.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHARED_FOLDERS = ("tools", ".github", ".ci")


def requirement_name(requirement: str) -> str:
    """The distribution that a requirement names: 'twinkle-remote' for 'twinkle-remote[ray]>=0.1,<0.2'."""
    return re.split(r"[\s\[<>=!~;@]", requirement, maxsplit=1)[0].lower()


def _requirement_names(project: dict[str, Any]) -> set[str]:
    extras = project.get("optional-dependencies", {}).values()
    return {requirement_name(requirement) for group in (project.get("dependencies", []), *extras) for requirement in group}


def read_graph(root: Path) -> dict[str, set[str]]:
    """Distribution name to the workspace packages that it depends on directly, extras included."""
    projects = [tomllib.loads(path.read_text())["project"] for path in sorted((root / "packages").glob("*/pyproject.toml"))]
    names = {project["name"] for project in projects}
    return {project["name"]: (_requirement_names(project) & names) - {project["name"]} for project in projects}


def touched_packages(files: Iterable[str], graph: dict[str, set[str]]) -> set[str]:
    """The packages that a change of these files (paths from the root) touches, dependants included."""
    touched: set[str] = set()
    for file in files:
        parts = file.split("/")
        if len(parts) == 1 or parts[0] in SHARED_FOLDERS:
            return set(graph)
        # A package that has been removed has no dependants left to test.
        if parts[0] == "packages" and len(parts) > 2 and parts[1] in graph:
            touched.add(parts[1])
    while True:
        dependants = {name for name, dependencies in graph.items() if dependencies & touched} - touched
        if not dependants:
            return touched
        touched |= dependants


def changed_files(root: Path, base: str, head: str) -> list[str] | None:
    """The files that differ between the merge base of both commits and `head`; None if `base` is not known here."""
    known = subprocess.run(["git", "cat-file", "-e", f"{base}^{{commit}}"], cwd=root, stderr=subprocess.DEVNULL, check=False)
    if known.returncode != 0:
        return None
    command = ["git", "diff", "--name-only", "--no-renames", "-z", f"{base}...{head}"]
    return [name for name in subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0") if name]


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    root = Path(subprocess.run(["git", "rev-parse", "--show-toplevel"], check=True, capture_output=True, text=True).stdout.strip())
    graph = read_graph(root)
    files = changed_files(root, arguments[0], arguments[1] if len(arguments) == 2 else "HEAD")
    print(json.dumps(sorted(graph if files is None else touched_packages(files, graph))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
