"""Where the time and the bytes of a component's calls went: into the runtime's numbers and its timeline."""

import time
from dataclasses import dataclass

from twinkle_remote._shards import Result, Stop
from twinkle_remote._stats import Totals
from twinkle_remote._trace import Trace


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one component. trace: None where no timeline is recorded. Times are seconds since the epoch."""

    totals: Totals
    trace: Trace | None

    @property
    def row(self) -> str:
        """The component's row in the timeline."""
        return f"{self.totals.name} ({self.totals.group})"

    def add_call(self, method: str, name: str, submit_s: float, *, line: str, failed: bool) -> None:
        """A call has finished."""
        with self.totals.lock:
            sums = self.totals.methods[method]
            sums["calls"] += 1
            sums["failures"] += failed
        if self.trace is not None:
            self.trace.add("driver", None, name, submit_s, time.time(), line=line, failed=failed)

    def add_answer(self, method: str, rank: int, submit_s: float, answer: Result | Stop) -> None:
        """A worker has answered."""
        timing = answer.timing if isinstance(answer, Result) else None
        with self.totals.lock:
            sums = self.totals.methods[method]
            sums["run_s"] += answer.end_s - answer.start_s
            if timing is not None:
                sums["queue_s"] += max(0.0, timing.received_s - submit_s)
                sums["fetch_s"] += answer.start_s - timing.received_s
                sums["store_s"] += timing.stored_s - answer.end_s
                sums["fetched_bytes"] += timing.fetched_bytes
                sums["stored_bytes"] += timing.stored_bytes
        if self.trace is None:
            return
        self.trace.add(self.row, rank, method, answer.start_s, answer.end_s)
        if timing is not None:
            self.trace.add_wait(self.row, rank, method, submit_s, timing.received_s)
            self.trace.add(self.row, rank, f"fetch for {method}", timing.received_s, answer.start_s, cat="fetch", bytes=timing.fetched_bytes)
            self.trace.add(self.row, rank, f"store from {method}", answer.end_s, timing.stored_s, cat="store", bytes=timing.stored_bytes)

    def add_collect(self, method: str, name: str, start_s: float, size_bytes: int) -> None:
        """This process has fetched and joined a call's results."""
        end_s = time.time()
        with self.totals.lock:
            sums = self.totals.methods[method]
            sums["collect_s"] += end_s - start_s
            sums["collected_bytes"] += size_bytes
        if self.trace is not None:
            self.trace.add("driver", None, f"collect {name}", start_s, end_s, cat="collect", bytes=size_bytes)

    def mark(self, what: str, reason: str) -> None:
        """Something happened now to the whole component."""
        if self.trace is not None:
            self.trace.mark(self.row, what, reason=reason)
