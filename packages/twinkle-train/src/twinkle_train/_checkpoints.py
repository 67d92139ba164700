"""Training checkpoints on disk: which are whole, what each is of, and how one takes its place.

A checkpoint is a folder with `checkpoint.json` and the engine's files. It is written under a name of its own beside its place and renamed at the end,
so that what is listed is whole, whenever a process dies.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ._errors import CheckpointError, ConfigError
from ._lora import LoraConfig
from ._optimizer import OptimizerConfig
from ._schedules import LRSchedule

CHECKPOINT_FILE = "checkpoint.json"
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"
_FORMAT = 1
# Files of weights and states: those of the checkpoint that is replaced must not stay beside the new one's.
_PARTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.distcp",
    ".metadata",
    "metadata.json",
    "generators-*.pt",
    "common.pt",
)
# Of Linux's renameat2(2).
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@dataclass(frozen=True, kw_only=True)
class AdapterProgress:
    """How far one adapter ('' is the base model) is trained. optimizer: None where none was set. lora: None for the base model."""

    optimizer: OptimizerConfig | None
    schedule: LRSchedule
    step: int
    lora: LoraConfig | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """What `checkpoint.json` says.

    step: optimizer steps of the base model, or of the one adapter that was written.
    adapters: by name. user_state: what the caller of save_checkpoint gave. engine: the engine's own entries.
    checksums: of the files, by name; empty in a checkpoint of an earlier version.
    renamed: adapters that are read under another name than they were written under: that name, by the one here. Of a reading, not in the file.
    """

    step: int
    adapters: Mapping[str, AdapterProgress]
    user_state: Mapping[str, Any]
    engine: Mapping[str, Any]
    checksums: Mapping[str, str] = field(default_factory=dict[str, str])
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_json(self) -> str:
        """As text.

        Raises ConfigError when user_state is not plain JSON.
        """
        content = {"format": _FORMAT, **asdict(self), "adapters": {name: asdict(each) for name, each in self.adapters.items()}}
        del content["renamed"]
        try:
            text = json.dumps(content, indent=2)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"user_state must be plain JSON (numbers, strings, lists, dicts with string keys): {error}") from None
        if json.loads(text)["user_state"] != content["user_state"]:
            raise ConfigError("user_state must be plain JSON: tuples would come back as lists, and keys that are no strings as strings")
        return text + "\n"

    @classmethod
    def from_json(cls, text: str) -> CheckpointInfo:
        """From `to_json`'s text; ValueError, KeyError or TypeError when it is something else."""
        content = json.loads(text)
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']} is not {_FORMAT}")
        adapters = {
            name: AdapterProgress(
                optimizer=None if each["optimizer"] is None else OptimizerConfig(**each["optimizer"]),
                schedule=LRSchedule(**each["schedule"]),
                step=each["step"],
                lora=None if each.get("lora") is None else LoraConfig(**each["lora"]),
            )
            for name, each in content["adapters"].items()
        }
        return cls(
            step=content["step"],
            adapters=adapters,
            user_state=content["user_state"],
            engine=content["engine"],
            checksums=content.get("checksums", {}),
        )


