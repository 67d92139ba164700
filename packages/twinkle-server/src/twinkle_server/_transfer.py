"""Checkpoints as tar streams: out as they are, in only as an adapter in peft's format. Nothing of an archive's names becomes a path."""

from __future__ import annotations

import json
import math
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ._errors import Invalid
from .store import Run

CONFIG, WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
_CHUNK_BYTES = 1 << 20
_BLOCK = 512
_MAX_MEMBERS = 10_000
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_JSON_BYTES = 1 << 20
_MAX_HEADER_BYTES = 64 << 20


def tar_of(files: list[tuple[str, Path]], begin: int = 0) -> Iterator[bytes]:
    """A tar of files by name, chunk by chunk, from that byte on. The same files give the same bytes."""
    for name, path in files:
        head = _head(name, path)
        size = path.stat().st_size
        padding = -size % _BLOCK
        if begin < len(head):
            yield head[begin:]
        begin = max(begin - len(head), 0)
        if begin < size:
            with path.open("rb") as file:
                file.seek(begin)
                left = size - begin
                while left and (chunk := file.read(min(_CHUNK_BYTES, left))):
                    left -= len(chunk)
                    yield chunk
        begin = max(begin - size, 0)
        yield bytes(padding)[begin:]
        begin = max(begin - padding, 0)
    yield bytes(2 * _BLOCK)[begin:]


def tar_size(files: list[tuple[str, Path]]) -> int:
    """How many bytes `tar_of` makes of them."""
    sizes = [(len(_head(name, path)), path.stat().st_size) for name, path in files]
    return sum(head + size + -size % _BLOCK for head, size in sizes) + 2 * _BLOCK


def _head(name: str, path: Path) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = path.stat().st_size, 0o600
    return entry.tobuf(tarfile.PAX_FORMAT)


def extract_adapter(archive: Path, folder: Path, *, limit_bytes: int) -> None:
    """Takes an adapter's two files out of an archive, into `folder/adapter`.

    `state/` and `manifest.json`, which a downloaded checkpoint has beside them, are left out: they are this server's own to write. Raises Invalid for
    any other member (links, devices, absolute or upward names among them), for one that is there twice, and for what is no adapter.
    """
    taken: set[str] = set()
    (folder / "adapter").mkdir()
    with archive.open("rb") as file:
        for name, size in _members(file):
            if name not in (CONFIG, WEIGHTS):
                if name != "manifest.json" and not name.startswith("state/"):
                    raise Invalid(f"the archive holds {name[:200]!r}; an adapter is {CONFIG} and {WEIGHTS}")
                continue
            if name in taken or size > limit_bytes or (name == CONFIG and size > _MAX_JSON_BYTES):
                raise Invalid(f"{name} is there twice, or too large")
            taken.add(name)
            with (folder / name).open("wb") as target:
                while size:
                    chunk = file.read(min(_CHUNK_BYTES, size))
                    if not chunk:
                        raise Invalid("the body is no whole tar archive: it is cut off")
                    size -= len(chunk)
                    target.write(chunk)
    if missing := sorted({CONFIG, WEIGHTS} - taken):
        raise Invalid(f"the archive lacks {', '.join(missing)}")


def _members(file: BinaryIO) -> Iterator[tuple[str, int]]:
    """The plain files of an archive, name and size; while one is at hand, the file stands at its first byte.

    Unlike tarfile's own reading, what headers say takes no memory, and what they leave out (sparse files) no disk.
    """
    for _ in range(_MAX_MEMBERS):
        block = file.read(_BLOCK)
        if not block.strip(b"\0"):
            return
        try:
            entry = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise Invalid(f"the body is no whole tar archive: {error}") from None
        following = file.tell() + entry.size + -entry.size % _BLOCK
        name = entry.name.removeprefix("./")
        if entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            yield name, entry.size
        elif entry.type not in (tarfile.XHDTYPE, tarfile.XGLTYPE) and not (entry.isdir() and name in ("", ".", "adapter", "state")):
            # Times and owners of extended headers are passed over; names of these files need none.
            raise Invalid(f"{name[:200]!r} is no plain file")
        file.seek(following)
    raise Invalid(f"the archive has more than {_MAX_MEMBERS} members")


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
    end = 0
    for name, entry in sorted(((name, entry) for name, entry in header.items() if name != "__metadata__"), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        if ".lora_A." not in name and ".lora_B." not in name:
            raise ValueError(name)
        if begin != end or stop - begin != math.prod(entry["shape"]) * _ITEM_BYTES[entry["dtype"]] or min(entry["shape"], default=0) < 0:
            raise ValueError(name)
        end = stop
    if end != size - 8 - length:
        raise ValueError("size")
