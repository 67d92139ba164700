"""Run a benchmark by name: `./dev bench NAME [ARGUMENTS]`; without a name, list them.

Each tools/bench/NAME.py is a script of its own whose docstring's first line says what it measures. A name that starts with an
underscore is a helper module, not a benchmark.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path


def benchmarks(folder: Path) -> dict[str, str]:
    """Name to the first line of the docstring, in alphabetical order."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.py")):
        if not path.name.startswith("_"):
            found[path.stem] = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
    return found


def main(folder: Path, arguments: list[str]) -> int:
    found = benchmarks(folder)
    if arguments and arguments[0] in found:
        # A process of its own: a benchmark that starts workers needs its own file to be the main module. It may import from tools/.
        path = os.pathsep.join(filter(None, (str(folder.parent), os.environ.get("PYTHONPATH"))))
        # -P: a benchmark's name may be that of a library.
        os.execve(sys.executable, [sys.executable, "-P", str(folder / f"{arguments[0]}.py"), *arguments[1:]], {**os.environ, "PYTHONPATH": path})
    wrong = bool(arguments) and arguments[0] not in ("-h", "--help")
    out = sys.stderr if wrong else sys.stdout
    if wrong:
        print(f"There is no benchmark {arguments[0]!r}.", file=out)
    print("Usage: ./dev bench NAME [ARGUMENTS]\n", file=out)
    width = max(map(len, found), default=0)
    for name, summary in found.items():
        print(f"  {name:{width}}  {summary}", file=out)
    if not found:
        print("  (tools/bench has none yet)", file=out)
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent, sys.argv[1:]))
