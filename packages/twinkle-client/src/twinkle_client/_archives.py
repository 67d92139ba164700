"""Checkpoints between a folder and the tar that goes over the wire. Nothing is taken from an archive that its manifest does not name."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ._errors import DamagedCheckpoint, InvalidRequest

_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20
_BLOCK = 512


class Parcel:
    """An adapter in peft's format, on its way to a server.

    folder: it, or a checkpoint that was downloaded, which has it in `adapter`. size_bytes, content_digest: of the archive (RFC 9530).

    Raises:
        InvalidRequest: the folder lacks a file.
    """

    def __init__(self, folder: Path) -> None:
        place = folder / "adapter" if (folder / "adapter").is_dir() else folder
        self._files = [(f"adapter/{name}", place / name) for name in _FILES]
        if missing := [str(path) for _, path in self._files if not path.is_file()]:
            raise InvalidRequest(f"an adapter is {' and '.join(_FILES)}; there is no {' and no '.join(missing)}")
        digest = hashlib.sha256()
        self.size_bytes = 0
        for chunk in self:
            digest.update(chunk)
            self.size_bytes += len(chunk)
        self.content_digest = f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"

    def __iter__(self) -> Iterator[bytes]:
        for name, path in self._files:
            entry = tarfile.TarInfo(name)
            entry.size = path.stat().st_size
            yield entry.tobuf(tarfile.PAX_FORMAT)
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
            yield bytes(-entry.size % _BLOCK)
        yield bytes(2 * _BLOCK)


def unpack(archive: Path, target: Path, etag: str) -> None:
    """A downloaded archive as a folder, which is there when every byte is as the server wrote it, and not before.

    etag: the server's, the SHA-256 of the manifest, which has those of the files.

    Raises:
        DamagedCheckpoint: something is not.
    """
    aside = target.with_name(f"{target.name}.unpacked")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        with tarfile.open(archive, "r:") as tar:
            found = {member.name: member for member in tar}
            manifest = _read(tar, found.get(_MANIFEST), _MANIFEST)
            if f'"{hashlib.sha256(manifest).hexdigest()}"' != etag.removeprefix("W/"):
                raise DamagedCheckpoint("the manifest is not the one that the server has")
            files = cast("dict[str, dict[str, Any]]", json.loads(manifest)["files"])
            if set(files) | {_MANIFEST} != set(found):
                raise DamagedCheckpoint("the archive does not hold the files of its manifest")
            for name, entry in files.items():
                path = aside / name
                if not path.resolve().is_relative_to(aside.resolve()):
                    raise DamagedCheckpoint(f"the file {name!r} would lie outside the folder")
                path.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(found[name]) if found[name].isreg() else None
                if source is None or _copy(cast("BinaryIO", source), path) != entry["sha256"]:
                    raise DamagedCheckpoint(f"the file {name} is not as the server wrote it")
        (aside / _MANIFEST).write_bytes(manifest)
        aside.rename(target)
    except (tarfile.TarError, EOFError, ValueError, KeyError) as error:
        raise DamagedCheckpoint(f"the archive is no whole checkpoint: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo | None, name: str) -> bytes:
    source = None if member is None or not member.isreg() else tar.extractfile(member)
    if source is None:
        raise DamagedCheckpoint(f"the archive has no {name}")
    return source.read()


def _copy(source: BinaryIO, target: Path) -> str:
    digest = hashlib.sha256()
    with target.open("wb") as file:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()
