"""A board: values under names, for processes of a Ray cluster that work together and whose calls are no place for what they exchange."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from twinkle_remote._errors import MissingRayError, RuntimeStateError


class ObjectBoard:
    """Values under names that several processes of a Ray cluster put up and take down. Large arrays go through Ray's object store.

    One process opens a board and tells the others its `address`. The board is gone when that process closes it or ends. For the inside of remote
    methods (a transport between components, say), and for drivers.
    """

    def __init__(self, board: Any) -> None:
        self._board = board

    @classmethod
    def open(cls, *, timeout_s: float) -> "ObjectBoard":
        """A new board. Raises MissingRayError, RuntimeStateError where this process is not part of a Ray cluster, StartTimeoutError."""
        return cls(_ray_board().open_board(timeout_s))

    @classmethod
    def join(cls, address: str, *, timeout_s: float) -> "ObjectBoard":
        """The board that another process has opened. Raises as `open`, and WorkerDiedError when there is none at the address."""
        return cls(_ray_board().join_board(address, timeout_s))

    @property
    def address(self) -> str:
        """What `join` takes."""
        return self._board.address

    def put(self, name: str, value: Any = None, shared: Any = None, *, timeout_s: float) -> None:
        """Put something up. value: small, it is copied to whoever asks. shared: an array, or anything that holds arrays, for the object store.

        Raises WorkerDiedError when the board is gone, CallTimeoutError.
        """
        self._board.put(name, value, shared, timeout_s)

    def wait(self, names: Sequence[str], *, timeout_s: float) -> tuple[str, Any, Any] | None:
        """Wait until one of these is there, and take the first that is: (name, value, shared); None when `timeout_s` went by.

        It stays on the board. Arrays of `shared` lie in the object store and cannot be written to. Raises WorkerDiedError when the board is gone.
        """
        return self._board.wait(names, timeout_s)

    def drop(self, names: Sequence[str]) -> None:
        """Take these down, and let the object store forget them. Names that are not there are left out."""
        self._board.drop(names)

    def close(self) -> None:
        """End the board, if this process has opened it."""
        self._board.close()


def _ray_board() -> Any:
    if find_spec("ray") is None:
        raise MissingRayError("a board lies in Ray's object store, and Ray is not installed: pip install 'twinkle-remote[ray]'")
    from twinkle_remote import _ray_board
    from twinkle_remote._ray_api import ray

    if not ray.is_initialized():
        raise RuntimeStateError("this process is not part of a Ray cluster, where boards are: initialize('ray') comes first")
    return _ray_board
