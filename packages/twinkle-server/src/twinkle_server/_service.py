"""The service behind the routes: configuration, database, keys, sessions, runs, calls, models."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ._checkpoints import Checkpoints
from ._config import ServerConfig
from ._errors import Failed, NotFound, describe
from ._folders import Folders
from ._keys import KeyRing, Principal
from ._metrics import Metrics
from ._processors import Processors
from ._runs import Runs
from ._sessions import Sessions
from ._tracing import Tracing
from .engine._build import start_runtime
from .engine._calls import Calls, Context, Handler, Reply
from .engine._sampler import SamplerBackend
from .engine._trainer import TrainerBackend
from .http._limits import Buckets
from .store import AuditEntry, Future, Run, Store

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Service:
    """Everything that routes use. `start` and `stop` belong to the application's life.

    What its parts are for is in docs/service.md: `config`, `store`, `keys`, `sessions`, `runs`, `calls`, `checkpoints`, `trainers`, `samplers`.
    """

    def __init__(self, config: ServerConfig, store: Store | None = None) -> None:
        self.config = config
        config.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.store = store or Store(config.url)
        self.folders = Folders(config.data_dir)
        self.keys = KeyRing(self.store)
        self.requests = Buckets(config.limits.requests_per_s, config.limits.request_burst)
        self.failed_logins = Buckets(config.limits.failed_logins_per_minute / 60, config.limits.failed_logins_per_minute)
        self.sessions = Sessions(config, self.store, self.io)
        self.runs = Runs(config, self.store, self.folders)
        self.checkpoints = Checkpoints(self.store, self.folders, quota_bytes=config.limits.checkpoint_bytes, on_removed=self._forget_adapter)
        self.metrics = Metrics()
        self.tracing = Tracing(config.tracing)
        self.receiving: Counter[str] = Counter()  # bytes of uploads under way, by tenant
        self.processors = Processors(config, self._template)
        self.calls = Calls(self)
        self.trainers: dict[str, TrainerBackend] = {}
        self.samplers: dict[str, SamplerBackend] = {}
        self._io = ThreadPoolExecutor(8, thread_name_prefix="io")
        self._files = ThreadPoolExecutor(8, thread_name_prefix="files")
        self._tasks: list[asyncio.Task[None]] = []
        self._runtime: Any = None
        for model in config.models:
            if model.trainable:
                self.trainers[model.name] = trainer = TrainerBackend(model, self.store, self.folders, step_idle_s=config.limits.step_idle_s)
                self.calls.make_queue(
                    trainer_queue(model.name), concurrency=1, admits=lambda work, trainer=trainer: trainer.admits(work.future.run_id)
                )
            if model.sampler is not None:
                self.samplers[model.name] = sampler = SamplerBackend(model, model.sampler, self.folders)
                self.calls.make_queue(
                    sampler_queue(model.name), concurrency=model.sampler.concurrency, admits=lambda work, sampler=sampler: sampler.admits()
                )

    async def io(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Runs what blocks for moments (the database) in a thread. The layers' own errors become those of requests."""
        return await self._in_thread(self._io, function, *arguments, **named)

    async def file_io(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """As `io`, for what may take long (files, datasets): it does not hold up others' control requests."""
        return await self._in_thread(self._files, function, *arguments, **named)

    async def _in_thread(self, pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        def run() -> T:
            try:
                return function(*arguments, **named)
            except Exception as error:  # told in the caller's words where a layer speaks of the request, else as it is
                told = describe(error)
                if told is error or isinstance(told, Failed):
                    raise
                raise told from error

        return await asyncio.get_running_loop().run_in_executor(pool, run)

    async def start(self) -> None:
        """Takes up what is in the database, and begins to load models and to run calls; returns before the models are loaded."""
        self.folders.lock()
        lost = await self.io(self.store.mark_lost_runs)
        if lost:
            logger.warning("the state of %d runs was in memory only when the server before stopped, and is lost: %s", len(lost), ", ".join(lost[:10]))
        gone = await self.io(self.folders.sweep, self.store.known_folders)
        if gone:
            logger.info("removed %d folders that a server before had not finished", len(gone))
        await self.sessions.start()
        if self.config.models:
            self._runtime = start_runtime(self.config.runtime)
        await self.calls.start()
        self._tasks = [asyncio.create_task(self._load_all()), asyncio.create_task(self._rounds())]

    async def stop(self) -> None:
        """Lets running calls end, parks adapters, and closes everything. What fails (a full disk, for one) is logged, and keeps nothing else open."""
        for task in self._tasks:
            task.cancel()
        with _logged("stopping the calls"):
            await self.calls.stop()
        for name, trainer in self.trainers.items():
            if trainer.is_ready:
                with _logged(f"parking the adapters of {name}"):
                    await asyncio.get_running_loop().run_in_executor(self.calls.queue(trainer_queue(name)).pool, _put_away, trainer)
        for name, sampler in self.samplers.items():
            with _logged(f"closing {name}"):
                sampler.close()
        with _logged("writing down when sessions were last seen"):
            await self.sessions.flush()
        if self._runtime is not None:
            with _logged("ending the workers"):
                await self.io(self._runtime.shutdown)
        for queue in self.calls.queues.values():
            queue.pool.shutdown(wait=False, cancel_futures=True)
        with _logged("closing the database"):
            self.store.close()
        self.folders.unlock()
        with _logged("sending the last traces"):
            await self.io(self.tracing.close)
        self._io.shutdown(wait=False)
        self._files.shutdown(wait=False)

    def run_handler(self, handler: Handler, future: Future, value: Any) -> Reply:
        """Runs a call, in its queue's thread."""
        role, _, model = future.queue.partition(":")
        run = None
        if future.run_id is not None:
            run = self.store.get(Run, future.run_id)
            if run is None or run.ended_at is not None:
                raise NotFound(f"the training run {future.run_id} has ended")
        if future.seq is not None and run is not None:
            # Before it runs: a call that was lost with the server must not be waited for.
            self.store.change(Run, run.id, next_seq=future.seq + 1)
        context = Context(
            service=self,
            future=future,
            run=run,
            trainer=self.trainers.get(model) if role == "model" else None,
            sampler=self.samplers.get(model) if role == "sampler" else None,
        )
        if value is None:
            if future.payload is None:
                raise Failed("the call's payload is not there any more")
            value = handler.decode(future.payload)
        return replace(handler.run(context, value), points=tuple(context.points))

    def drop(self, run: Run) -> None:
        """Has the adapter of a run that has ended leave memory, in its trainer's thread, between calls."""
        trainer = self.trainers.get(run.base_model)
        if trainer is not None:
            self.calls.queue(trainer_queue(run.base_model)).pool.submit(_drop, trainer, run.id)

    @property
    def capacity(self) -> tuple[int, int]:
        """How many adapters can be in memory, over all models, and how many are; known from the start."""
        return sum(trainer.config.max_loras for trainer in self.trainers.values()), sum(trainer.used for trainer in self.trainers.values())

    def checks(self) -> dict[str, str]:
        """What is ready: 'ok', 'loading' or 'failed' of each model and sampler, and of the database. Blocks."""
        backends = {trainer_queue(name): each for name, each in self.trainers.items()} | {
            sampler_queue(name): each for name, each in self.samplers.items()
        }
        found = {name: "ok" if each.is_ready else "loading" if each.error is None else "failed" for name, each in backends.items()}
        try:
            self.store.ping()
            found["database"] = "ok"
        except Exception:  # any of the driver's: it does not answer
            logger.exception("the database does not answer")
            found["database"] = "failed"
        return found

    def audit(self, principal: Principal, action: str, target: str, request_id: str = "") -> None:
        """Writes into the audit log who did what. Blocks."""
        self.store.log(
            AuditEntry(
                at=time.time(), tenant=principal.tenant, key_id=principal.key_id, action=action, target=target[:500], request_id=request_id[:200]
            )
        )

    def collect_garbage(self) -> dict[str, int]:
        """Deletes what retention says, and folders that nobody knows; how many of each. Blocks."""
        now, retention = time.time(), self.config.retention
        return {
            "rows": self.store.forget(futures_before=now - retention.future_s, audit_before=now - retention.audit_s),
            "checkpoints": self.checkpoints.expire(retention.checkpoint_s),
        }

    async def _load_all(self) -> None:
        # One after another: engines import the same libraries, whose lazy modules threads must not enter at once.
        for name, trainer in self.trainers.items():
            await self._load(trainer_queue(name), trainer.start)
        for name, sampler in self.samplers.items():
            await self._load(sampler_queue(name), sampler.start)

    async def _load(self, name: str, start: Callable[[], None]) -> None:
        begun = time.monotonic()
        queue = self.calls.queue(name)
        try:
            await asyncio.get_running_loop().run_in_executor(queue.pool, start)
            logger.info("%s is ready after %.1f s", name, time.monotonic() - begun)
        except Exception:  # the service goes on with the others, and /healthz/deep says so
            logger.exception("%s could not be loaded", name)
        queue.wake()

    async def _rounds(self) -> None:
        next_collection = 0.0
        while True:
            await asyncio.sleep(min(5.0, self.config.retention.every_s, self.config.limits.step_idle_s))
            try:
                await self.sessions.round()
                await self.calls.expire()
                for queue in self.calls.queues.values():
                    queue.wake()  # an adapter may have been idle for long enough by now
                self.processors.expire(self.config.retention.processor_s)
                if time.monotonic() >= next_collection:
                    await self.io(self.collect_garbage)
                    next_collection = time.monotonic() + self.config.retention.every_s
            except Exception:  # the next round may fare better
                logger.exception("a round of upkeep failed")

    def _template(self, model: str, options: Mapping[str, Any]) -> Any:
        from .native._convert import data_layer

        config = self.config.model(model)
        if config is None:
            raise NotFound(f"there is no base model {model[:200]!r}")
        return data_layer().Template(Path(config.path), **options)

    def _forget_adapter(self, folder: str) -> None:
        for sampler in self.samplers.values():
            if sampler.is_ready:
                sampler.forget(folder)


def trainer_queue(model: str) -> str:
    """The name of a model's training queue."""
    return f"model:{model}"


def sampler_queue(model: str) -> str:
    """The name of a model's sampling queue."""
    return f"sampler:{model}"


def _drop(trainer: TrainerBackend, run_id: str) -> None:
    try:
        trainer.drop(run_id)
    except Exception:  # of a thread that nobody waits for
        logger.exception("the adapter of %s could not be dropped", run_id)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """What is raised in this context is logged."""
    try:
        yield
    except Exception:  # of any part; the others are to be closed, too
        logger.exception("%s failed while the server stopped", what)


def _put_away(trainer: TrainerBackend) -> None:
    trainer.park_all()
    trainer.close()
