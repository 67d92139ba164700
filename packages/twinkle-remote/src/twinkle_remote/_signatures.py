"""The types that `remote_function` gives to methods, for editors and type checkers: parameters stay, the result is what a call returns."""

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload

from twinkle_mesh import DeviceMesh
from twinkle_remote._collect import Weighted
from twinkle_remote._lazy import LazyResult

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
CollectTo = Callable[[list[Any], DeviceMesh], C]
Joined = Literal["flatten", "mean", "sum", "first", "last_pp"]


class Lazily(Protocol):
    """A method that returns R becomes one that returns a LazyResult of R. A coroutine counts as what it returns; iterators stay iterators."""

    @overload
    def __call__(self, method: Callable[P, Coroutine[Any, Any, R]], /) -> Callable[P, LazyResult[R]]: ...
    @overload  # the first that fits wins, so the overlap with the last is meant
    def __call__(self, method: Callable[P, Iterator[Any]], /) -> Callable[P, Iterator[Any]]: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __call__(self, method: Callable[P, Weighted[R]], /) -> Callable[P, LazyResult[R]]: ...
    @overload
    def __call__(self, method: Callable[P, R], /) -> Callable[P, LazyResult[R]]: ...


class AtOnce(Protocol):
    """A method that returns R goes on returning R. A coroutine counts as what it returns."""

    @overload
    def __call__(self, method: Callable[P, Coroutine[Any, Any, R]], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, method: Callable[P, Weighted[R]], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, method: Callable[P, R], /) -> Callable[P, R]: ...


class Giving(Protocol[C_co]):
    """A method becomes one that returns C: what its collect function returns, or a LazyResult of that."""

    def __call__(self, method: Callable[P, Any], /) -> Callable[P, C_co]: ...


class MoreOptions(TypedDict, total=False):
    """The options of `remote_function` that do not change the type of its result."""

    timeout_s: float | None
    allow_empty: bool
    prefetch: int
