"""Ctrl-C that does not get lost."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interruption:
    """Remembers Ctrl-C while it is entered, beside raising KeyboardInterrupt as usual.

    Python drops an exception that is raised in a destructor or in a callback of a C library, and Ctrl-C may come just then (importing
    torch runs thousands of both). `check` raises it again at a point of the run's own.

    Only Python's own handler is replaced, and only in the main thread: a program that handles Ctrl-C itself goes on doing so.
    """

    def __init__(self) -> None:
        self._pressed = False
        self._replaced = False

    def __enter__(self) -> Interruption:
        self._pressed = False
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._replaced = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._replaced = False

    def check(self) -> None:
        """Raises KeyboardInterrupt: Ctrl-C was pressed, and the run went on."""
        if self._pressed:
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._pressed = True
        signal.default_int_handler(signum, frame)
