"""LazyResult: a result that stays where it was made until somebody needs it."""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, Protocol, SupportsIndex, TypeVar, cast, overload

from twinkle_remote._errors import CallTimeoutError, RemoteError, RemoteTypeError, RuntimeStateError
from twinkle_remote._seconds import check_seconds
from twinkle_remote._views import Batch, Concat, Cut, Held, Map, Operation

_FETCH_S = 1.0
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
E = TypeVar("E")
U = TypeVar("U")


class Source(Protocol):
    """Where a LazyResult's value comes from."""

    def ready(self) -> bool:
        """Whether `open` would not wait."""
        ...

    def open(self, timeout_s: float | None) -> Batch:
        """Wait until the value is there, but do not fetch it. Raises what the call raised."""
        ...

    def calls(self) -> "Sequence[CallLike]":
        """The sources that have to be waited for."""
        ...


class CallLike(Source, Protocol):
    """The source that is a call on workers."""

    def claim(self) -> None:
        """Somebody is about to wait for it, and will have its error."""
        ...

    def wait_all(self, sources: "Sequence[CallLike]", timeout_s: float | None) -> None:
        """Wait until all sources are ready; raises the first failure of any at once."""
        ...


class ValueSource:
    """A value that is here already."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def ready(self) -> bool:
        return True

    def open(self, timeout_s: float | None) -> Batch:
        return Held(self.value)

    def calls(self) -> Sequence[CallLike]:
        return ()


class ViewSource:
    """An operation on other sources, which is done where the value is needed."""

    __slots__ = ("inner", "operation")

    def __init__(self, operation: Operation, inner: Sequence[Source]) -> None:
        self.operation = operation
        self.inner = tuple(inner)

    def ready(self) -> bool:
        return all(source.ready() for source in self.inner)

    def open(self, timeout_s: float | None) -> Batch:
        wait_for_all(self.calls(), timeout_s)
        return self.operation.over([source.open(timeout_s) for source in self.inner])

    def calls(self) -> Sequence[CallLike]:
        return [call for source in self.inner for call in source.calls()]


# While a call's arguments are packed for the workers: takes a LazyResult that is met on the way (and whether a worker needs only its part
# of it) and returns how to pickle it.
packing: ContextVar[Callable[["LazyResult[Any]", bool], tuple[Any, ...]] | None] = ContextVar("packing", default=None)
# While arguments are unpacked in a worker: the values of the slots.
slots: ContextVar[Sequence[Any]] = ContextVar("slots", default=())


def read_slot(index: int) -> Any:
    """The value of a slot, in a worker that unpacks arguments."""
    return slots.get()[index]


def wait_for_all(calls: Sequence[CallLike], timeout_s: float | None) -> None:
    """Wait until all calls have finished. Raises the first failure of any at once."""
    if calls:
        calls[0].wait_all(calls, timeout_s)


def _same(value: Any) -> Any:
    return value


class LazyResult(Sequence[Any], Generic[T_co]):
    """What a remote method returns: its value, not fetched yet.

    Behaves like the value where that is a sequence: iteration, an index and truth collect it into this process; `len` waits for it
    but fetches nothing. `await result` and `result.get(timeout_s=)` give the value. Passed to another remote method, at any depth of the
    arguments, it is replaced by the value there: each worker fetches what it needs from the workers that made it, and nothing passes through
    this process.

    `result[2:8]`, `first + second` and `result.map(function)` are LazyResults again. Nothing is fetched for them: the process that needs their
    items fetches just those and calls the function on them.

    What the call raised is raised by everything that collects. In local mode the value is there at once.

    For type checkers, a LazyResult is a sequence and goes where a method takes one (`inputs: Sequence[Row]`). For a parameter of another type
    pass `result.passed`.
    """

    __slots__ = ("__weakref__", "_error", "_failed", "_lock", "_source", "_value")
    __array_ufunc__ = None  # array + result is our __radd__, not numpy's addition

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._value: tuple[Any] | None = None
        self._error: BaseException | None = None
        self._failed = False

    @property
    def source(self) -> Source:
        """Where the value comes from; for runtimes."""
        return self._source

    @property
    def passed(self) -> T_co:
        """This result itself, typed as its value: for passing it to a remote method, `b.take(a.make().passed)`, under a type checker."""
        return cast("T_co", self)

    def ready(self) -> bool:
        """Whether the call has finished, well or not: whether `get` would not wait for a worker."""
        return self._value is not None or self._error is not None or self._source.ready()

    def get(self, timeout_s: float | None = None) -> T_co:
        """The collected value.

        timeout_s: seconds to wait at most; default: the method's or the runtime's deadline. Raises what the call raised
        (see RemoteCallError), WorkerDiedError, or CallTimeoutError, which leaves the result usable if `timeout_s` was given.
        """
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s, zero=True)
        begin = time.monotonic()
        # Another thread that collects without a limit of its own has the call's deadline.
        left_s = timeout_s
        if not self._lock.acquire(blocking=False):
            if not self._lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
                raise CallTimeoutError(f"another thread was still collecting this result after {timeout_s} s")
            left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begin))
        try:
            if self._value is None:
                self._value = (self._remembering(lambda: self._collect(left_s)),)
            return self._value[0]
        finally:
            self._lock.release()

    def map(self: "LazyResult[Iterable[E]]", function: Callable[[E], U]) -> "LazyResult[list[U]]":
        """`function` of each item, as a list (as a tuple where the value is one). It is called by whoever needs the items, in that process: by
        each worker for the items that it takes (peers that take the same items all call it), or here by `get`. So it must pickle, and depend
        on its item only.
        """
        return LazyResult(ViewSource(Map(function), [self._source]))

    def __await__(self) -> Generator[Any, None, T_co]:
        for call in self._source.calls():
            call.claim()
        return asyncio.get_running_loop().run_in_executor(None, self.get).__await__()

    def __len__(self) -> int:
        if self._value is None:
            with self._lock:
                if self._value is None and (length := self._remembering(lambda: self._source.open(None).length)) is not None:
                    return length
        return len(cast("Any", self.get()))

    def __bool__(self) -> bool:
        if self._value is None:
            with self._lock:
                if self._value is None and (length := self._remembering(lambda: self._source.open(None).length)) is not None:
                    return length > 0
        return bool(self.get())

    def __iter__(self: "LazyResult[Iterable[E]]") -> Iterator[E]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self.get())

    @overload
    def __getitem__(self: "LazyResult[Sequence[E]]", index: SupportsIndex) -> E: ...
    @overload
    def __getitem__(self, index: slice) -> "LazyResult[T_co]": ...
    @overload
    def __getitem__(self, index: Any) -> Any: ...
    def __getitem__(self, index: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(index, slice):
            return LazyResult[Any](ViewSource(Cut(cast("slice", index)), [self._source]))
        return cast("Any", self.get())[index]

    def __add__(self, other: "LazyResult[T] | list[Any] | tuple[Any, ...]") -> "LazyResult[T_co]":
        return NotImplemented if (source := _as_source(other)) is None else _concatenated(self._source, source)

    def __radd__(self, other: "list[Any] | tuple[Any, ...]") -> "LazyResult[T_co]":
        return NotImplemented if (source := _as_source(other)) is None else _concatenated(source, self._source)

    def __contains__(self, item: object) -> bool:
        return item in cast("Any", self.get())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a LazyResult has no attribute {name!r}: call .get() (or await it) for the value, or decorate with lazy_collect=False")

    def __repr__(self) -> str:
        if self._value is not None:
            return f"LazyResult({self._value[0]!r})"
        try:
            state = "failed" if self._failed or self._error is not None else "ready" if self.ready() else "running"
        except RuntimeStateError:
            state = "lost"
        return f"<LazyResult {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        register = packing.get()
        return (_same, (self.get(),)) if register is None else register(self, False)

    def _collect(self, timeout_s: float | None) -> Any:
        begin = time.monotonic()
        whole = self._source.open(timeout_s).whole()
        # A result that is here already is taken also after a deadline that its call has just kept.
        return whole.run(None if timeout_s is None else max(_FETCH_S, timeout_s - (time.monotonic() - begin)))

    def _remembering(self, ask: Callable[[], U]) -> U:
        """What `ask` says. An error other than a time-out is raised again by all that comes: ours by the source itself."""
        if self._error is not None:
            raise self._error
        try:
            return ask()
        except TimeoutError:
            raise
        except RemoteError:
            self._failed = True
            raise
        except Exception as error:
            self._error = error
            raise


def _as_source(value: Any) -> Source | None:
    if isinstance(value, LazyResult):
        return cast("LazyResult[Any]", value).source
    return ValueSource(value) if Held(value).length is not None else None


def _concatenated(*sources: Source) -> LazyResult[Any]:
    flat: list[Source] = []
    for source in sources:
        flat.extend(source.inner if isinstance(source, ViewSource) and isinstance(source.operation, Concat) else (source,))
    return LazyResult(ViewSource(Concat(), flat))


def gather(*results: LazyResult[Any], timeout_s: float | None = None) -> list[Any]:
    """Wait for several results together and return their values.

    The first failure of any call is raised at once, also while others still run. timeout_s: seconds for all; CallTimeoutError
    names what still runs.
    """
    for result in results:
        if not isinstance(result, LazyResult):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RemoteTypeError(f"gather takes LazyResults, not {type(result).__name__}")
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s, zero=True)
    begin = time.monotonic()
    wait_for_all([call for result in results for call in result.source.calls()], timeout_s)
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
        return cast("LazyResult[Any]", value).get()
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
