"""Measures two ways of doing one thing in turns, so that the machine's load hits both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def pairs(
    raw: Callable[[], Any], ours: Callable[[], Any], count: int, warm_up: int = 5, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float, float]:
    """Median seconds of both and the median of the pairs' ratios (ours / raw); who goes first alternates.

    clock: time.process_time measures what the process itself computes, whatever else the machine is doing.
    """
    times: list[tuple[float, float]] = []
    for index in range(count + warm_up):
        seconds: dict[int, float] = {}
        for which, call in ((0, raw), (1, ours)) if index % 2 else ((1, ours), (0, raw)):
            start = clock()
            call()
            seconds[which] = clock() - start
        if index >= warm_up:  # the first calls open connections and touch memory
            times.append((seconds[0], seconds[1]))
    raw_s, ours_s = (statistics.median(column) for column in zip(*times, strict=True))
    return raw_s, ours_s, statistics.median(mine / theirs for theirs, mine in times)
