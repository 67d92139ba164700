"""Checkpoints as tar streams: out as they are, in only as an adapter in peft's format. Nothing of an archive's names becomes a path."""

from __future__ import annotations

import json
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ._errors import Invalid
from .store import Run

CONFIG, WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
_CHUNK_BYTES = 1 << 20
_BLOCK = 512
_MAX_MEMBERS = 10_000
_MAX_JSON_BYTES = 1 << 20
_MAX_HEADER_BYTES = 64 << 20


def tar_of(files: list[tuple[str, Path]]) -> Iterator[bytes]:
    """A tar of files by name, chunk by chunk."""
    for name, path in files:
        entry = tarfile.TarInfo(name)
        with path.open("rb") as file:
            entry.size = path.stat().st_size
            entry.mode = 0o600
            yield entry.tobuf(tarfile.PAX_FORMAT)
            left = entry.size
            while left and (chunk := file.read(min(_CHUNK_BYTES, left))):
                left -= len(chunk)
                yield chunk
            yield b"\0" * (-entry.size % _BLOCK)
    yield b"\0" * (2 * _BLOCK)


def extract_adapter(archive: Path, folder: Path, *, limit_bytes: int) -> None:
    """Takes an adapter's two files out of an archive, into `folder/adapter`.

    `state/` and `manifest.json`, which a downloaded checkpoint has beside them, are left out: they are this server's own to write. Raises Invalid for
    any other member (links, devices, absolute or upward names among them), for one that is there twice, and for what is no adapter.
    """
    taken: set[str] = set()
    (folder / "adapter").mkdir()
    try:
        with tarfile.open(archive, "r:") as tar:
            for count, member in enumerate(tar):
                if count >= _MAX_MEMBERS:
                    raise Invalid(f"the archive has more than {_MAX_MEMBERS} members")
                if member.isdir() and member.name in ("adapter", "state"):
                    continue
                if not member.isreg():
                    raise Invalid(f"{member.name[:200]!r} is no plain file")
                if member.name not in (CONFIG, WEIGHTS):
                    if member.name == "manifest.json" or member.name.startswith("state/"):
                        continue
                    raise Invalid(f"the archive holds {member.name[:200]!r}; an adapter is {CONFIG} and {WEIGHTS}")
                if member.name in taken or member.size > limit_bytes or (member.name == CONFIG and member.size > _MAX_JSON_BYTES):
                    raise Invalid(f"{member.name} is there twice, or too large")
                taken.add(member.name)
                source = tar.extractfile(member)
                assert source is not None, "it is a plain file"
                with (folder / member.name).open("wb") as target:
                    while chunk := source.read(_CHUNK_BYTES):
                        target.write(chunk)
    except (tarfile.TarError, EOFError, OSError, UnicodeError) as error:
        raise Invalid(f"the body is no whole tar archive: {str(error)[:200]}") from None
    if missing := sorted({CONFIG, WEIGHTS} - taken):
        raise Invalid(f"the archive lacks {', '.join(missing)}")


def check_adapter(folder: Path, run: Run) -> None:
    """Raises Invalid unless `folder/adapter` holds safetensors, with the rank and scaling of a run."""
    try:
        config: Any = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        theirs = {name: config[name] for name in ("r", "lora_alpha")} | {"use_rslora": bool(config.get("use_rslora", False))}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Invalid(f"{CONFIG} is no configuration of peft's") from None
    mine = {"r": run.lora.get("r", 8), "lora_alpha": run.lora.get("lora_alpha", 8), "use_rslora": bool(run.lora.get("use_rslora", False))}
    if theirs != mine:
        raise Invalid(f"the adapter has {theirs}, the run {mine}")
    try:
        _check_safetensors(folder / WEIGHTS)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        raise Invalid(f"{WEIGHTS} is no safetensors file") from None


def _check_safetensors(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError("header")
        header = json.loads(file.read(length))
    ends = [0]
    for name, entry in header.items():
        if name != "__metadata__":
            if ".lora_A." not in name and ".lora_B." not in name:
                raise ValueError(name)
            ends.append(int(entry["data_offsets"][1]))
    if max(ends) != size - 8 - length:
        raise ValueError("size")
