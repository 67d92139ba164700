"""The transport through Ray's object store."""

from collections.abc import Sequence

import torch

from twinkle_remote import CallTimeoutError, ObjectBoard, StartTimeoutError, WorkerDiedError

from ._board import BoardTransport
from ._deadline import Deadline
from ._errors import ChannelMisuse, PeerFailed


class RayTransport(BoardTransport):
    """Messages in Ray's object store, which hands them over in shared memory on one node and copies them between nodes.

    For processes of one Ray cluster that cannot reach one another's ports, as gloo needs it. A small process of Ray's beside them knows the names;
    it takes a second or two to start, once. The object store must hold some buckets (`initialize(object_store_bytes=...)`).
    """

    def __init__(self) -> None:
        super().__init__(_RayBoard())


class _RayBoard:
    def __init__(self) -> None:
        self._board: ObjectBoard | None = None

    def open(self, deadline: Deadline) -> str:
        try:
            self._board = ObjectBoard.open(timeout_s=deadline.remaining_s("the board of the weight transfer to start"))
        except StartTimeoutError as error:
            raise deadline.expired(f"the board of the weight transfer to start ({error})") from error
        return self._board.address

    def join(self, address: str, deadline: Deadline) -> None:
        try:
            self._board = ObjectBoard.join(address, timeout_s=deadline.remaining_s("the board of the weight transfer"))
        except WorkerDiedError as error:
            raise PeerFailed(f"the trainer has closed the weight transfer: {error}") from error
        except CallTimeoutError as error:
            raise deadline.expired(f"the board of the weight transfer ({error})") from error

    def put(self, name: str, head: bytes, payload: torch.Tensor, deadline: Deadline) -> None:
        what = f"{name} of the weight transfer to lie in the object store"
        shared = payload.numpy() if payload.numel() else None
        try:
            self._opened().put(name, head, shared, timeout_s=deadline.remaining_s(what))
        except WorkerDiedError as error:
            raise PeerFailed(f"the trainer has closed the weight transfer: {error}") from error
        except CallTimeoutError as error:
            raise deadline.expired(f"{what} ({error})") from error

    def wait(self, names: Sequence[str], deadline: Deadline, timeout_s: float) -> tuple[str, bytes, torch.Tensor] | None:
        try:
            found = self._opened().wait(names, timeout_s=timeout_s)
        except WorkerDiedError as error:
            raise PeerFailed(f"the trainer has closed the weight transfer, or died: {error}") from error
        except CallTimeoutError as error:
            raise deadline.expired(f"{' or '.join(names)} of the weight transfer ({error})") from error
        if found is None:
            return None
        name, head, shared = found
        payload = torch.empty(0 if shared is None else len(shared), dtype=torch.uint8)
        if shared is not None:
            payload.numpy()[:] = shared
        return name, head, payload

    def drop(self, names: Sequence[str]) -> None:
        self._opened().drop(names)

    def close(self, *, is_mine: bool) -> None:
        if self._board is not None:
            self._board.close()

    def _opened(self) -> ObjectBoard:
        if self._board is None:
            raise ChannelMisuse("this RayTransport is not connected")
        return self._board
