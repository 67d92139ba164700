"""Peak memory of a process and all its descendants, which include the workers of a Ray that the run started."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil


class PeakMemory:
    """Samples the proportional set size (shared pages counted once) of this process tree in a thread.

    Args:
        interval_s: seconds between two samples.
    """

    def __init__(self, interval_s: float = 2.0) -> None:
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._peaks: dict[str, int] = {}
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def sample(self) -> int:
        """Measure now; returns the bytes of the whole tree."""
        total = 0
        root = psutil.Process()
        for process in [root, *root.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue  # it ended, or belongs to somebody else
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def _watch(self) -> None:
        while True:
            self.sample()
            if self._stop.wait(self._interval_s):
                return
