"""What went wrong in a worker, told in the driver as an exception of the same type."""

import copy
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle_remote._errors import RemoteCallError, RemoteError, WorkerError

_HERE = Path(__file__).parent
# Attributes that built-in exceptions (ImportError, NameError, AttributeError) keep outside __dict__ and args.
_BUILT_IN_SLOTS = ("name", "path")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An exception that crossed a process border.

    error_type: the class (packed), args and attributes rebuild it; None where they cannot be pickled. summary: as `traceback` shows its last line.
    component, group, method, rank: where. end_s: when, seconds since the epoch.
    """

    component_id: str
    component: str
    group: str
    method: str
    rank: int
    end_s: float
    summary: str
    remote_traceback: str
    packed: bytes | None


def summarize(error: BaseException) -> str:
    """'ValueError: message'."""
    return "".join(traceback.format_exception_only(error)).strip()


def format_remote_traceback(error: BaseException) -> str:
    """The traceback from the first frame that is not ours."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None and Path(tb.tb_frame.f_code.co_filename).parent == _HERE:
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb)).rstrip()


def parts_of(error: Exception) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
    """What rebuilds an exception without calling its constructor, whose arguments we do not know: type, args and attributes."""
    slots = {name: getattr(error, name) for name in _BUILT_IN_SLOTS if getattr(error, name, None) is not None}
    args: Any = OSError.__reduce__(error)[1] if isinstance(error, OSError) else error.args  # an OSError's args lack its file names
    return type(error), args, {**slots, **vars(error)}


def rebuild(error_type: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any], message: str) -> RemoteCallError:
    """An exception that is a RemoteCallError and an `error_type`, has its attributes, and shows `message`.

    Raises TypeError for a type that cannot be a base class beside RemoteCallError.
    """
    bases: tuple[type, ...] = (error_type,) if issubclass(error_type, RemoteCallError) else (RemoteCallError, error_type)
    if issubclass(error_type, MemoryError):  # CPython makes it by a __new__ of its own, which wants to be that of the first base
        bases = (error_type, RemoteCallError)

    def __str__(self: Any) -> str:
        return message

    def __reduce__(self: Any) -> tuple[Any, ...]:
        return rebuild, (error_type, args, attributes, message)

    namespace = {"__str__": __str__, "__reduce__": __reduce__, "__module__": error_type.__module__, "__qualname__": error_type.__qualname__}
    cls = type(error_type.__name__, bases, namespace)
    made: Any = cls.__new__(cls, *args)
    if not hasattr(error_type.__init__, "__code__"):  # a built-in's fills slots such as OSError.errno
        error_type.__init__(made, *args)
    for name, value in attributes.items():
        setattr(made, name, value)
    if not issubclass(error_type, OSError):
        made.args = args
    return made


def fresh(error: RemoteError) -> RemoteError:
    """A copy of an error of ours, to be raised. The one that is kept would gather the frames that it is raised through, and keep all that these
    hold, the component too, in a circle."""
    return copy.copy(error)


def to_exception(failure: Failure, unpack: Any, line: str, note: str) -> RemoteCallError:
    """The exception for the driver. line: its calling line. note: what became of the component, or ''."""
    message = (
        f"{failure.summary}\n"
        f"  raised by {failure.component}.{failure.method} on rank {failure.rank} of group {failure.group!r}\n"
        f"  called from {line}\n" + (f"  {note}\n" if note else "") + f"Remote traceback:\n{failure.remote_traceback}"
    )
    if failure.packed is not None:
        try:
            error_type, args, attributes = unpack(failure.packed)
            return rebuild(error_type, args, attributes, message)
        except Exception:  # a foreign class may do anything here; the message says all there is
            return WorkerError(message)
    return WorkerError(message)
