"""Writes training checkpoints: all ranks in parallel, at once or in the background, whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ._checkpoints import CheckpointInfo, begin_checkpoint, publish_checkpoint, unfinished_path
from ._checksums import changed_file, checksums_of
from ._errors import CheckpointError
from ._pieces import Piece
from ._torch_dist import Box, finish, read_pieces, share_out, write_pieces


@dataclass
class _Writing:
    """A checkpoint that is written in the background."""

    target: Path
    thread: threading.Thread | None = None
    failure: str | None = None
    done: threading.Event = field(default_factory=threading.Event)


class CheckpointWriter:
    """Writes one checkpoint after another. All ranks make the same calls.

    Ranks agree over a gloo group of its own, which a background thread may use while training communicates over others.

    Args:
        timeout_s: how long ranks wait for one another.
        error_type: what is raised: a trainer's own CheckpointError.
        add_files: called on rank 0 with the folder when all tensors are in it, for what other readers of the format look for.
    """

    def __init__(
        self, timeout_s: float, *, error_type: type[CheckpointError] = CheckpointError, add_files: Callable[[Path], None] | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._error_type = error_type
        self._add_files = add_files
        self._group: Any = None
        self._writing: _Writing | None = None
        self._planned: tuple[Any, list[list[Box]], list[set[Box]]] | None = None
        # Kept from one background save to the next: memory touched for the first time takes several times as long to fill.
        self._staged: dict[Box, torch.Tensor] = {}

    def save(self, target: Path, info: CheckpointInfo, pieces: Sequence[Piece], generators: Mapping[str, Any], *, background: bool) -> None:
        """Writes a checkpoint; in the background the tensors are copied first, into host memory that is kept for the next until `close`.

        Raises:
            CheckpointError: it could not be written, or an earlier one in the background could not; on every rank.
        """
        self.wait()
        group = self._own_group()
        failure: str | None = None
        if dist.get_rank() == 0:
            try:
                begin_checkpoint(target)
            except OSError as error:
                failure = f"could not begin the checkpoint {target}: {error.strerror}. Choose another folder"
        own = [piece for piece in pieces if not piece.is_copy]
        boxes_of_ranks, shares = self._plan(info, [Box.of(piece) for piece in own])
        failure = _any_failure(failure, group)
        if failure is not None:
            raise self._error_type(failure)
        mine = [piece for piece in own if Box.of(piece) in shares[dist.get_rank()]]
        writing = _Writing(target)
        if not background:
            self._write(writing, info, mine, generators, boxes_of_ranks)
            self._raise_failure(writing)
            return
        copies = self._copies(mine)
        states = _copied(generators)
        writing.thread = threading.Thread(target=self._write, args=(writing, info, copies, states, boxes_of_ranks), name=f"write {target.name}")
        self._writing = writing
        writing.thread.start()

    def wait(self) -> None:
        """Returns when the checkpoint that is written in the background is whole.

        Raises:
            CheckpointError: it could not be written; on every rank.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            assert writing.thread is not None
            writing.thread.join(2 * self._timeout_s)
            if writing.thread.is_alive():
                raise self._error_type(f"writing {writing.target} in the background did not end within {2 * self._timeout_s:g} s")
            self._raise_failure(writing)

    def check(self, device: torch.device) -> None:
        """Raises what the checkpoint in the background failed with, on all ranks at the same call; returns at once where it is still written."""
        if self._writing is None:
            return
        state = torch.tensor(int(self._writing.done.is_set()), device=device)
        dist.all_reduce(state, op=dist.ReduceOp.MIN)
        if state.item():
            self.wait()

    def close(self) -> None:
        """Ends the group; a checkpoint in the background is finished first."""
        try:
            self.wait()
        finally:
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None
            self._staged = {}

    def _raise_failure(self, writing: _Writing) -> None:
        if writing.failure is not None:
            raise self._error_type(writing.failure)

    def _copies(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces with their values as they are now, in host memory."""
        boxes = [Box.of(piece) for piece in pieces]
        kept = self._staged
        self._staged = {box: kept.pop(box) if box in kept else torch.empty(box.size, dtype=box.dtype) for box in boxes}
        kept.clear()
        return [replace(piece, tensor=self._staged[box].copy_(piece.tensor.detach())) for piece, box in zip(pieces, boxes, strict=True)]

    def _own_group(self) -> Any:
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        return self._group

    def _plan(self, info: CheckpointInfo, boxes: list[Box]) -> tuple[list[list[Box]], list[set[Box]]]:
        """The boxes of all ranks, and which of them each writes; worked out anew only where adapters or optimizers changed or got states."""
        kind = [(name, each.lora, each.optimizer, each.step > 0) for name, each in info.adapters.items()]
        if self._planned is None or self._planned[0] != kind:
            boxes_of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(boxes_of_ranks, boxes, group=self._group)
            self._planned = (kind, boxes_of_ranks, share_out(boxes_of_ranks))
        return self._planned[1:]

    def _write(
        self, writing: _Writing, info: CheckpointInfo, pieces: Sequence[Piece], generators: Mapping[str, Any], boxes_of_ranks: list[list[Box]]
    ) -> None:
        """This rank's files, then, on rank 0 and when all ranks have written theirs, the rest and the new name."""
        try:
            writing.failure = self._write_and_agree(writing.target, info, pieces, generators, boxes_of_ranks)
        except Exception as error:  # the edge of a thread: `_raise_failure` raises it. A peer that died, for one
            writing.failure = f"could not write {writing.target}: {type(error).__name__}: {error}"
        finally:
            writing.done.set()

    def _write_and_agree(
        self, target: Path, info: CheckpointInfo, pieces: Sequence[Piece], generators: Mapping[str, Any], boxes_of_ranks: list[list[Box]]
    ) -> str | None:
        rank, folder = dist.get_rank(), unfinished_path(target)
        results: list[Any] = []
        sums: dict[str, str] = {}
        failure: str | None = None
        try:
            results = write_pieces(folder, rank, pieces)
            torch.save(dict(generators), generators_path(folder, rank))
            names = {str(result.storage_data.relative_path) for result in results} | {generators_path(folder, rank).name}
            sums = checksums_of(folder, sorted(names))
        except Exception as error:  # told to the other ranks; a full disk is an OSError or a RuntimeError of torch
            failure = _message(target, rank, error)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (results, sums, failure), group=self._group)
        failure = next((each for _, _, each in gathered if each is not None), None)
        if failure is None and rank == 0:
            try:
                finish(folder, boxes_of_ranks, [each for each, _, _ in gathered])
                if self._add_files is not None:
                    self._add_files(folder)
                all_sums = {name: value for _, each, _ in gathered for name, value in each.items()}
                all_sums |= checksums_of(folder, sorted({file.name for file in folder.iterdir()} - all_sums.keys()))
                publish_checkpoint(target, replace(info, checksums=all_sums).to_json())
            except Exception as error:  # told to the other ranks
                failure = _message(target, rank, error)
        return _any_failure(failure, self._group)


