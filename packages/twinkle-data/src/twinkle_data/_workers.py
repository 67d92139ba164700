"""Worker processes that read rows ahead. A failing one raises here, a dead one is told at once, a silent one after a deadline."""

import faulthandler
import math
import os
import pickle
import queue
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ._errors import DatasetError, LoaderTimeoutError, WorkerError
from ._pipes import receive_message, send_message

_SHOWN_CHARACTERS = 200


class WorkerPool:
    """Processes that compute `function(task)`; results come in the order of the tasks.

    The processes are forked, so that the function may be anything, and share the memory of what it holds; they start with the first task.
    Close the pool, or drop it: its processes end, as they do when this one ends.

    Args:
        function: what a worker does with a task; its result must pickle.
        num_workers: processes; task i goes to worker i modulo their number.
        timeout_s: seconds that one result may take.
        what: what a result is, for messages ('a batch').

    Raises:
        DatasetError: fewer than one worker, or a deadline that is not above 0.
    """

    def __init__(self, function: Callable[[Any], Any], num_workers: int, *, timeout_s: float, what: str) -> None:
        if not isinstance(timeout_s, (int, float)) or num_workers < 1 or not timeout_s > 0:
            raise DatasetError(f"{num_workers} workers with {timeout_s} s for a result: both must be above 0")
        self._function, self._num_workers, self._timeout_s, self._what = function, num_workers, timeout_s, what
        self._workers: list[_Worker] = []
        self._waiting: deque[tuple[int, Any]] = deque()
        self._submitted = 0

    def __len__(self) -> int:
        """How many results have been asked for and not taken."""
        return len(self._waiting)

    def submit(self, task: Any) -> None:
        """Hand a task to the next worker."""
        if not self._workers:
            self._workers = [_Worker(self._function, index) for index in range(self._num_workers)]
        worker = self._submitted % self._num_workers
        self._submitted += 1
        self._waiting.append((worker, task))
        try:
            self._workers[worker].send(task, self._timeout_s, self._what)
        except BaseException:
            self.close()
            raise

    def take(self) -> Any:
        """The result of the oldest task that has not been taken.

        Raises:
            WorkerError: the worker has died, or what it raised cannot be raised here.
            LoaderTimeoutError: no result in time. Both end the pool, and what the function raised does: with the worker's traceback as a note.
        """
        index, task = self._waiting.popleft()
        try:
            return self._workers[index].take(self._timeout_s, self._what, task)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers and forget what they were doing. The pool may be used again."""
        for worker in self._workers:
            worker.stop()
        self._workers = []
        self._waiting.clear()


class _Worker:
    """One process, and this end of its pipe."""

    def __init__(self, function: Callable[[Any], Any], index: int) -> None:
        context = get_context("fork")
        self._name = f"worker {index}"
        seed = int(np.random.randint(2**32, dtype=np.uint32))  # by the process's own random numbers: a seeded program does the same again
        self._crash = tempfile.TemporaryFile()  # noqa: SIM115 (it is closed with this object)
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=_main, args=(function, self._pipe, other, self._crash.fileno(), seed), daemon=True, name=f"twinkle-{index}"
        )
        self._process.start()
        other.close()
        os.set_blocking(self._pipe.fileno(), False)  # a process that reads no more must not hold this one
        self.stop = weakref.finalize(self, _stop, self._process, self._pipe, os.getpid())

    def send(self, task: Any, timeout_s: float, what: str) -> None:
        try:
            send_message(self._pipe, pickle.dumps(task, protocol=5), time.monotonic() + timeout_s)
        except TimeoutError:
            raise self._too_slow(timeout_s, what, f"does not read that it is to work on {_shown(task)}") from None
        except OSError:  # it has died: `take` tells how
            return

    def _too_slow(self, timeout_s: float, what: str, doing: str) -> LoaderTimeoutError:
        who = f"{self._name} (process {self._process.pid})"
        return LoaderTimeoutError(f"{what} was not there after {timeout_s:g} s: {who} {doing}; raise worker_timeout_s if it needs longer")

    def take(self, timeout_s: float, what: str, task: Any) -> Any:
        who, shown = f"{self._name} (process {self._process.pid})", _shown(task)
        try:
            good, value, text = pickle.loads(receive_message(self._pipe, self._process.sentinel, time.monotonic() + timeout_s))
        except TimeoutError:
            raise self._too_slow(timeout_s, what, f"was working on {shown}") from None
        except (EOFError, OSError):
            raise WorkerError(f"{who} {self._how_it_ended()} while it was working on {shown}{self._stacks()}") from None
        if good:
            return value
        if value is None:
            raise WorkerError(f"{who} failed on {shown}:\n{text}")
        value.add_note(f"raised in {who}, on {shown}:\n{text}")
        raise value

    def _how_it_ended(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        hint = "; the system may have been short of memory" if -code == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    def _stacks(self) -> str:
        """What faulthandler has written, if the process crashed."""
        self._crash.seek(0)
        text = self._crash.read().decode(errors="replace").strip()
        return f"\n{text}" if text else ""


def _shown(task: Any) -> str:
    shown = repr(task)
    return shown if len(shown) <= _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "..."


def _stop(process: Any, pipe: Connection, owner: int) -> None:
    if os.getpid() != owner:  # a forked copy of the pool
        return
    pipe.close()
    process.kill()
    process.join(5)


def _main(function: Callable[[Any], Any], parents_end: Connection, pipe: Connection, crash_file: int, seed: int) -> None:
    parents_end.close()  # else this process would never see that the other one has ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Off first: where it was on, `enable` would leave a handler in place that a library has installed over it since (Ray does).
    faulthandler.disable()
    faulthandler.enable(crash_file)
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, tasks), daemon=True).start()
    _seed(seed)
    while True:
        task = tasks.get()
        try:
            message = _packed(function(task))
        except BaseException as error:  # told there
            message = _told(error)
        try:
            send_message(pipe, message)
        except OSError:
            os._exit(1)


def _read(pipe: Connection, tasks: "queue.SimpleQueue[Any]") -> None:
    # Always reading, so that neither side waits for the other to take something.
    parent = parent_process()
    assert parent is not None
    while True:
        try:
            tasks.put(pickle.loads(receive_message(pipe, parent.sentinel, math.inf)))
        except (EOFError, OSError):
            os._exit(0)


def _seed(seed: int) -> None:
    """Random numbers of its own for this process: a forked one would draw the same as all others, and as the one that comes after it."""
    random.seed(seed)
    np.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def _packed(result: Any) -> bytes:
    try:
        return pickle.dumps((True, result, None), protocol=5)
    except Exception as error:  # pickling runs the rows' own code
        raise DatasetError(f"what was read cannot be sent from a worker process ({error}); give plain values, or take num_workers=0") from error


def _told(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, Exception):  # SystemExit there would end this process, without a word
        return pickle.dumps((False, None, text))
    try:
        message = pickle.dumps((False, error, text))
        pickle.loads(message)
    except Exception:  # an exception that does not travel: its text does
        return pickle.dumps((False, None, text))
    return message
