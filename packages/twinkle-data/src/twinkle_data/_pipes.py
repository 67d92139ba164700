"""Messages of bytes over a pipe between processes, with a deadline also for one that is stopped, or stops reading, in the middle of a message."""

import math
import os
import select
import time
from multiprocessing.connection import Connection, wait

_LENGTH_BYTES = 8


def send_message(pipe: Connection, message: bytes | bytearray, deadline: float | None = None) -> None:
    """Write a message, whole.

    Args:
        pipe: this end of it; the other reads by `receive_message`.
        message: of any length.
        deadline: on `time.monotonic`, with an end that `os.set_blocking` made not block; None: wait for as long as it takes.

    Raises:
        TimeoutError: the other end did not read it in time.
        OSError: nobody reads the pipe any more.
    """
    for part in (len(message).to_bytes(_LENGTH_BYTES, "little"), message):
        rest = memoryview(part)
        while rest:
            if deadline is not None:
                _until_writable(pipe, deadline)
            rest = rest[_written(pipe, rest) :]


def _written(pipe: Connection, rest: memoryview) -> int:
    try:
        return os.write(pipe.fileno(), rest)
    except BlockingIOError:
        return 0


def _until_writable(pipe: Connection, deadline: float) -> None:
    poll = select.poll()
    poll.register(pipe.fileno(), select.POLLOUT)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def receive_message(pipe: Connection, sentinel: int, deadline: float) -> bytearray:
    """Read a message, whole.

    Args:
        pipe: this end of it; the other writes by `send_message`.
        sentinel: of the process at the other end.
        deadline: on `time.monotonic`; infinity for none.

    Raises:
        TimeoutError: it was not there in time.
        EOFError, OSError: the process has ended.
    """
    length = int.from_bytes(_read(pipe, sentinel, _LENGTH_BYTES, deadline), "little")
    return _read(pipe, sentinel, length, deadline)


def _read(pipe: Connection, sentinel: int, size: int, deadline: float) -> bytearray:
    message = bytearray(size)
    rest = memoryview(message)
    while rest:
        ready = wait([pipe, sentinel], None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        # A process that it has started may hold the pipe open after its death.
        if pipe not in ready and not pipe.poll():
            raise EOFError
        count = os.readv(pipe.fileno(), [rest])
        if count == 0:
            raise EOFError
        rest = rest[count:]
    return message
