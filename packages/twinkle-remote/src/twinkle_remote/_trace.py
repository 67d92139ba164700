"""A timeline of the calls, as a Chrome trace: open it in Perfetto (ui.perfetto.dev) or chrome://tracing."""

import itertools
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger("twinkle_remote")


class Trace:
    """Collects spans and writes them as JSON in the Trace Event Format. A process row is a component, a thread row a rank.

    path: the file; its folder must exist. Raises OSError at once if it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._start_s = time.time()
        self._rows: dict[str, int] = {}
        self._lanes: set[tuple[int, int]] = set()
        self._waits = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self.write()

    def add(self, row: str, rank: int | None, name: str, start_s: float, end_s: float, *, cat: str = "call", **details: Any) -> None:
        """Record a span. row: the component, or 'driver'. rank: its worker; None for the driver's own. Times: seconds since the epoch.
        cat: 'call', 'fetch', 'store' or 'collect'. details: shown beside the span; bytes, say."""
        with self._lock:
            place = self._place(row, rank)
            span = {"ph": "X", "name": name, "cat": cat, **place, "ts": self._micros(start_s), "dur": max(1, round((end_s - start_s) * 1e6))}
            self._events.append(span | {"args": details})

    def add_wait(self, row: str, rank: int, name: str, start_s: float, end_s: float) -> None:
        """Record how long a call waited in a worker's queue. Waits overlap with what the worker does, so they are asynchronous events."""
        with self._lock:
            wait = {"name": f"queued: {name}", "cat": "queue", "id": next(self._waits), **self._place(row, rank)}
            self._events.append({"ph": "b", "ts": self._micros(start_s), **wait})
            self._events.append({"ph": "e", "ts": max(self._micros(start_s), self._micros(end_s)), **wait})

    def mark(self, row: str, name: str, **details: Any) -> None:
        """Record that something happened now to a whole component."""
        with self._lock:
            self._events.append({"ph": "i", "s": "p", "name": name, **self._place(row, None), "ts": self._micros(time.time()), "args": details})

    def write(self) -> None:
        """Write all spans so far."""
        with self._lock:
            document = {"traceEvents": self._events, "displayTimeUnit": "ms"}
            self.path.write_text(json.dumps(document, default=str))

    def write_at_end(self) -> None:
        """As `write`, but a file that cannot be written any more is only logged: it must not hide how the script ended."""
        try:
            self.write()
        except OSError as error:
            logger.error("the timeline could not be written: %s", error)

    def _place(self, row: str, rank: int | None) -> dict[str, int]:
        """The ids of the row and lane; names them when they are new."""
        if row not in self._rows:
            self._rows[row] = len(self._rows) + 1
            self._events.append({"ph": "M", "name": "process_name", "pid": self._rows[row], "tid": 0, "args": {"name": row}})
        pid, tid = self._rows[row], 0 if rank is None else rank
        if rank is not None and (pid, tid) not in self._lanes:
            self._lanes.add((pid, tid))
            self._events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": f"rank {rank}"}})
        return {"pid": pid, "tid": tid}

    def _micros(self, at_s: float) -> int:
        return round((at_s - self._start_s) * 1e6)
