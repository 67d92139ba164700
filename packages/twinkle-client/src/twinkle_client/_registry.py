"""The clients of this process: which one is the default, and that all are closed at its end."""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING

from ._errors import ConfigError

if TYPE_CHECKING:
    from ._client import TwinkleClient

_lock = threading.Lock()
_open: list[TwinkleClient] = []


def register(client: TwinkleClient) -> None:
    """Make it the default. It is kept until it is closed: a script may make a client and leave it to the handles."""
    with _lock:
        _open.append(client)


def unregister(client: TwinkleClient) -> None:
    """It is closed: the one before it is the default again."""
    with _lock:
        _open[:] = [each for each in _open if each is not client]


def latest_client() -> TwinkleClient:
    """The client that was made last and is still open: what handles use that are given none.

    Raises:
        ConfigError: there is none.
    """
    with _lock:
        if _open:
            return _open[-1]
    raise ConfigError("there is no open client: make one first, TwinkleClient(...), or give client=")


@atexit.register
def close_all() -> None:
    """Close every client of this process."""
    with _lock:
        clients = list(_open)
    for client in clients:
        client.close()
