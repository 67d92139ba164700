"""Run the tests of one package with nothing else installed: `./dev test --alone NAME [PYTEST ARGUMENTS]`.

A new virtual environment takes the package's wheel, its dependencies in the locked versions (siblings as wheels of this checkout) and what
[tool.twinkle.test-needs] in the root pyproject.toml lists for it. So a test or a module that needs more than the package declares fails here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from changed import read_graph, requirement_name
from isolated import Environment, build
from workspace import ROOT, read_distributions


def needs_of(name: str) -> list[str]:
    """The requirements that the tests of a package have beside the package itself."""
    table: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["twinkle"]["test-needs"]
    return [*table["all"], *table[name]]


def siblings_of(names: set[str], graph: dict[str, set[str]]) -> set[str]:
    """These packages of the workspace and all that they depend on."""
    found = names & set(graph)
    while more := {dependency for name in found for dependency in graph[name]} - found:
        found |= more
    return found


def main(arguments: list[str]) -> int:
    distributions = read_distributions()
    if not arguments or arguments[0] not in distributions:
        print(f"alone: name one of {', '.join(distributions)}", file=sys.stderr)
        return 2
    name, *options = arguments
    needs = needs_of(name)
    tools = ROOT / ".tools"  # on the file system of the checkout, as uv's cache usually is: installing makes links
    tools.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="alone-", dir=tools) as temporary:
        folder = Path(temporary)
        wheels = folder / "wheels"
        wheels.mkdir()
        for sibling in sorted(siblings_of({name, *map(requirement_name, needs)}, read_graph(ROOT))):
            build(distributions[sibling], wheels)
        environment = Environment(folder / "environment", wheels, bytecode=folder / "bytecode")
        environment.install(f"{name}=={distributions[name].version}", *needs)
        environment.check()
        command = [environment.python, "-m", "pytest", f"packages/{name}/tests", *options]
        variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