def read_checkpoint(path: str | os.PathLike[str]) -> CheckpointInfo:
    """What the training checkpoint in a folder is of.

    Raises CheckpointError when there is none, or it was written by something else.
    """
    file = Path(path) / CHECKPOINT_FILE
    try:
        return CheckpointInfo.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        near = list_checkpoints(path) or list_checkpoints(Path(path).parent)
        hint = f"; did you mean {near[-1]}?" if near else ". Give the folder that save_checkpoint was given"
        raise CheckpointError(f"{path} is no whole training checkpoint ({CHECKPOINT_FILE}: {error.strerror}){hint}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} was not written by this version of save_checkpoint ({type(error).__name__}: {error})") from None


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The whole training checkpoints directly in a folder, by the number of steps taken. One that is being written, or was cut off, is not listed."""
    found: list[tuple[int, str, Path]] = []
    try:
        entries = sorted(Path(folder).iterdir())
    except OSError:
        return []
    for entry in entries:
        if entry.name.startswith((_UNFINISHED, _REPLACED)) or not (entry / CHECKPOINT_FILE).is_file():
            continue
        found.append((read_checkpoint(entry).step, entry.name, entry))
    return [path for _, _, path in sorted(found)]


def prune_checkpoints(folder: str | os.PathLike[str], keep: int) -> list[Path]:
    """Deletes all but the newest `keep` whole checkpoints of a folder; returns what it deleted.

    Raises ConfigError for a keep below 1: the last one is never deleted.
    """
    if keep < 1:
        raise ConfigError(f"keep must be at least 1 (the last checkpoint is never deleted), got {keep}")
    outdated = list_checkpoints(folder)[:-keep]
    for path in outdated:
        # Unlisted first: half of a folder must not look like a checkpoint.
        (path / CHECKPOINT_FILE).unlink()
        shutil.rmtree(path, ignore_errors=True)
    return outdated


def remove_unfinished(folder: str | os.PathLike[str]) -> None:
    """Deletes what processes that died left of checkpoints in a folder. Nobody may be writing one there."""
    for prefix in (_UNFINISHED, _REPLACED):
        for path in Path(folder).glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def unfinished_path(target: Path) -> Path:
    """Where the files of a checkpoint are written before it takes its place."""
    return target.with_name(_UNFINISHED + target.name)


def check_replaceable(target: Path, mark: str) -> None:
    """Refuses a target whose place a new folder must not take, since what is in it would be deleted.

    mark: a file that is in every folder that may be replaced. Empty folders may be, folders with folders in them may not.

    Raises FileExistsError.
    """
    if not target.exists():
        return
    if target.resolve() == Path.cwd():
        raise FileExistsError(errno.EEXIST, "it is the working folder, and would be replaced", str(target))
    if not target.is_dir():
        raise FileExistsError(errno.EEXIST, "it is a file, and would be deleted", str(target))
    entries = sorted(target.iterdir())
    foreign = [entry for entry in entries if entry.is_dir()] or ([] if (target / mark).is_file() else entries)
    if foreign:
        raise FileExistsError(errno.EEXIST, f"it holds {foreign[0].name!r}, which is not part of such a checkpoint and would be deleted", str(target))


def keep_others(target: Path, folder: Path) -> None:
    """Puts what is in the target and no part of a checkpoint (notes, a README, results) into the folder that takes its place, too."""
    if not target.is_dir():
        return
    for entry in target.iterdir():
        if entry.is_file() and not (folder / entry.name).exists() and not any(fnmatch(entry.name, pattern) for pattern in _PARTS):
            try:
                os.link(entry, folder / entry.name)
            except OSError:  # a file system without links
                shutil.copy2(entry, folder / entry.name)


def begin_checkpoint(target: Path) -> Path:
    """Makes the empty folder that the files go into, beside the target; what an earlier process left there is deleted.

    Raises FileExistsError when there is something at the target that is no training checkpoint.
    """
    check_replaceable(target, CHECKPOINT_FILE)
    folder = unfinished_path(target)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def publish_checkpoint(target: Path, info_json: str) -> None:
    """Lets the folder of `begin_checkpoint` take its place, with its `checkpoint.json`. One that is there is replaced."""
    folder = unfinished_path(target)
    keep_others(target, folder)
    with (folder / CHECKPOINT_FILE).open("w", encoding="utf-8") as file:
        file.write(info_json)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)
    if not target.exists():
        os.rename(folder, target)
        _sync_folder(target.parent)
        return
    replaced = target.with_name(_REPLACED + target.name)
    shutil.rmtree(replaced, ignore_errors=True)
    if _exchange(folder, target):
        os.rename(folder, replaced)  # what was there before: half of it must not look like a checkpoint that is being written
    else:
        os.rename(target, replaced)
        os.rename(folder, target)
    _sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Lets two folders change names at once, so that at no moment a name stands for nothing. False where the system or file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def _sync_folder(folder: Path) -> None:
    """Names are on the disk, too, when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
