"""`twinkle doctor`: what is installed, what is missing and the install line, cores and GPUs, Ray."""

from __future__ import annotations

import os
import shutil
import sys

import psutil
from rich.console import Console
from rich.table import Table

from twinkle.installed import PARTS, installed_version, missing_parts
from twinkle.layout import cuda_device_count
from twinkle.run import say


def run_doctor(console: Console) -> int:
    """Print the report; returns the exit status: 0 when `twinkle grpo` can start, 1 when something is missing."""
    table = Table(title="packages")
    for head in ("package", "version", "for"):
        table.add_column(head)
    for part in PARTS:
        found = installed_version(part)
        table.add_row(part.distribution, found or "[dim]not installed[/dim]", part.purpose)
    console.print(table)
    console.print(f"python {sys.version.split()[0]}, {_cores()} usable cores, {psutil.virtual_memory().total / 2**30:.1f} GiB memory")
    devices = cuda_device_count()
    console.print(f"{devices} CUDA devices" if devices else "no CUDA device: every component runs on the CPU", highlight=False)
    free, shared = shutil.disk_usage(os.getcwd()).free, shutil.disk_usage("/dev/shm").free
    console.print(f"{free / 2**30:.1f} GiB free in the current folder, {shared / 2**30:.1f} GiB of shared memory for Ray's object store")
    address = os.environ.get("RAY_ADDRESS")
    console.print(f"Ray cluster of the environment: {address}" if address else "no RAY_ADDRESS set: a run starts a Ray of its own")
    missing = missing_parts()
    for part in missing:
        say(console, f"missing for `twinkle grpo`: {part.distribution} ({part.purpose}): {part.install}")
    if not missing:
        console.print("everything that `twinkle grpo` needs is here")
    return 1 if missing else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0))
