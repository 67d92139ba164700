"""Folders that are whole or not there: written aside, checksummed, forced to disk, renamed.

Their names are random; nothing that a client says is in a path.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ._errors import ConfigError, Failed

MANIFEST = "manifest.json"
_NAME = re.compile(r"[0-9a-f]{32}")
_CHUNK_BYTES = 1 << 20


class Folders:
    """The server's data folder: `whole` holds finished folders, `unfinished` those that are being written or deleted."""

    def __init__(self, root: Path) -> None:
        # Absolute: workers of the runtime may have another working folder.
        self._whole = root.absolute() / "whole"
        self._unfinished = root.absolute() / "unfinished"
        self._lock: IO[str] | None = None
        for folder in (self._whole, self._unfinished):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, name: str) -> Path:
        """Where the folder of that name is."""
        assert _NAME.fullmatch(name), "names come from the database, and are made by `write`"
        return self._whole / name

    def write(
        self, fill: Callable[[Path], None], description: dict[str, Any] | None = None, *, may_keep: Callable[[int], None] | None = None
    ) -> Written:
        """Makes a folder: `fill` writes its files. When this returns, it is whole and on the disk; when it raises, nothing is there.

        description: what else the manifest says. may_keep: called with the size before the folder takes its place; what it raises stops that.
        """
        name = secrets.token_hex(16)
        aside = self._unfinished / name
        aside.mkdir(mode=0o700)
        try:
            fill(aside)
            files = {str(path.relative_to(aside)): _entry(path) for path in _files(aside)}
            manifest = json.dumps({"format": 1, **(description or {}), "files": files}, indent=1, sort_keys=True).encode()
            _write_synced(aside / MANIFEST, manifest)
            size_bytes = len(manifest) + sum(entry["size_bytes"] for entry in files.values())
            if may_keep is not None:
                may_keep(size_bytes)
            for folder in sorted({path.parent for path in _files(aside)} | {aside}, reverse=True):
                _sync(folder)
            os.rename(aside, self._whole / name)
            _sync(self._whole)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        return Written(name, size_bytes, hashlib.sha256(manifest).hexdigest())

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A new file to write to, which is gone afterwards."""
        path = self._unfinished / secrets.token_hex(16)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def verify(self, name: str, digest: str) -> Path:
        """The folder of that name, every byte of which is as it was written; Failed otherwise."""
        folder = self.path(name)
        try:
            manifest = (folder / MANIFEST).read_bytes()
            if hashlib.sha256(manifest).hexdigest() != digest:
                raise Failed("the checkpoint's manifest is damaged on the server")
            files = json.loads(manifest)["files"]
            for path, entry in files.items():
                if _entry(folder / path) != entry:
                    raise Failed(f"the checkpoint's file {path} is damaged on the server")
        except (OSError, ValueError, KeyError) as error:
            raise Failed("the checkpoint is damaged on the server") from error
        return folder

    def manifest(self, name: str) -> dict[str, Any]:
        """What `write` said of a folder; {} where that is gone or damaged."""
        try:
            return dict(json.loads((self.path(name) / MANIFEST).read_bytes()))
        except (OSError, ValueError):
            return {}

    def files(self, name: str) -> list[tuple[str, Path]]:
        """The files of a folder, by relative name, the manifest included."""
        folder = self.path(name)
        return sorted((str(path.relative_to(folder)), path) for path in _files(folder))

    def remove(self, name: str) -> None:
        """Deletes a folder; it is gone at once, also when this process dies in the middle."""
        aside = self._unfinished / f"{name}-{secrets.token_hex(4)}"
        try:
            os.rename(self.path(name), aside)
        except FileNotFoundError:
            return
        shutil.rmtree(aside, ignore_errors=True)

    def sweep(self, known: Callable[[], Iterable[str]], *, min_age_s: float = 0.0) -> list[str]:
        """Deletes folders that nobody knows, and those that were never finished, unless they are younger; returns their names.

        known: names the folders that are wanted; asked after the folders were listed, so that one that is finished meanwhile is kept.
        """
        oldest, gone = time.time() - min_age_s, list[str]()
        found: list[tuple[Path, float]] = []
        for folder in (*self._whole.iterdir(), *self._unfinished.iterdir()):
            with suppress(FileNotFoundError):  # a running server has just removed or renamed it
                found.append((folder, folder.stat().st_mtime))
        wanted = set(known())
        for folder, at in found:
            if folder.name in wanted or at > oldest:
                continue
            if folder.parent == self._whole:
                self.remove(folder.name)
            else:
                shutil.rmtree(folder, ignore_errors=True) if folder.is_dir() else folder.unlink(missing_ok=True)
            gone.append(folder.name)
        return gone

    def lock(self) -> None:
        """Makes this process the only one that serves this folder; ConfigError where another does."""
        if self._lock is not None:
            return
        lock = (self._whole.parent / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(f"another server uses {self._whole.parent}; give this one a data_dir of its own") from None
        self._lock = lock

    def unlock(self) -> None:
        """Lets another process serve it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class Written:
    """A folder that was written: its name, size and the SHA-256 of its manifest."""

    def __init__(self, name: str, size_bytes: int, digest: str) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.digest = digest


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def _entry(path: Path) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
        os.fsync(file.fileno())
    return {"sha256": digest.hexdigest(), "size_bytes": size}


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
