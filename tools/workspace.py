"""What the workspace consists of: its root, its packages as their pyproject.toml files say, and the uv that ./dev found."""

from __future__ import annotations

import os
import shutil
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Distribution:
    """One package of the workspace."""

    folder: Path

    @cached_property
    def pyproject(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text())

    @property
    def project(self) -> dict[str, Any]:
        return self.pyproject["project"]

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def version(self) -> str:
        return self.project["version"]

    @property
    def module(self) -> str:
        """The one top-level name that it installs."""
        return self.pyproject["tool"]["uv"]["build-backend"]["module-name"]


def read_distributions(root: Path = ROOT) -> dict[str, Distribution]:
    """Name to distribution, in alphabetical order."""
    found = [Distribution(path.parent) for path in sorted((root / "packages").glob("*/pyproject.toml"))]
    return {distribution.name: distribution for distribution in found}


def find_uv() -> str | None:
    """The uv that ./dev uses: TWINKLE_UV, else the one in .tools, else the one on the PATH."""
    return os.environ.get("TWINKLE_UV") or shutil.which("uv", path=f"{ROOT / '.tools'}{os.pathsep}{os.environ.get('PATH', '')}")
