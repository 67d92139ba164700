"""Folders for a process's temporary files, which do not stay behind when it ends, in whatever way."""

import contextlib
import os
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

_OWNER = ".owner"  # in a folder: the process that it belongs to, when that started, and the machine


class ScratchFolder:
    """A new folder for temporary files of this process: `path`.

    It is removed by `remove()`, when nobody holds this object any more, at the end of the process, and, in a worker, before the runtime ends that.
    What killed processes have left is removed by the next one of the same user on their machine that makes a folder of that prefix in that parent.

    Args:
        prefix: of its name, which tells whose it is.
        parent: the folder to make it in; by default the system's for temporary files.
    """

    def __init__(self, prefix: str, parent: str | Path | None = None) -> None:
        where = Path(tempfile.gettempdir() if parent is None else parent)
        remove_stale(where, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
        mark_owner(self.path)
        self._removal = weakref.finalize(self, _remove_own, self.path, os.getpid())
        _all.add(self)

    def remove(self) -> None:
        """Remove the folder now. May be called twice."""
        self._removal()


_all: weakref.WeakSet[ScratchFolder] = weakref.WeakSet()


def remove_all() -> None:
    """Remove the scratch folders of this process, which is about to be ended from outside."""
    for folder in list(_all):
        folder.remove()


def mark_owner(folder: Path) -> None:
    """Note that a folder belongs to this process."""
    stat = process_stat(os.getpid())
    (folder / _OWNER).write_text(f"{os.getpid()} {'' if stat is None else stat[1]} {_this_machine()}")


def remove_stale(parent: Path, prefix: str) -> None:
    """Remove folders of that prefix whose owners, processes of this user on this machine, were killed and so could not do it themselves."""
    for owner in parent.glob(f"{prefix}*/{_OWNER}"):
        with contextlib.suppress(OSError, ValueError):
            if owner.stat().st_uid != os.getuid():
                continue
            pid, start, machine = owner.read_text().split()  # without a start time (where there is no /proc) it is never removed
            stat = process_stat(int(pid))
            if machine == _this_machine() and (stat is None or stat[1] != start):
                shutil.rmtree(owner.parent, ignore_errors=True)


def process_stat(pid: int) -> tuple[int, str] | None:
    """Parent and start time of a process that runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else (int(fields[1]), fields[19])


def _remove_own(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has a copy of us
        shutil.rmtree(path, ignore_errors=True)


def _this_machine() -> str:
    """What tells where a process number counts: containers may share a folder, and a host name, but no process numbers."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}/{namespace}"
