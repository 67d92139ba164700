"""Writes a Hugging Face checkpoint from a stream of tensors: into a folder beside the target, which then takes its place."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from ._errors import CheckpointError

MAX_SHARD_BYTES = 4 << 30
# What a checkpoint has beside its weights: configuration, tokenizer, generation defaults, and code of its own.
_CARRIED_OVER = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_NOT_CARRIED_OVER = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")


def save_checkpoint(weights: Iterator[tuple[str, torch.Tensor]], source: Path, target: Path, dtype: torch.dtype) -> None:
    """Writes weights, config.json and what else the source has. Collective: all ranks call it, rank 0 writes.

    The target appears whole or not at all; one that is there is replaced only then.

    Args:
        weights: the collective stream of whole tensors; iterated to its end on every rank, whatever happens.
        source: the checkpoint folder that the model came from.
        target: the folder to write.
        dtype: of the weights, noted in config.json.

    Raises:
        CheckpointError: rank 0 could not write; on every rank.
    """
    failure: list[str | None] = [None]
    cause: Exception | None = None
    if dist.get_rank() == 0:
        try:
            _write(weights, source, target, dtype)
        except Exception as error:  # raised below, once the other ranks know
            cause = error
            reason = (error.strerror or error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            failure = [f"could not save to {target.absolute()}: {reason}. Free space or choose another folder; nothing was replaced."]
    for _ in weights:  # the other ranks, and rank 0 after an error: leaving the stream early would hang its peers
        pass
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise CheckpointError(failure[0]) from cause


def _write(weights: Iterable[tuple[str, torch.Tensor]], source: Path, target: Path, dtype: torch.dtype) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        folder.chmod(0o755)
        for pattern in _CARRIED_OVER:
            for file in sorted(source.glob(pattern)):
                if file.name not in _NOT_CARRIED_OVER:
                    shutil.copyfile(file, folder / file.name)
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_shards(weights, folder)
        _replace(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_shards(weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    names: list[list[str]] = []
    total_bytes = 0
    for shard in _shards(weights):
        save_file(shard, folder / f"part-{len(names)}.safetensors", metadata={"format": "pt"})
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        names.append(list(shard))
    if len(names) == 1:
        os.replace(folder / "part-0.safetensors", folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, of_shard in enumerate(names):
        name = f"model-{index + 1:05d}-of-{len(names):05d}.safetensors"
        os.replace(folder / f"part-{index}.safetensors", folder / name)
        weight_map |= dict.fromkeys(of_shard, name)
    content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")


def _shards(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > MAX_SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        # A copy of its own: safetensors refuses tensors that are parts of one storage, as experts of one layer are here.
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
