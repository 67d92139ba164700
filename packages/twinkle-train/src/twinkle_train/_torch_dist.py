"""Pieces to and from files in the format of torch.distributed.checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ._errors import CheckpointError
from ._pieces import Piece


@dataclass(frozen=True)
class Box:
    """A piece without its values: the same on whatever rank has it."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, piece: Piece) -> Box:
        """The piece's."""
        return cls(piece.key, piece.shape, piece.offset, tuple(piece.tensor.shape), piece.tensor.dtype)

    @property
    def size_bytes(self) -> int:
        """Of its values."""
        return torch.Size(self.size).numel() * self.dtype.itemsize

    def chunk(self) -> ChunkStorageMetadata:
        """As torch has it."""
        return ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.size))


def share_out(boxes_of_ranks: Sequence[Sequence[Box]]) -> list[set[Box]]:
    """Which of its boxes each rank writes: each box once, and all ranks about equally many bytes. Every rank finds the same."""
    owners: dict[Box, list[int]] = defaultdict(list)
    for rank, boxes in enumerate(boxes_of_ranks):
        for box in boxes:
            owners[box].append(rank)
    places = {(box.key, box.offset) for box in owners}
    assert len(places) == len(owners), "torch tells the parts of a tensor apart by their offsets"
    load = [0] * len(boxes_of_ranks)
    shares: list[set[Box]] = [set() for _ in boxes_of_ranks]
    # What only one rank has cannot be shared out; then the largest first.
    for box, ranks in sorted(owners.items(), key=lambda item: (len(item[1]) > 1, -item[0].size_bytes, item[0].key, item[0].offset)):
        rank = min(ranks, key=lambda rank: (load[rank], rank))
        load[rank] += box.size_bytes
        shares[rank].add(box)
    return shares


def write_pieces(folder: Path, rank: int, pieces: Sequence[Piece]) -> list[Any]:
    """Writes pieces into a file of this rank's, and syncs it. Returns what `finish` needs of every rank."""
    values: dict[MetadataIndex, torch.Tensor] = {}
    items: list[WriteItem] = []
    for piece in pieces:
        box = Box.of(piece)
        index = MetadataIndex(box.key, torch.Size(box.offset))
        values[index] = piece.tensor
        data = TensorWriteData(chunk=box.chunk(), properties=TensorProperties(dtype=box.dtype), size=torch.Size(box.shape))
        items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    writer = FileSystemWriter(folder)
    # The writer names files after a plan's place among all ranks'.
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [SavePlan(items)])[-1]
    planner: Any = _Values(values)
    return writer.write_data(plan, planner).wait()


def finish(folder: Path, boxes_of_ranks: Sequence[Sequence[Box]], results: Sequence[Any]) -> None:
    """Writes the index of all ranks' files: last, since without it nothing can be read."""
    chunks: dict[str, set[Box]] = defaultdict(set)
    for boxes in boxes_of_ranks:
        for box in boxes:
            chunks[box.key].add(box)
    entries: dict[str, Any] = {}
    for key, boxes in sorted(chunks.items()):
        any_box = next(iter(boxes))
        entries[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=any_box.dtype),
            size=torch.Size(any_box.shape),
            chunks=[box.chunk() for box in sorted(boxes, key=lambda box: box.offset)],
        )
    FileSystemWriter(folder).finish(Metadata(state_dict_metadata=entries), list(results))


def read_pieces(folder: Path, pieces: Sequence[Piece]) -> None:
    """Fills the pieces' tensors from a folder. Every rank reads what it needs by itself.

    Raises:
        CheckpointError: a tensor is missing or has another shape; before anything is changed.
    """
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    items: list[ReadItem] = []
    targets: dict[MetadataIndex, torch.Tensor] = {}
    for piece in pieces:
        box = Box.of(piece)
        entry: Any = metadata.state_dict_metadata.get(box.key)
        if entry is None:
            raise CheckpointError(f"{folder} has no tensor {box.key}, which this model needs: it is a checkpoint of another model.")
        if tuple(entry.size) != box.shape:
            raise CheckpointError(
                f"{folder}: {box.key} is {tuple(entry.size)}, and this model's is {box.shape}: it is a checkpoint of another model."
            )
        found = create_read_items_for_chunk_list(box.key, entry, [box.chunk()])
        if sum(item.lengths.numel() for item in found) < piece.tensor.numel():
            raise CheckpointError(f"{folder} has only a part of the tensor {box.key}: files of it are missing.")
        targets[MetadataIndex(box.key, torch.Size(box.offset))] = piece.tensor
        items += found
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    planner: Any = _Targets(targets)
    reader.read_data(LoadPlan(items), planner).wait()


class _Values:
    """What torch's writer asks a planner for."""

    def __init__(self, values: dict[MetadataIndex, torch.Tensor]) -> None:
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._values[write_item.index]


class _Targets:
    """What torch's reader asks a planner for."""

    def __init__(self, targets: dict[MetadataIndex, torch.Tensor]) -> None:
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets[read_item.dest_index]
        for axis, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(axis, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the tensor is a view of its target."""
