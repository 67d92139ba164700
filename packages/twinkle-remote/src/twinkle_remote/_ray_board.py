"""A board as an actor that holds names, small values and references to large ones."""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from twinkle_remote._errors import CallTimeoutError, RuntimeStateError, StartTimeoutError, WorkerDiedError
from twinkle_remote._ray_api import ray

_NAMESPACE = "twinkle-boards"
_GRACE_S = 5.0  # an answer of the actor itself may take that long on a busy machine


class _Board:
    """Runs in the actor's event loop, where any number of processes may wait at a time."""

    def __init__(self) -> None:
        self._items: dict[str, tuple[Any, list[Any]]] = {}
        self._changed = asyncio.Condition()

    async def ready(self) -> None:
        pass

    async def put(self, name: str, value: Any, shared: list[Any]) -> None:
        async with self._changed:
            self._items[name] = (value, shared)
            self._changed.notify_all()

    async def wait(self, names: list[str], timeout_s: float) -> tuple[str, Any, list[Any]] | None:
        async with self._changed:
            if self._first(names) is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait_for(lambda: self._first(names) is not None), timeout_s)
            found = self._first(names)
            return None if found is None else (found, *self._items[found])

    def _first(self, names: list[str]) -> str | None:
        return next((name for name in names if name in self._items), None)

    async def drop(self, names: list[str]) -> None:
        for name in names:
            self._items.pop(name, None)


class RayBoard:
    """This process's end. Raises RemoteErrors."""

    def __init__(self, actor: Any, address: str, *, is_mine: bool) -> None:
        self._actor, self.address, self._is_mine = actor, address, is_mine

    def put(self, name: str, value: Any, shared: Any, timeout_s: float) -> None:
        # A reference inside a list travels as a reference; the actor holds it from the moment that the call has returned.
        reference = None if shared is None else ray.put(shared)
        self._ask(self._actor.put.remote(name, value, [] if reference is None else [reference]), f"put {name!r}", timeout_s)

    def wait(self, names: Sequence[str], timeout_s: float) -> tuple[str, Any, Any] | None:
        found = self._ask(self._actor.wait.remote(list(names), timeout_s), f"wait for {list(names)}", timeout_s + _GRACE_S)
        if found is None:
            return None
        name, value, shared = found
        return name, value, self._ask(shared[0], f"fetch {name!r}", timeout_s + _GRACE_S) if shared else None

    def meet(self, timeout_s: float) -> None:
        self._ask(self._actor.ready.remote(), "reach it", timeout_s)

    def drop(self, names: Sequence[str]) -> None:
        self._actor.drop.remote(list(names))

    def close(self) -> None:
        if self._is_mine and ray.is_initialized():
            ray.kill(self._actor)

    def _ask(self, reference: Any, what: str, timeout_s: float) -> Any:
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise CallTimeoutError(f"board {self.address}: could not {what} within {timeout_s:.1f} s") from error
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            raise WorkerDiedError(
                f"board {self.address} is gone ({type(error).__name__}); the process that had opened it closed it or died"
            ) from error


def open_board(timeout_s: float) -> RayBoard:
    name = f"board-{secrets.token_hex(8)}"
    actor = ray.remote(_Board).options(name=name, namespace=_NAMESPACE, num_cpus=0, max_restarts=0).remote()
    board = RayBoard(actor, name, is_mine=True)
    try:
        ray.get(actor.ready.remote(), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        board.close()
        raise StartTimeoutError(f"the process of a board did not start within {timeout_s:.1f} s") from error
    return board


def join_board(address: str, timeout_s: float) -> RayBoard:
    try:
        actor = ray.get_actor(address, namespace=_NAMESPACE)
    except ValueError as error:
        raise WorkerDiedError(f"there is no board at {address!r}: the process that had opened it closed it or died") from error
    except Exception as error:  # whatever Ray says where it cannot look
        raise RuntimeStateError(f"board {address!r} cannot be joined: {error}") from error
    board = RayBoard(actor, address, is_mine=False)
    board.meet(timeout_s)
    return board
