"""The one place that remembers something: the runtime of this process and, in a worker, which worker it is."""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from twinkle_remote._errors import RuntimeStateError
from twinkle_remote._local import LocalRuntime
from twinkle_remote._meeting import HeldPort, Rendezvous, hold_port
from twinkle_remote._protocol import Runtime


@dataclass(slots=True)
class WorkerState:
    """What a worker process is told when its component is built. host: this machine's address, as the others reach it."""

    host: str
    rendezvous: Rendezvous


_runtime: Runtime | None = None
_worker: WorkerState | None = None
# The in-process components that are running one of their remote methods, by id: what these call on themselves is a plain call.
active: ContextVar[frozenset[int]] = ContextVar("active", default=frozenset())


@contextmanager
def running(target: object) -> Generator[None]:
    """While a method of `target` runs: what it calls on itself is a plain call."""
    token = active.set(active.get() | {id(target)})
    try:
        yield
    finally:
        active.reset(token)


class RunningIterator(Iterator[Any]):
    """An iterator over what a method of `target` yields, which runs as the method's own code does."""

    def __init__(self, target: object, iterator: Iterator[Any]) -> None:
        self._target = target
        self._iterator = iterator

    def __next__(self) -> Any:
        with running(self._target):
            return next(self._iterator)

    def close(self) -> None:
        """If it is a generator, close it, as Python does when nobody holds it any more."""
        generator: Any = self._iterator
        if isinstance(generator, Generator):
            with running(self._target):
                generator.close()  # pyright: ignore[reportUnknownMemberType]

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter ends, this module's names may be gone already; what the generator holds ends with the process.
        if not is_finalizing():
            self.close()


def current_runtime() -> Runtime:
    """The runtime that `initialize` made; without it a local one, so that components work in process."""
    return _runtime if _runtime is not None else LocalRuntime()


def install_runtime(runtime: Runtime) -> None:
    """Make `runtime` the current one. Raises RuntimeStateError if there is one."""
    global _runtime
    check_not_initialized()
    _runtime = runtime


def check_not_initialized() -> None:
    """Raises RuntimeStateError if this process is initialised or is a worker."""
    if _worker is not None:
        raise RuntimeStateError("this is a worker process: only the driver script calls initialize()")
    if _runtime is not None:
        raise RuntimeStateError(f"already initialised in mode {_runtime.mode!r}: call shutdown() first")


def forget_runtime(runtime: Runtime) -> None:
    """`runtime` is shut down."""
    global _runtime
    if _runtime is runtime:
        _runtime = None


def shutdown() -> None:
    """Shut the current runtime down: end its workers and the Ray it started. Without `initialize` it does nothing."""
    if _runtime is not None:
        _runtime.shutdown()


def become_worker(state: WorkerState, runtime: Runtime) -> None:
    """Called once, in a worker process."""
    global _worker, _runtime
    _worker, _runtime = state, runtime


def in_worker() -> bool:
    """Whether this process is a worker that a runtime started."""
    return _worker is not None


def rendezvous() -> Rendezvous | None:
    """Where the ranks of this worker's component meet; None outside a worker (torchrun's environment says it there)."""
    return None if _worker is None else _worker.rendezvous


def held_port() -> HeldPort:
    """A free port of this machine, bound and listening, for a rendezvous of your own (between two groups, say).

    In a worker its host is the address under which the other nodes reach this one, else 127.0.0.1.
    """
    return hold_port("127.0.0.1" if _worker is None else _worker.host)
