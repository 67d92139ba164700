"""Work on rows in chunks, in this process or in several, with progress."""

import math
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, get_context, parent_process
from typing import Any, NoReturn

from ._errors import DataError, DatasetError, WorkerError
from ._pipes import receive_message, send_message
from ._rows import part

Job = Callable[[Sequence[Any], int], Any]
"""A function of rows and the index of the first of them."""
Progress = bool | Callable[[int, int], None]

_MOST_ROWS = 1000


def run_chunks(rows: Sequence[Any], job: Job, *, what: str, num_proc: int, progress: Progress, timeout_s: float) -> Iterator[Any]:
    """job(rows, first) of consecutive chunks of the rows, in order.

    Args:
        rows: to work on; see `part` about what is sent to another process.
        job: what to do; with several processes it must be picklable.
        what: the name of the work.
        num_proc: processes. Each is started anew (not forked), so a script needs `if __name__ == "__main__":`.
        progress: a line on stderr, or a function of rows done and rows in all.
        timeout_s: the longest wait for a chunk of a worker process.

    Raises:
        DatasetError: a job that cannot be sent to a process.
        WorkerError: a process that died, or gave nothing in time. What a job raises is raised here, with its traceback as a note.
    """
    size = len(rows)
    step = _MOST_ROWS if num_proc <= 1 else max(1, min(_MOST_ROWS, -(-size // (num_proc * 8))))
    starts = range(0, size, step)
    show = _ProgressLine(what) if progress is True else (progress or None)
    if num_proc <= 1 or size == 0:
        results: Iterator[Any] = (job(part(rows, start, min(start + step, size)), start) for start in starts)
    else:
        results = _in_processes(rows, job, starts, step, what=what, num_proc=min(num_proc, len(starts)), timeout_s=timeout_s)
    for start, result in zip(starts, results, strict=True):
        if show is not None:
            show(min(start + step, size), size)
        yield result


def _in_processes(rows: Sequence[Any], job: Job, starts: range, step: int, *, what: str, num_proc: int, timeout_s: float) -> Iterator[Any]:
    try:
        packed = pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DatasetError(
            f"{what} cannot be sent to other processes ({error}); use functions defined at the top level of a module, or num_proc=1"
        ) from error
    context = get_context("spawn")
    workers: dict[Any, Any] = {}
    try:
        for _ in range(num_proc):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, packed), daemon=True)
            process.start()
            theirs.close()
            os.set_blocking(ours.fileno(), False)  # a process that reads no more must not hold this one
            workers[ours] = process
        yield from _dispatch(rows, starts, step, workers, what, timeout_s)
    finally:
        for pipe, process in workers.items():
            pipe.close()
            process.terminate()
        for process in workers.values():
            process.join(5)


def _dispatch(rows: Sequence[Any], starts: range, step: int, workers: dict[Any, Any], what: str, timeout_s: float) -> Iterator[Any]:
    busy: dict[Any, int] = {}
    done: dict[int, Any] = {}
    given, awaited = 0, 0
    deadline = time.monotonic() + timeout_s
    while awaited < len(starts):
        # No more than a few chunks ahead of the one that is awaited: their results are held here.
        while given < min(len(starts), awaited + 4 * len(workers)) and (idle := next((pipe for pipe in workers if pipe not in busy), None)):
            start = starts[given]
            message = _packed_rows(part(rows, start, min(start + step, len(rows))), start, what)
            try:
                send_message(idle, message, time.monotonic() + timeout_s)
            except TimeoutError:
                raise WorkerError(f"{what}: a worker process did not take the rows from {start} on within {timeout_s:g} s") from None
            except OSError:
                _dead(workers[idle], what)
            busy[idle] = given
            given += 1
        sentinels = {process.sentinel: process for process in workers.values()}
        ready = connection.wait([*busy, *sentinels], max(0.0, deadline - time.monotonic()))
        try:
            if not ready:
                raise TimeoutError
            for pipe in [item for item in ready if item in busy]:
                done[busy[pipe]] = _receive(pipe, workers[pipe], what, deadline)
                del busy[pipe]
        except TimeoutError:
            first = starts[min(busy.values())]
            raise WorkerError(
                f"{what}: no worker process finished a chunk within {timeout_s:g} s (the first awaited row is {first}); raise timeout_s"
            ) from None
        if any(item not in sentinels for item in ready):
            deadline = time.monotonic() + timeout_s
        for process in [sentinels[item] for item in ready if item in sentinels]:
            _dead(process, what)
        while awaited in done:
            yield done.pop(awaited)
            awaited += 1
            deadline = time.monotonic() + timeout_s


def _packed_rows(rows: Any, first: int, what: str) -> bytes:
    try:
        return pickle.dumps((rows, first), protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise DatasetError(f"{what}: the rows from {first} on cannot be sent to other processes ({error}); work with num_proc=1") from error


def _receive(pipe: Any, process: Any, what: str, deadline: float) -> Any:
    try:
        failed, value = pickle.loads(receive_message(pipe, process.sentinel, deadline))
    except TimeoutError:
        raise
    except (EOFError, OSError):
        _dead(process, what)
    if failed:
        error, text = value
        error.add_note(f"in a worker process:\n{text}")
        raise error
    return value


def _dead(process: Any, what: str) -> NoReturn:
    process.join(5)
    raise WorkerError(
        f"{what}: a worker process ended with exit code {process.exitcode} before its work was done (a negative code is a signal; -9 is often a "
        'lack of memory). Where it ended at once: does the script start its work under `if __name__ == "__main__":`?'
    )


def _serve(pipe: Any, packed: bytes) -> None:
    # One core a process: the tokenizer's own threads would only compete with the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    job: Any = None
    parent = parent_process()
    assert parent is not None
    while True:
        try:
            rows, first = pickle.loads(receive_message(pipe, parent.sentinel, math.inf))
        except (EOFError, OSError):
            return
        try:
            job = job or pickle.loads(packed)
            message = _packed_answer(job(rows, first))
        except Exception as error:  # whatever it is, it is raised where the rows are awaited
            message = _told(error)
        send_message(pipe, message)


def _packed_answer(answer: Any) -> bytes:
    try:
        return pickle.dumps((False, answer), protocol=5)
    except Exception as error:  # pickling runs the rows' own code
        raise DatasetError(f"the results cannot be sent from a worker process ({error}); return plain values, or work with num_proc=1") from error


def _told(error: Exception) -> bytes:
    text = traceback.format_exc()
    if isinstance(error, DataError):
        try:
            message = pickle.dumps((True, (error, text)))
            pickle.loads(message)
            return message
        except Exception:  # an error that does not travel: its text does
            return pickle.dumps((True, (DatasetError(f"{type(error).__name__}: {error}"), text)))
    return pickle.dumps((True, (WorkerError(f"in a worker process: {error!r}"), text)))


class _ProgressLine:
    """Rows done, share and speed on stderr, once a second: one line that is written over on a terminal, else a line every ten seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._started = what, time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self._started

    def __call__(self, done: int, size: int) -> None:
        now = time.monotonic()
        if now < self._next and done < size:
            return
        self._next = now + (1 if self._terminal else 10)
        speed = done / max(now - self._started, 1e-9)
        line = f"{self._what}: {done:,}/{size:,} rows, {100 * done / size:.0f} %, {speed:,.0f} rows/s"
        print(f"\r{line}" if self._terminal else line, end="\n" if done >= size or not self._terminal else "", file=sys.stderr, flush=True)
