"""What the calls of a runtime have cost so far, in numbers."""

import threading
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodStats:
    """Of one remote method of one component. Seconds and bytes are sums over the calls and their workers.

    calls, failures: how many calls ended, and how many of them in an error. queue_s: between the call and its worker's beginning with it (also:
    waiting for the results that it takes). fetch_s: getting its arguments. run_s: in the method. store_s: putting the result away. collect_s:
    fetching and joining results where the call was made. fetched_bytes: of other calls' results that the workers took. stored_bytes: of the
    results that stay on the workers. collected_bytes: of those that came to the caller.
    """

    calls: int = 0
    failures: int = 0
    queue_s: float = 0.0
    fetch_s: float = 0.0
    run_s: float = 0.0
    store_s: float = 0.0
    collect_s: float = 0.0
    fetched_bytes: int = 0
    stored_bytes: int = 0
    collected_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentStats:
    """Of one component. group: None for one in process. restarts: how often its workers were replaced. methods: by name."""

    name: str
    group: str | None
    workers: int
    restarts: int
    methods: dict[str, MethodStats]


@dataclass(slots=True)
class Totals:
    """The running numbers of one component; see ComponentStats. Threads may add to them: `lock` is held meanwhile.

    methods: by method, the fields of MethodStats.
    """

    name: str
    group: str | None
    workers: int = 1
    restarts: int = 0
    methods: defaultdict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(lambda: asdict(MethodStats())))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_run(self, method: str, run_s: float, *, failed: bool) -> None:
        """Add a call that was made in process."""
        with self.lock:
            sums = self.methods[method]
            sums["calls"] += 1
            sums["failures"] += failed
            sums["run_s"] += run_s

    def snapshot(self) -> ComponentStats:
        """The numbers now."""
        with self.lock:
            methods = {name: MethodStats(**sums) for name, sums in self.methods.items()}
        return ComponentStats(name=self.name, group=self.group, workers=self.workers, restarts=self.restarts, methods=methods)
