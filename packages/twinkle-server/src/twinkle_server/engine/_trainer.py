"""One base model in training: many runs' adapters, in memory or on disk. Used from its queue's thread only."""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinkle_remote import LazyResult

from .._config import ModelConfig
from .._errors import Busy, Conflict, Unavailable
from .._folders import Folders
from ..store import Run, Store
from ._build import build_trainer

logger = logging.getLogger(__name__)

# How a run is set up, in the order in which it is done again.
SETUP_VERBS = ("set_loss", "set_optimizer", "set_lr_scheduler")
_READING = frozenset({"forward_only", "calculate_metric", "get_state_dict", "get_train_configs", "save", "save_checkpoint", "lr_step", "set_loss"})
_FINISHING = frozenset({"step", "zero_grad", "clip_grad_and_step", "load", "resume_from_checkpoint"})
_ACCUMULATING = frozenset({"forward", "calculate_loss", "backward", "forward_backward", "clip_grad_norm"})
_RESTORING = frozenset({"load", "resume_from_checkpoint"})
_MAX_TEMPLATES = 64
DEAD = frozenset({"WorkerDiedError", "ComponentLostError", "CallTimeoutError"})


@dataclass
class _Resident:
    """An adapter in memory. is_mid_step: it holds gradients or a graph, which cannot be parked. is_dirty: the disk lacks what it holds."""

    run_id: str
    adapter: str
    is_mid_step: bool = False
    is_dirty: bool = False
    used_at: float = field(default_factory=time.monotonic)


