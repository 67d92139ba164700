"""A timeline of the calls, as a Chrome trace: open it in Perfetto (ui.perfetto.dev) or chrome://tracing."""

import json
import threading
import time
from pathlib import Path
from typing import Any


class Trace:
    """Collects spans and writes them as JSON in the Trace Event Format. A process row is a component, a thread row a rank.

    path: the file; its folder must exist. Raises OSError at once if it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._start_s = time.time()
        self._rows: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        self.write()

    def add(self, row: str, rank: int | None, name: str, start_s: float, end_s: float, **details: Any) -> None:
        """Record a span. row: the component, or 'driver'. rank: its worker; None for the driver's own. Times: seconds since the epoch."""
        with self._lock:
            if row not in self._rows:
                self._rows[row] = len(self._rows) + 1
                self._events.append({"ph": "M", "name": "process_name", "pid": self._rows[row], "tid": 0, "args": {"name": row}})
            self._events.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": "call",
                    "pid": self._rows[row],
                    "tid": 0 if rank is None else rank,
                    "ts": round((start_s - self._start_s) * 1e6),
                    "dur": max(1, round((end_s - start_s) * 1e6)),
                    "args": details,
                }
            )

    def write(self) -> None:
        """Write all spans so far."""
        with self._lock:
            document = {"traceEvents": self._events, "displayTimeUnit": "ms"}
            self.path.write_text(json.dumps(document, default=str))
