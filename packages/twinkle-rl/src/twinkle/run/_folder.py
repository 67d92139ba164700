"""The folder that holds everything a run writes."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from twinkle._errors import RunFolderError


class RunFolder:
    """Creates and writes a run's folder; every failure names the folder and what to do.

    Files: `config.json` (the resolved configuration), `metrics.jsonl` (a line a step), `summary.json`, `rollouts.jsonl` when recorded,
    `curves.png`, `checkpoint/` (the trained model), `training-state/` (what a run is resumed from).

    Args:
        path: where to put it; must not hold an earlier run.

    Raises:
        RunFolderError: it exists and is not empty, cannot be created, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        with self._explained("create"):
            self.path.mkdir(parents=True, exist_ok=True)
            taken = next(self.path.iterdir(), None)
        if taken is not None:
            raise RunFolderError(f"run folder {self.path} is not empty (it holds {taken.name}); name another one with --run-dir, or move it away")
        self._probe()

    @classmethod
    def default(cls, command: str) -> RunFolder:
        """A new folder `runs/<command>-<time>` under the current folder."""
        base = Path("runs") / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"
        path, count = base, 1
        while path.exists():
            count += 1
            path = base.with_name(f"{base.name}-{count}")
        return cls(path)

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """The folder of an earlier run, to go on in.

        Raises:
            RunFolderError: it is not there, or cannot be written.
        """
        folder = cls.__new__(cls)
        folder.path = path.expanduser().absolute()
        if not folder.path.is_dir():
            raise RunFolderError(f"run folder {folder.path} is not there; give the folder of an earlier run")
        folder._probe()
        return folder

    def cut_lines(self, name: str, last_step: int) -> list[dict[str, Any]]:
        """Drop the lines of a JSON Lines file that belong to later steps, and one that was cut off; returns those that stay."""
        target = self.path / name
        if not target.exists():
            return []
        kept: list[str] = []
        values: list[dict[str, Any]] = []
        for line in target.read_text(encoding="utf-8").splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                break  # the process died while it wrote this line
            if value["step"] <= last_step:
                kept.append(line + "\n")
                values.append(value)
        partial = target.with_name(f".{name}.partial")
        with self._explained("write"):
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(target)
        return values

    def write_json(self, name: str, value: Mapping[str, Any]) -> Path:
        """Write one JSON file whole or not at all (a temporary name, then a rename)."""
        target = self.path / name
        partial = target.with_name(f".{name}.partial")
        with self._explained("write"):
            partial.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
            partial.replace(target)
        return target

    def append_line(self, name: str, value: Mapping[str, Any]) -> None:
        """Append one JSON line; the operating system has it when this returns."""
        with self._explained("write"), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(value, default=float) + "\n")

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Give the path of a file or folder to be written by somebody else, with the same error messages."""
        with self._explained("write"):
            yield self.path / name

    def _probe(self) -> None:
        """Write and delete 1 MiB now: a full or read-only disk shows before the work starts, not after it."""
        probe = self.path / ".probe"
        with self._explained("write"):
            try:
                with probe.open("wb") as file:
                    file.write(bytes(1 << 20))
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                probe.unlink(missing_ok=True)

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (RunFolderError, TimeoutError, ConnectionError):  # the last two are of a worker that writes, not of the disk
            raise
        except (OSError, SafetensorError) as error:  # safetensors wraps what the disk said
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise RunFolderError(f"cannot {verb} run folder {self.path}: {reason}{self._free()}; choose another one with --run-dir") from error

    def _free(self) -> str:
        """How much room there is, where that can be said."""
        parent = self.path
        while not parent.exists() and parent != parent.parent:
            parent = parent.parent
        try:
            free_bytes = shutil.disk_usage(parent).free
        except OSError:
            return ""
        return f" ({free_bytes / 2**20:.0f} MiB free there)"
