"""Checkpoints: made, found, verified, deleted. All methods block."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ._errors import Busy, Conflict, Failed, Invalid, NotFound
from ._folders import Folders
from ._paths import CheckpointUri, check_name, parse_uri
from .engine._trainer import TrainerBackend, check_whole
from .store import Checkpoint, CheckpointKind, Run, Store


class Checkpoints:
    """The checkpoints of all tenants.

    A folder holds `adapter/` (peft's format) and, where training can go on from it, `state/` (the trainer's). on_removed: called with the name of a
    folder that was deleted.
    """

    def __init__(self, store: Store, folders: Folders, *, quota_bytes: int, on_removed: Callable[[str], None] = lambda folder: None) -> None:
        self._store = store
        self.folders = folders
        self._quota_bytes = quota_bytes
        self._on_removed = on_removed

    def save(
        self,
        trainer: TrainerBackend,
        run: Run,
        kind: CheckpointKind,
        name: str | None = None,
        *,
        with_state: bool = True,
        user_state: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl_s: float | None = None,
        overwrite: bool = True,
    ) -> Checkpoint:
        """Writes a checkpoint of a run, in its trainer's thread; when it returns, the checkpoint is whole, on disk and listed.

        name: None picks one. with_state: of kind 'weights': optimizer, schedule and counters too. One of the same name is replaced, in one step.

        Raises Busy beyond the tenant's quota, Conflict for a name that is taken unless `overwrite`, and for a run whose state was lost.
        """
        check_whole(run)
        name = check_name(name) if name is not None else f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        old = self._store.find_checkpoint(run.id, kind, name)
        if old is not None and not overwrite:
            raise _taken(kind, name)
        resumable = kind == "weights" and with_state
        trainer.touch(run)

        def fill(folder: Path) -> None:
            trainer.save_adapter(run.adapter, folder / "adapter")
            if resumable:
                trainer.save_state(run.adapter, folder / "state", user_state)

        description = {"kind": kind, "run": run.id, "name": name, "base_model": run.base_model, "adapter": run.adapter, "step": run.steps}
        written = self.folders.write(fill, description, may_keep=lambda size: self._check_quota(run.tenant, size, old))
        return self._record(run, kind, name, written, resumable=resumable, step=run.steps, metadata=metadata, ttl_s=ttl_s)

    def add(self, run: Run, kind: CheckpointKind, name: str, fill: Callable[[Path], None], source: str) -> Checkpoint:
        """A checkpoint whose adapter was brought from elsewhere; `fill` writes `adapter/` into a folder. source: what it came of, see `added`."""
        if self._store.find_checkpoint(run.id, kind, name) is not None:
            raise _taken(kind, name)
        description = {"kind": kind, "run": run.id, "name": name, "base_model": run.base_model, "adapter": run.adapter, "step": 0, "source": source}
        written = self.folders.write(fill, description, may_keep=lambda size: self._check_quota(run.tenant, size, None))
        return self._record(run, kind, name, written, resumable=False, step=0, metadata=None, ttl_s=None)

    def added(self, run: Run, kind: CheckpointKind, name: str, source: str | None) -> Checkpoint | None:
        """The checkpoint that `add` made of that source, None where there is none of that name; Conflict for one of something else."""
        found = self._store.find_checkpoint(run.id, kind, check_name(name))
        if found is not None and (source is None or self.folders.manifest(found.folder).get("source") != source):
            raise _taken(kind, name)
        return found

    def _record(
        self, run: Run, kind: CheckpointKind, name: str, written: Any, *, resumable: bool, step: int, metadata: Any, ttl_s: float | None
    ) -> Checkpoint:
        now = time.time()
        checkpoint = Checkpoint(
            run_id=run.id,
            tenant=run.tenant,
            kind=kind,
            name=name,
            folder=written.name,
            size_bytes=written.size_bytes,
            digest=written.digest,
            step=step,
            resumable=resumable,
            metadata=dict(metadata or {}),
            created_at=now,
            expires_at=None if ttl_s is None else now + ttl_s,
        )
        old = self._store.put_checkpoint(checkpoint)
        if old is not None:
            self._remove_folder(old.folder)
        found = self._store.find_checkpoint(run.id, kind, name)
        return checkpoint if found is None else found

    def find(self, tenant: str, uri: CheckpointUri | str, *, may_be_public: bool = False) -> tuple[Checkpoint, Run]:
        """A tenant's checkpoint and its run. may_be_public: also another tenant's that was published.

        Raises NotFound for all others, Invalid for a text that is no URI.
        """
        where = parse_uri(uri) if isinstance(uri, str) else uri
        checkpoint = self._store.find_checkpoint(where.run_id, where.kind, where.name)
        if checkpoint is None or not (checkpoint.tenant == tenant or (may_be_public and checkpoint.public)) or _is_over(checkpoint):
            raise NotFound(f"there is no checkpoint {where}")
        run = self._store.get(Run, checkpoint.run_id)
        assert run is not None, "the database keeps the runs of checkpoints"
        return checkpoint, run

    def of_run(self, run: Run) -> list[Checkpoint]:
        """A run's checkpoints, newest first."""
        found, _ = self._store.page(Checkpoint, where={"run_id": run.id}, limit=100_000)
        return [checkpoint for checkpoint in found if not _is_over(checkpoint)]

    def latest(self, runs: Sequence[Run]) -> dict[tuple[str, str], Checkpoint]:
        """The newest checkpoints of runs, by run and kind."""
        return self._store.latest_checkpoints([run.id for run in runs], time.time())

    def read(self, checkpoint: Checkpoint) -> Path:
        """A checkpoint's folder, every byte of which is as it was written.

        Raises NotFound where it was deleted meanwhile, Failed where it is damaged.
        """
        try:
            return self.folders.verify(checkpoint.folder, checkpoint.digest)
        except Failed:
            now = self._store.find_checkpoint(checkpoint.run_id, checkpoint.kind, checkpoint.name)
            if now is None or now.folder != checkpoint.folder:
                raise NotFound(f"there is no checkpoint {CheckpointUri(checkpoint.run_id, checkpoint.kind, checkpoint.name)} any more") from None
            raise

    def load(self, trainer: TrainerBackend, run: Run, checkpoint: Checkpoint, source: Run, *, with_state: bool) -> dict[str, Any]:
        """Puts a checkpoint into a run, in its trainer's thread. with_state: optimizer, schedule and counters too; returns its user_state then.

        Raises Invalid for one of another base model or shape, Conflict for a state that it does not hold.
        """
        if source.base_model != run.base_model:
            raise Invalid(f"the checkpoint is of {source.base_model}, this run of {run.base_model}")
        if with_state and not checkpoint.resumable:
            raise Conflict(
                f"{CheckpointUri(source.id, checkpoint.kind, checkpoint.name)} holds no optimizer state: load it instead of resuming from it"
            )
        folder = self.read(checkpoint)
        if not with_state:
            trainer.call(run, "load", path=str(folder / "adapter"))
            self._store.change(Run, run.id, steps=checkpoint.step)
            return {}
        user_state = trainer.resume(run, str(folder / "state"), source.adapter)
        self._store.change(Run, run.id, steps=checkpoint.step)
        return user_state

    def delete(self, checkpoint: Checkpoint) -> bool:
        """Deletes that checkpoint and nothing else; whether it was still there."""
        if not self._store.drop_checkpoint(checkpoint):
            return False
        self._remove_folder(checkpoint.folder)
        return True

    def expire(self, older_than_s: float | None) -> int:
        """Deletes checkpoints whose time has come; how many."""
        now = time.time()
        found = self._store.expired_checkpoints(now, None if older_than_s is None else now - older_than_s)
        return sum(self.delete(checkpoint) for checkpoint in found)

    def _remove_folder(self, name: str) -> None:
        self._on_removed(name)
        self.folders.remove(name)

    def _check_quota(self, tenant: str, size_bytes: int, replaced: Checkpoint | None) -> None:
        used = self._store.checkpoint_bytes(tenant) - (0 if replaced is None else replaced.size_bytes)
        if used + size_bytes > self._quota_bytes:
            raise Busy(f"your checkpoints would take {used + size_bytes} bytes, and you have {self._quota_bytes}: delete some")

    def room_bytes(self, tenant: str) -> int:
        """How much the tenant may still keep."""
        return max(self._quota_bytes - self._store.checkpoint_bytes(tenant), 0)


def _is_over(checkpoint: Checkpoint) -> bool:
    return checkpoint.expires_at is not None and checkpoint.expires_at <= time.time()


def _taken(kind: str, name: str) -> Conflict:
    return Conflict(f"there is a checkpoint {kind}/{name} of this run already")


def checkpoint_id(checkpoint: Checkpoint) -> str:
    """`weights/NAME` or `sampler_weights/NAME`."""
    return f"{checkpoint.kind}/{checkpoint.name}"
