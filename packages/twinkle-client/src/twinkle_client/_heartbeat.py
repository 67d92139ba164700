"""The thread that keeps a client's session alive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ._errors import ClientError, Exhausted, NotFound

_logger = logging.getLogger("twinkle_client")


class Beats:
    """What a heartbeat's outcome means. It says each thing once, not at every beat."""

    def __init__(self, url: str, interval_s: float) -> None:
        self._url, self._interval_s = url, interval_s
        self._failing = False

    def succeeded(self) -> None:
        """The session is alive."""
        if self._failing:
            _logger.info("the server at %s answers again; the session goes on", self._url)
        self._failing = False

    def failed(self, error: ClientError, session_id: str) -> bool:
        """Whether the session is lost. A server that does not answer may be restarting: the session is still its own then."""
        if isinstance(error, (NotFound, Exhausted)):
            _logger.error("the server at %s does not know the session %s any more: %s. renew_session() makes a new one", self._url, session_id, error)
            return True
        if not self._failing:
            _logger.warning("no heartbeat: %s. Trying again every %g s", error, self._interval_s)
        self._failing = True
        return False


class Heartbeat:
    """A daemon thread that beats until it is stopped or the session is lost.

    beat: sends one; False: there is nothing to keep alive any more.
    """

    def __init__(self, beat: Callable[[], bool], interval_s: float) -> None:
        self._beat, self._interval_s = beat, interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="twinkle-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s) and self._beat():
            pass

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread, and wait for it."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
