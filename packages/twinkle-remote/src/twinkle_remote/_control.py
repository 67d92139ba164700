"""A second way into a worker: a thread that answers while the worker's main thread is busy or stuck.

One JSON line is asked over TCP and one is answered; nothing is unpickled, and a question without the runtime's token gets no answer.
"""

import hmac
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

from twinkle_remote import _event_loop, _scratch
from twinkle_remote._meeting import hold_port

logger = logging.getLogger("twinkle_remote")

_HERE = Path(__file__).parent
_SERVE_TIMEOUT_S = 10.0
_PAUSE_S = 0.05
_MAX_LINE_BYTES = 4096
_MAX_ANSWER_BYTES = 4 << 20
_ASKED_AT_ONCE = 16


class ControlServer:
    """Answers `look`, `stacks`, `abort` and `leave` in a daemon thread.

    host: the address to listen on. token: what a question must hold. waiting: whether the main thread waits for a remote call, whose
    own deadline bounds it.
    """

    def __init__(self, host: str, token: str, waiting: Callable[[], bool]) -> None:
        held = hold_port(host)
        self.port = held.port
        self._token = token
        self._waiting = waiting
        self._main_thread = threading.main_thread().ident
        self._socket = socket.socket(fileno=held.listen_fd)
        threading.Thread(target=self._serve, name="twinkle-control", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(_SERVE_TIMEOUT_S)
                    self._answer(connection)
            except (OSError, ValueError, RuntimeError) as error:  # whatever is sent here, and whatever torch says to an abort
                logger.debug("a question on the control channel went unanswered: %r", error)
                time.sleep(_PAUSE_S)

    def _answer(self, connection: socket.socket) -> None:
        question: Any = json.loads(_read_line(connection, _MAX_LINE_BYTES))
        if not isinstance(question, dict):
            return
        asked = cast("dict[str, Any]", question)
        if not hmac.compare_digest(str(asked.get("token")), self._token):
            return
        what = {"look": self._look, "stacks": self._stacks, "abort": abort_nccl, "leave": _leave}.get(str(asked.get("ask")))
        if what is not None:
            connection.sendall(json.dumps(what()).encode() + b"\n")

    def _look(self) -> dict[str, Any]:
        return {"busy_s": time.process_time() + _held_up_s(), "waiting": self._waiting(), "nccl": _has_nccl_group()}

    def _stacks(self) -> dict[str, Any]:
        frame = sys._current_frames().get(self._main_thread or 0)  # pyright: ignore[reportPrivateUsage]
        return {"pid": os.getpid(), "stack": _format_stack(frame) + _event_loop.task_stacks()}


def ask(host: str, port: int, token: str, what: str, timeout_s: float) -> dict[str, Any] | None:
    """Ask a worker. None where it does not answer in time: it has ended, or native code holds its interpreter."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(json.dumps({"token": token, "ask": what}).encode() + b"\n")
            answer: Any = json.loads(_read_line(connection, _MAX_ANSWER_BYTES))
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", answer) if isinstance(answer, dict) else None


def ask_all(addresses: Sequence[tuple[str, int]], token: str, what: str, timeout_s: float) -> list[dict[str, Any] | None]:
    """Ask several workers at the same time; their answers in the same order."""

    def ask_one(address: tuple[str, int]) -> dict[str, Any] | None:
        return ask(*address, token, what, timeout_s)

    if not addresses:
        return []
    with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(addresses)), thread_name_prefix="twinkle-ask") as pool:
        return list(pool.map(ask_one, addresses))


def tell_to_leave(addresses: Sequence[tuple[str, int]], token: str, timeout_s: float) -> None:
    """Have workers remove their temporary files before they are ended; waits for all of them together, at most `timeout_s`.

    Without threads, which cannot be started when the interpreter is about to end.
    """
    deadline = time.monotonic() + timeout_s
    with ExitStack() as connections:
        asked: list[socket.socket] = []
        for address in addresses:
            with suppress(OSError):  # it has ended already
                asked.append(connections.enter_context(socket.create_connection(address, timeout=max(0.01, deadline - time.monotonic()))))
                asked[-1].sendall(json.dumps({"token": token, "ask": "leave"}).encode() + b"\n")
        for connection in asked:
            with suppress(OSError, ValueError):
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                _read_line(connection, _MAX_ANSWER_BYTES)


def listens(host: str, port: int) -> bool:
    """Whether a worker's control port is open, that is, whether its process still runs."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def abort_nccl() -> dict[str, Any]:
    """Abort this process's NCCL groups, which frees its GPU from a collective whose partners are gone."""
    if not _has_nccl_group():
        return {"aborted": False}
    from torch.distributed import distributed_c10d

    distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
    return {"aborted": True}


def _leave() -> dict[str, Any]:
    _scratch.remove_all()
    return {}


def _held_up_s() -> float:
    """How long the main thread has wanted a processor that others had: on a crowded machine a rank at work gets little time.

    Of the main thread only, as threads of Ray and gloo want one now and then in a rank that hangs, too. 0.0 where Linux does not say.
    """
    try:
        return int(Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _has_nccl_group() -> bool:
    torch = sys.modules.get("torch")
    dist = None if torch is None else getattr(torch, "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return False
    return "nccl" in dist.get_backend()


def _format_stack(frame: FrameType | None) -> str:
    """The stack without our own frames, and without those that led to us."""
    if frame is None:
        return "(no stack)"
    entries = traceback.extract_stack(frame)
    ours = [Path(entry.filename).parent == _HERE for entry in entries]
    shown = [entry for entry, is_ours in zip(entries, ours, strict=True) if not is_ours]
    if any(ours):
        shown = shown[ours.index(True) :]
    return "".join(traceback.format_list(shown)).rstrip() or "(between calls)"


def _read_line(connection: socket.socket, limit_bytes: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        received = connection.recv(65536)
        if not received or len(line) > limit_bytes:
            raise ValueError("not a line")
        line += received
    return line
