"""Workers of this machine on cores of their own."""

import os
from typing import Any


def pin(*components: Any) -> None:
    """The process of each worker of trainers and samplers, with all its threads, to the next core.

    Raises RuntimeError where there are fewer cores than workers.
    """
    pids = [info.pid for component in components for info in _workers(component)]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(pids):
        raise RuntimeError(f"{len(pids)} workers need a core each; this process may use {len(cores)}")
    for core, pid in zip(cores, pids, strict=False):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {core})


def _workers(component: Any) -> list[Any]:
    info = component.weight_receiver_info() if hasattr(component, "weight_receiver_info") else component.weight_sender_info()
    return info if isinstance(info, list) else [info]
