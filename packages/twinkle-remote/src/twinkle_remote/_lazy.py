"""LazyResult: a result that stays where it was made until somebody needs it."""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, cast

from twinkle_remote._errors import CallTimeoutError, RemoteTypeError, RuntimeStateError

_FETCH_S = 1.0


class Source(Protocol):
    """Where a LazyResult's value comes from."""

    def ready(self) -> bool:
        """Whether `collect` would not wait."""
        ...

    def collect(self, timeout_s: float | None) -> Any:
        """Wait for the value and put it together. Raises what the call raised."""
        ...

    def wait_all(self, sources: "Sequence[Source]", timeout_s: float | None) -> None:
        """Wait until all sources are ready; raises the first failure of any at once."""
        ...


class ValueSource:
    """A value that is here already."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def ready(self) -> bool:
        return True

    def collect(self, timeout_s: float | None) -> Any:
        return self.value

    def wait_all(self, sources: Sequence[Source], timeout_s: float | None) -> None:
        return None


# While a call's arguments are packed for the workers: takes a LazyResult that is met on the way (and whether a worker needs only its part
# of it) and returns how to pickle it.
packing: ContextVar[Callable[["LazyResult", bool], tuple[Any, ...]] | None] = ContextVar("packing", default=None)
# While arguments are unpacked in a worker: the values of the slots.
slots: ContextVar[Sequence[Any]] = ContextVar("slots", default=())


def read_slot(index: int) -> Any:
    """The value of a slot, in a worker that unpacks arguments."""
    return slots.get()[index]


def _same(value: Any) -> Any:
    return value


class LazyResult:
    """What a remote method returns: its value, not fetched yet.

    Behaves like the value where that is a sequence: `len`, iteration, indexing and truth collect it into this process.
    `await result` and `result.get(timeout_s=)` give the value. Passed to another remote method, at any depth of the
    arguments, it is replaced by the value there: each worker fetches what it needs from the workers that made it, and
    nothing passes through this process.

    What the call raised is raised by everything that collects. In local mode the value is there at once.
    """

    __slots__ = ("__weakref__", "_error", "_lock", "_source", "_value")

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._value: tuple[Any] | None = None
        self._error: BaseException | None = None

    @property
    def source(self) -> Source:
        """Where the value comes from; for runtimes."""
        return self._source

    def ready(self) -> bool:
        """Whether the call has finished, well or not: whether `get` would not wait for a worker."""
        return self._value is not None or self._error is not None or self._source.ready()

    def get(self, timeout_s: float | None = None) -> Any:
        """The collected value.

        timeout_s: seconds to wait at most; default: the method's or the runtime's deadline. Raises what the call raised
        (see RemoteCallError), WorkerDiedError, or CallTimeoutError, which leaves the result usable if `timeout_s` was given.
        """
        begin = time.monotonic()
        # Another thread that collects without a limit of its own has the call's deadline.
        if not self._lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            raise CallTimeoutError(f"another thread was still collecting this result after {timeout_s} s")
        try:
            if self._error is not None:
                raise self._error
            if self._value is None:
                left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begin))
                try:
                    self._value = (self._source.collect(left_s),)
                except TimeoutError:
                    raise
                except Exception as error:
                    self._error = error
                    raise
            return self._value[0]
        finally:
            self._lock.release()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.get_running_loop().run_in_executor(None, self.get).__await__()

    def __len__(self) -> int:
        return len(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __getitem__(self, index: Any) -> Any:
        return self.get()[index]

    def __contains__(self, item: Any) -> bool:
        return item in self.get()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a LazyResult has no attribute {name!r}: call .get() (or await it) for the value, or decorate with lazy_collect=False")

    def __repr__(self) -> str:
        if self._value is not None:
            return f"LazyResult({self._value[0]!r})"
        try:
            state = "failed" if self._error is not None else "ready" if self.ready() else "running"
        except RuntimeStateError:
            state = "lost"
        return f"<LazyResult {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        register = packing.get()
        return (_same, (self.get(),)) if register is None else register(self, False)


def gather(*results: LazyResult, timeout_s: float | None = None) -> list[Any]:
    """Wait for several results together and return their values.

    The first failure of any call is raised at once, also while others still run. timeout_s: seconds for all; CallTimeoutError
    names what still runs.
    """
    for result in results:
        if not isinstance(result, LazyResult):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RemoteTypeError(f"gather takes LazyResults, not {type(result).__name__}")
    begin = time.monotonic()
    waiting = [result.source for result in results if not isinstance(result.source, ValueSource)]
    if waiting:
        waiting[0].wait_all(waiting, timeout_s)
    # What they return is fetched within the same time, or within a moment if it has just run out.
    return [result.get(None if timeout_s is None else max(_FETCH_S, timeout_s - (time.monotonic() - begin))) for result in results]


_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})


def resolve(value: Any) -> Any:
    """`value` with every LazyResult in lists, tuples, dict values and dataclass fields replaced by its value.

    Returns `value` itself where there is none.
    """
    kind = cast("type[Any]", type(value))
    if kind in _ATOMS:
        return value
    if isinstance(value, LazyResult):
        return value.get()
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        if _ATOMS.issuperset(map(type, items)):
            return items
        resolved = [resolve(item) for item in items]
        if all(new is old for new, old in zip(resolved, items, strict=True)):
            return items
        if hasattr(kind, "_fields"):
            return kind(*resolved)
        return kind(resolved)
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        changed = {key: new for key, old in entries.items() if (new := resolve(old)) is not old}
        return {**entries, **changed} if changed else entries
    if is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: new for f in fields(value) if f.init and (new := resolve(getattr(value, f.name))) is not getattr(value, f.name)}
        return replace(value, **changes) if changes else value
    return value