def generators_path(folder: Path, rank: int) -> Path:
    """Where the generators' states of a rank are."""
    return folder / f"generators-{rank}.pt"


def read_checkpoint_pieces(
    path: Path,
    pieces: Sequence[Piece],
    group: Any = None,
    *,
    renamed: Mapping[str, str] | None = None,
    error_type: type[CheckpointError] = CheckpointError,
) -> None:
    """Fills the pieces from a checkpoint. Collective, so that no rank goes on alone.

    renamed: `CheckpointInfo.renamed`. Keys of an adapter's pieces have `adapters.NAME.` in them.

    Raises:
        CheckpointError: it does not fit, or cannot be read; on every rank, as `error_type`.
    """
    failure: str | None = None
    try:
        read_pieces(path, [_as_written(piece, renamed or {}) for piece in pieces])
    except CheckpointError as error:
        failure = str(error)
    except Exception as error:  # whatever a broken file makes of torch's reader and pickle: the other ranks must not go on alone
        failure = f"could not read {path}: {type(error).__name__}: {error}"
    failure = _any_failure(failure, group)
    if failure is not None:
        raise error_type(failure)


def read_generators(path: Path, group: Any = None, *, error_type: type[CheckpointError] = CheckpointError) -> Any:
    """This rank's generators' states from a checkpoint of the same layout, on the CPU. Collective.

    Raises:
        CheckpointError: some rank's cannot be read; on every rank, as `error_type`.
    """
    file = generators_path(path, dist.get_rank())
    failure: str | None = None
    states: Any = None
    try:
        states = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # as above
        failure = f"could not read {file}: {type(error).__name__}: {error}"
    failure = _any_failure(failure, group)
    if failure is not None:
        raise error_type(failure)
    return states


def _as_written(piece: Piece, renamed: Mapping[str, str]) -> Piece:
    for here, written in renamed.items():
        before, found, after = piece.key.partition(f"adapters.{here}.")
        if found and (not before or before.endswith(".")):  # an optimizer's states have their own name before it
            return replace(piece, key=f"{before}adapters.{written}.{after}")
    return piece


def check_files(path: Path, info: CheckpointInfo, group: Any = None, *, error_type: type[CheckpointError] = CheckpointError) -> None:
    """Compares all files of a checkpoint with their checksums, each rank some of them. Collective.

    Raises:
        CheckpointError: a file is missing or has changed; on every rank, as `error_type`.
    """
    names = sorted(info.checksums)[dist.get_rank(group) :: dist.get_world_size(group)]
    failure = _any_failure(changed_file(path, {name: info.checksums[name] for name in names}), group)
    if failure is not None:
        raise error_type(failure)


def check_same_trainer(path: Path, info: CheckpointInfo, entries: Mapping[str, Any], *, error_type: type[CheckpointError] = CheckpointError) -> None:
    """Refuses a checkpoint of another trainer, model type or precision.

    entries: the engine's own, of a checkpoint that it would write now; among them 'trainer', 'model_type' and 'mixed_precision'.

    Raises:
        CheckpointError: they differ, as `error_type`.
    """
    for name in ("trainer", "model_type", "mixed_precision"):
        if info.engine.get(name) != entries[name]:
            raise error_type(
                f"{path} was written with {name}={info.engine.get(name)!r}, this model has {entries[name]!r}: build it alike, or carry only the "
                "weights over with save(path) and load(path)."
            )


def _message(target: Path, rank: int, error: Exception) -> str:
    reason = (error.strerror or error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f"could not write {target} (rank {rank}): {reason}. Free space or choose another folder; the checkpoints before are untouched."


def _any_failure(failure: str | None, group: Any) -> str | None:
    """The first rank's failure, on every rank."""
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure, group=group)
    return next((each for each in failures if each is not None), None)


def _copied(states: Any) -> Any:
    if isinstance(states, Mapping):
        return {name: _copied(value) for name, value in states.items()}
    return states.clone() if torch.is_tensor(states) else states
