"""Runs: one adapter of one tenant each. All methods block."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy.exc import IntegrityError

from ._config import ServerConfig
from ._errors import Busy, Invalid, NotFound
from ._folders import Folders
from ._keys import Principal
from ._paths import check_label
from .store import Run, Session, Store

_LORA_FIELDS = frozenset({"r", "lora_alpha", "target_modules", "lora_dropout", "use_rslora"})


class Runs:
    """The runs of all tenants."""

    def __init__(self, config: ServerConfig, store: Store, folders: Folders) -> None:
        self._config = config
        self._store = store
        self._folders = folders

    def create(
        self,
        principal: Principal,
        base_model: str,
        lora: Mapping[str, Any],
        *,
        run_id: str | None = None,
        session_id: str | None = None,
        name: str = "",
        label: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> tuple[Run, bool]:
        """Records a run; its adapter is made when it is called first (`TrainerBackend.touch`). Returns it, and whether it is new.

        lora: the fields of `twinkle_train.LoraConfig`. run_id: None picks one; where the tenant has a run of that id, it is returned.

        Raises NotFound for an unknown base model or session, Invalid for a rank that is too large, Busy beyond the tenant's number.
        """
        model = self._config.model(base_model)
        if model is None or not model.trainable:
            raise NotFound(f"there is no base model {base_model[:200]!r} to train")
        rank = lora.get("r", 8)
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= model.max_rank:
            raise Invalid(f"r must be from 1 to {model.max_rank} for {base_model}, got {rank!r}")
        if unknown := sorted(set(lora) - _LORA_FIELDS):
            raise Invalid(f"unsupported LoRA settings {', '.join(unknown)}; supported are {', '.join(sorted(_LORA_FIELDS))}")
        if session_id is not None:
            session = self._store.get(Session, session_id)
            if session is None or session.tenant != principal.tenant:
                raise NotFound(f"there is no session {session_id[:200]}")
        if run_id is not None and (before := self._store.get(Run, run_id)) is not None:
            return self.own(principal, before.id), False
        if self._store.count_runs(principal.tenant) >= self._config.limits.runs:
            raise Busy(f"you have {self._config.limits.runs} runs already: end some")
        now = time.time()
        run = Run(
            id=run_id or f"run-{secrets.token_hex(10)}",
            tenant=principal.tenant,
            session_id=session_id,
            base_model=base_model,
            adapter=f"a{secrets.token_hex(8)}",
            lora=dict(lora),
            label=check_label(label, "save_dir"),
            name=check_label(name, "adapter_name"),
            metadata=dict(metadata or {}),
            created_at=now,
            used_at=now,
        )
        try:
            return self._store.add(run), True
        except IntegrityError:
            return self.own(principal, run.id), False

    def own(self, principal: Principal, run_id: str) -> Run:
        """The tenant's run of that id; NotFound without one."""
        run = self._store.get(Run, run_id)
        if run is None or run.tenant != principal.tenant:
            raise NotFound(f"there is no training run {run_id[:200]}")
        return run

    def end(self, principal: Principal, run_id: str) -> Run:
        """Ends the tenant's run, whose checkpoints stay; NotFound without one. Its adapter leaves memory with its trainer's next call."""
        run = self.own(principal, run_id)
        if run.ended_at is not None:
            raise NotFound(f"there is no training run {run_id[:200]}")
        self._store.end_run(run.id)
        if run.parked is not None:
            self._folders.remove(run.parked)
        return run

    def visible(self, principal: Principal, run_id: str) -> Run:
        """As `own`; for an admin any tenant's."""
        run = self._store.get(Run, run_id)
        if run is None or not (run.tenant == principal.tenant or principal.is_admin):
            raise NotFound(f"there is no training run {run_id[:200]}")
        return run

    def named(self, principal: Principal, session_id: str | None, base_model: str, name: str) -> Run:
        """The newest run that the session gave that adapter name (or the tenant, without a session); NotFound without one."""
        run = self._store.find_run(principal.tenant, session_id, base_model, name)
        if run is None:
            raise NotFound(f"there is no adapter {name[:200]!r} on {base_model[:200]}: call add_adapter_to_model first")
        return run
