"""Writes checkpoints for others to read, of collective streams of tensors: to a folder beside the target first, which then takes its place."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ._checkpoints import check_replaceable, keep_others
from ._errors import CheckpointError

MAX_SHARD_BYTES = 4 << 30
# What is written anew.
_NOT_CARRIED_OVER = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")


def write_hf_checkpoint(
    weights: Iterator[tuple[str, torch.Tensor]],
    source: Path,
    target: Path,
    dtype: torch.dtype,
    *,
    carried_over: Sequence[str],
    error_type: type[CheckpointError] = CheckpointError,
) -> None:
    """Writes safetensors (needs that package), config.json and files of the source. Collective: all ranks call it, rank 0 writes.

    The target appears whole or not at all; a checkpoint that is there is replaced only then, and anything else is left alone and an error.

    Args:
        weights: the collective stream of whole tensors; iterated to its end on every rank, whatever happens.
        source: the checkpoint folder that the model came from.
        target: the folder to write.
        dtype: of the weights, noted in config.json.
        carried_over: patterns of the names of files that the source may have beside its weights and config.json.

    Raises:
        CheckpointError: rank 0 could not write; on every rank, naming the cause, as `error_type`.
    """

    def write() -> None:
        with staged_folder(target, "config.json") as folder:
            _write_tensors(weights, folder)
            config = json.loads((source / "config.json").read_text())
            config.pop("torch_dtype", None)
            config["dtype"] = str(dtype).removeprefix("torch.")
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            for pattern in carried_over:
                for file in sorted(source.glob(pattern)):
                    if file.name not in _NOT_CARRIED_OVER:
                        shutil.copyfile(file, folder / file.name)

    write_on_rank_zero(weights, target, write, error_type=error_type)


def write_on_rank_zero(
    stream: Iterator[Any], target: Path, write: Callable[[], None], *, error_type: type[CheckpointError] = CheckpointError
) -> None:
    """Runs what writes a collective stream to the target, on rank 0; the other ranks iterate along.

    Raises:
        CheckpointError: rank 0 could not write; on every rank, naming the cause, as `error_type`.
    """
    failure: list[str | None] = [None]
    cause: Exception | None = None
    if dist.get_rank() == 0:
        try:
            write()
        except Exception as error:  # raised below, once the other ranks know. A full disk is a SafetensorError here, which is no OSError
            cause = error
            reason = (error.strerror or error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            failure = [f"could not save to {target.absolute()}: {reason}. Free space or choose another folder; nothing was replaced."]
    for _ in stream:
        # The other ranks, and rank 0 after an error: leaving the stream early would hang its peers.
        pass
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise error_type(failure[0]) from cause


@contextmanager
def staged_folder(target: Path, mark: str) -> Iterator[Path]:
    """A new folder beside the target, which takes the target's place at the end of the block; an error in it removes the folder instead.

    Files at the target that are no part of a checkpoint stay. Of a link, the folder that it points to is replaced.

    mark: a file that is in every folder of this kind.

    Raises FileExistsError when there is something else at the target (without such a file, or with a folder in it): it would be deleted.
    """
    target = Path(os.path.realpath(target))
    check_replaceable(target, mark)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        folder.chmod(0o755)
        yield folder
        keep_others(target, folder)
        _replace(folder, target)
    except BaseException:  # Ctrl-C too leaves no litter
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_tensors(weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    total_bytes = 0
    for shard in _shards(weights):
        save_file(shard, folder / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        shards.append(list(shard))
    if len(shards) == 1:
        os.replace(folder / "part-0.safetensors", folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"part-{index}.safetensors", folder / name)
        weight_map |= dict.fromkeys(names, name)
    content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")


def _shards(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > MAX_SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        # A copy of its own: safetensors refuses tensors that are parts of one storage, as gate and up, or the experts of a layer, can be.
        shard[name] = tensor.to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _replace(folder: Path, target: Path) -> None:
    if not target.exists():
        os.rename(folder, target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    os.rename(target, old / "old")
    try:
        os.rename(folder, target)
    except OSError:
        os.rename(old / "old", target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