class TrainerBackend:
    """The trainer of one base model.

    At most `max_loras` adapters are in memory. Another one that is called takes the place of the one that was idle for longest, whose state is
    written to disk (weights, optimizer, schedule, counters) and comes back bit for bit when it is called again. One in the middle of a step keeps its
    place, but not for longer than `step_idle_s` without a call: then its gradients are dropped, and its next call is told so.
    """

    def __init__(
        self, config: ModelConfig, store: Store, folders: Folders, *, step_idle_s: float = 120, build: Callable[[ModelConfig], Any] = build_trainer
    ) -> None:
        self.config = config
        self._step_idle_s = step_idle_s
        self._dropped: set[str] = set()
        self._store = store
        self._folders = folders
        self._build = build
        self._model: Any = None
        self._residents: OrderedDict[str, _Resident] = OrderedDict()
        self._templates: OrderedDict[str, Any] = OrderedDict()
        self._tokenizer: Any = None
        self.error: Exception | None = None

    def start(self) -> None:
        """Loads the base model."""
        try:
            self._model = self._build(self.config)
        except Exception as error:  # kept for who asks for the model, whatever the engine failed with
            self.error = error
            raise

    @property
    def is_ready(self) -> bool:
        """Whether the base model is loaded."""
        return self._model is not None

    @property
    def used(self) -> int:
        """Adapters in memory."""
        return len(self._residents)

    def admits(self, run_id: str | None) -> bool:
        """Whether a call on that run could run now: its adapter is in memory, or there is a place for it, or one that can be parked."""
        if not self.is_ready:
            return self.error is not None  # then the call fails, and says so
        if run_id is None or run_id in self._residents or self.used < self.config.max_loras:
            return True
        return self._idle() is not None

    def call(self, run: Run | None, verb: str, **arguments: Any) -> Any:
        """A verb of the trainer contract on a run's adapter, or (run None) on the base model, which may only be read.

        Raises Conflict for a run whose state was lost, unless the verb restores it.
        """
        if run is None:
            if verb not in ("forward_only", "get_train_configs"):
                raise Conflict("the base model is shared: add an adapter and name it")
            return self._do(verb, "" if verb == "forward_only" else None, arguments)
        if verb not in _RESTORING:
            check_whole(run)
        if run.id in self._dropped and verb in _ACCUMULATING | _FINISHING:
            self._dropped.discard(run.id)
            if verb not in _RESTORING and verb != "zero_grad":
                raise Conflict(
                    f"{run.id} was idle for more than {self._step_idle_s:g} s in the middle of a step while others needed its place: its "
                    "gradients were dropped; begin the step again"
                )
        resident = self._bring(run)
        resident.used_at = time.monotonic()
        if verb not in _READING and not resident.is_dirty and not (verb in SETUP_VERBS and run.parked is None):
            self._store.change(Run, run.id, dirty=True)
            resident.is_dirty = True
        try:
            result = self._do(verb, resident.adapter if verb != "get_train_configs" else None, arguments)
        except Exception as error:  # raised again
            # A call out of order changed nothing; any other may have left gradients.
            if verb in _ACCUMULATING and "CallOrderError" not in {base.__name__ for base in type(error).__mro__}:
                resident.is_mid_step = True
            raise
        finally:
            resident.used_at = time.monotonic()
        if verb in _ACCUMULATING:
            resident.is_mid_step = True
        if verb in _FINISHING:
            resident.is_mid_step = False
        if verb in ("step", "clip_grad_and_step"):
            self._store.change(Run, run.id, steps=run.steps + 1, used_at=time.time())
        elif verb in _RESTORING:
            self._store.change(Run, run.id, corrupted=False, used_at=time.time())
        return result

    def resume(self, run: Run, path: str, saved_as: str) -> dict[str, Any]:
        """resume_from_checkpoint, of a state that was written of an adapter of that name; returns its user_state."""
        return dict(self.call(run, "resume_from_checkpoint", path=path, saved_as=saved_as))

    def configure(self, run: Run, verb: str, arguments: Mapping[str, Any]) -> None:
        """set_loss, set_optimizer or set_lr_scheduler with plain values; it is done again whenever the adapter comes back."""
        if verb not in SETUP_VERBS:
            raise ValueError(f"{verb} is none of {SETUP_VERBS}")
        self.call(run, verb, **arguments)
        setup = {**run.setup, verb: dict(arguments)}
        if verb == "set_optimizer":
            setup.pop("set_lr_scheduler", None)  # it is constant again
        self._store.change(Run, run.id, setup=setup)

    def adjust(self, run: Run, settings: Mapping[str, Any]) -> None:
        """adjust_optimizer; its settings are those of the optimizer whenever the adapter comes back."""
        self.call(run, "adjust_optimizer", **settings)
        if "set_optimizer" in run.setup:  # or it came with a checkpoint, and its settings with it
            self._store.change(Run, run.id, setup={**run.setup, "set_optimizer": {**run.setup["set_optimizer"], **settings}})

    def template(self, options: Mapping[str, Any]) -> Any:
        """The model's own chat template (`twinkle_data.Template`) with these options: max_length, truncation, system.

        The trainer is not told of it: its template would be all tenants'.
        """
        from twinkle_data import Template

        key = json.dumps(options, sort_keys=True)
        if key not in self._templates:
            while len(self._templates) >= _MAX_TEMPLATES:
                self._templates.popitem(last=False)
            if self._tokenizer is None:
                self._tokenizer = Template(Path(self.config.path)).tokenizer
            self._templates[key] = Template(self._tokenizer, **options)
        self._templates.move_to_end(key)
        return self._templates[key]

    def touch(self, run: Run) -> None:
        """Brings a run's adapter into memory."""
        self._bring(run)

    def park_all(self) -> None:
        """Writes every adapter that can be to disk, before the server stops. Those in the middle of a step are reported as lost afterwards."""
        for resident in list(self._residents.values()):
            if resident.is_mid_step:
                logger.warning("%s is in the middle of a step: its state is lost", resident.run_id)
                continue
            try:
                self._park(resident)
            except Exception:  # the others are parked all the same
                logger.exception("%s could not be parked", resident.run_id)

    def drop(self, run_id: str) -> None:
        """Takes a run's adapter out of memory without keeping it."""
        resident = self._residents.pop(run_id, None)
        if resident is not None:
            self._do("remove_adapter", resident.adapter, {})

    def close(self) -> None:
        """Lets go of the model."""
        model, self._model = self._model, None
        if model is not None:
            model.close()

    def _do(self, verb: str, adapter: str | None, arguments: Mapping[str, Any]) -> Any:
        if self._model is None:
            raise Unavailable(f"{self.config.name} could not be loaded; the server's log says why")
        named = {} if adapter is None else {"adapter_name": adapter}
        try:
            result = getattr(self._model, verb)(**arguments, **named)
            return result.get() if isinstance(result, LazyResult) else result
        except Exception as error:  # by name: the layer that lost the workers may be any of the engines'
            if DEAD & {base.__name__ for base in type(error).__mro__}:
                self._start_again()
            raise

    def _start_again(self) -> None:
        """After the workers were lost: a new model; runs whose state was only in their memory are corrupted."""
        logger.error("the workers of %s were lost; it is loaded again", self.config.name)
        for resident in self._residents.values():
            if resident.is_dirty:
                self._store.change(Run, resident.run_id, dirty=False, corrupted=True)
        self._residents.clear()
        self._model = None
        self.start()

    def _bring(self, run: Run) -> _Resident:
        if (resident := self._residents.get(run.id)) is not None:
            self._residents.move_to_end(run.id)
            return resident
        while self.used >= self.config.max_loras:
            idle = self._idle()
            if idle is None:
                raise Busy("all adapters in memory hold unfinished steps; try again later", retry_after_s=10)
            if idle.is_mid_step:
                self._do("zero_grad", idle.adapter, {})
                idle.is_mid_step = False
                self._dropped.add(idle.run_id)
            self._park(idle)
        self._do("add_adapter_to_model", run.adapter, {"config": dict(run.lora)})
        model = self._model
        try:
            for verb in SETUP_VERBS:
                if verb in run.setup:
                    self._do(verb, run.adapter, run.setup[verb])
            if run.parked is not None and not run.corrupted:
                self._do("resume_from_checkpoint", run.adapter, {"path": str(self._folders.path(run.parked) / "state"), "saved_as": run.adapter})
        except Exception:  # half an adapter must not stay; a model that was loaded again has none
            if self._model is model:
                self._do("remove_adapter", run.adapter, {})
            raise
        resident = self._residents[run.id] = _Resident(run.id, run.adapter)
        return resident

    def _idle(self) -> _Resident | None:
        """The adapter that makes way for another: idle for longest, and not in the middle of a step unless it has been for too long."""
        oldest = time.monotonic() - self._step_idle_s
        residents = tuple(self._residents.values())  # the event loop asks, too, while calls change it
        return next(
            (each for each in residents if not each.is_mid_step),
            next((each for each in residents if each.used_at < oldest), None),
        )

    def _park(self, resident: _Resident) -> None:
        run = self._store.get(Run, resident.run_id)
        if resident.is_dirty and not (run is not None and run.ended_at is not None):
            written = self._folders.write(lambda folder: self.save_state(resident.adapter, folder / "state"), {"kind": "parked"})
            self._store.change(Run, resident.run_id, parked=written.name, dirty=False)
            resident.is_dirty = False
            if run is not None and run.parked is not None:
                self._folders.remove(run.parked)
        self._residents.pop(resident.run_id)
        self._do("remove_adapter", resident.adapter, {})

    def save_state(self, adapter: str, folder: Path, user_state: Mapping[str, Any] | None = None) -> None:
        """Writes an adapter's training checkpoint."""
        self._do("save_checkpoint", adapter, {"path": str(folder), "user_state": dict(user_state or {})})

    def save_adapter(self, adapter: str, folder: Path) -> None:
        """Writes an adapter in peft's format."""
        self._do("save", adapter, {"path": str(folder)})


def check_whole(run: Run) -> None:
    """Raises Conflict for a run whose state was lost."""
    if run.corrupted:
        raise Conflict(f"the server stopped while the state of {run.id} was in memory only, so it is lost: load or resume from a checkpoint to go on")
