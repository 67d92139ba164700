"""The iteration over something that a component's workers yield."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from twinkle_remote._dispatch import whole_share
from twinkle_remote._errors import ComponentLostError, RemoteAttributeError
from twinkle_remote._protocol import MethodSpec
from twinkle_remote._ray_calls import PendingCall, wait_for

if TYPE_CHECKING:
    from twinkle_remote._ray_component import RayComponent


class RemoteIterator(Iterator[Any]):
    """What `__iter__` and generator methods of a component on workers return. Each worker that takes part holds an iterator of its own.

    numbers: of the iterators, by rank. no_copies: see `contributors`. With `prefetch=n` the workers are n steps ahead of what was asked for.
    Generators whose iterator is closed or dropped are closed on the workers: their `finally` blocks run there.
    """

    def __init__(self, component: "RayComponent", spec: MethodSpec, numbers: Sequence[int], *, no_copies: bool) -> None:
        self._component = component
        self._spec = replace(spec, name="__next__", shown=spec.name, parameters=(), dispatch="all", allow_empty=False, is_generator=False)
        self._numbers = tuple(numbers)
        self._no_copies = no_copies
        self._restarts = component.restarts
        self._ahead: deque[PendingCall] = deque()
        self._done = False
        component.hold(id(self))

    def __next__(self) -> Any:
        with self._component.in_use():
            return self._next()

    def _next(self) -> Any:
        if self._done:
            raise StopIteration
        if self._restarts != self._component.restarts:
            self._done = True
            raise ComponentLostError(f"this iterator was lost with the workers of {self._component.describe()}: begin a new one")
        try:
            while len(self._ahead) <= self._spec.prefetch:
                self._ahead.append(self._submit("call", self._spec))
                self._ahead[-1].claimed = True  # its error is raised in its turn, not by a call in between
            return self._component.next_value(self._spec, self._ahead.popleft(), no_copies=self._no_copies)
        except BaseException:
            self._finish(everywhere=True)
            raise

    def close(self) -> None:
        """End the iteration: waits until the generators on the workers are closed. Raises what they raise."""
        if self._done:
            return
        self._finish(everywhere=False)
        with self._component.in_use():
            if self._restarts != self._component.restarts:
                return
            wait_for([self._submit("close_iterator", replace(self._spec, name="close"))], None)

    def __del__(self) -> None:
        if "_done" not in self.__dict__:  # not made
            return
        if not self._done:
            with self._component.in_use():
                self._finish(everywhere=True)
        self._component.let_go(id(self))

    def __reduce__(self) -> NoReturn:
        raise RemoteAttributeError("an iterator over a component cannot be pickled: pass the component, or what the iterator gives")

    def _submit(self, actor_method: str, spec: MethodSpec) -> PendingCall:
        share = whole_share((), {})
        return self._component.submit(actor_method, spec, [share] * len(self._numbers), self._numbers)

    def _finish(self, *, everywhere: bool) -> None:
        """Nothing more will be asked. everywhere: also tell the workers."""
        self._done = True
        for call in self._ahead:  # what they bring, an error too, nobody wants
            call.reported = True
        self._ahead.clear()
        if everywhere:
            self._component.send_close(self._numbers, self._restarts)
