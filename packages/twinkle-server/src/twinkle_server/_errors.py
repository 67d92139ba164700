"""The errors of this package; each also inherits the standard type that it is, and those of requests know their HTTP status.

ServerError
+- ConfigError (ValueError)             a configuration that cannot work
+- ApiError                             what a request is answered with
   +- BadRequest (ValueError)       400
   +- Unauthorized (PermissionError) 401
   +- Forbidden (PermissionError)   403
   +- NotFound (LookupError)        404  also: another tenant's
   +- TooSlow (TimeoutError)        408  the body did not arrive in time
   +- Conflict (RuntimeError)       409
   +- Exhausted (LookupError)       410  an iterator's end, a session's
   +- TooLarge (ValueError)         413
   +- Invalid (ValueError)          422
   +- Busy (RuntimeError)           429  quotas, full queues, rates
   +- Lost (RuntimeError)           500  the work was under way when the server stopped
   +- Failed (RuntimeError)         500  the work failed; details are in the log
   +- Unavailable (RuntimeError)    503
   +- Full (OSError)                507  the server's disk is
"""

from __future__ import annotations

import errno


class ServerError(Exception):
    """The base of every error that this package raises on purpose."""


class ConfigError(ServerError, ValueError):
    """A configuration that cannot work; the message names the fields."""


class ApiError(ServerError):
    """An answer to a request: `status`, `detail` and headers."""

    status = 500

    def __init__(self, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.detail


class BadRequest(ApiError, ValueError):
    """400."""

    status = 400


class Unauthorized(ApiError, PermissionError):
    """401: no key, or one that is unknown, expired or revoked."""

    status = 401


class Forbidden(ApiError, PermissionError):
    """403: the key lacks a scope."""

    status = 403


class NotFound(ApiError, LookupError):
    """404: not there, or another tenant's."""

    status = 404


class Conflict(ApiError, RuntimeError):
    """409: not in this state."""

    status = 409


class Exhausted(ApiError, LookupError):
    """410: an iterator has ended, or a session is over."""

    status = 410


class TooSlow(ApiError, TimeoutError):
    """408: the body did not arrive in time."""

    status = 408


class TooLarge(ApiError, ValueError):
    """413."""

    status = 413


class Invalid(ApiError, ValueError):
    """422: understood, but wrong."""

    status = 422


class Busy(ApiError, RuntimeError):
    """429: a quota, a full queue or a rate; try again later."""

    status = 429


class Lost(ApiError, RuntimeError):
    """500: the call was under way when the server stopped. Whether it took effect is not known; it is not repeated."""


class Failed(ApiError, RuntimeError):
    """500: the call failed for a reason that is in the server's log."""


class Unavailable(ApiError, RuntimeError):
    """503: not ready, or stopping."""

    status = 503


class Full(ApiError, OSError):
    """507: the server's disk is full; nothing was kept."""

    status = 507


STATUS_ERRORS: dict[int, type[ApiError]] = {
    each.status: each
    for each in (BadRequest, Unauthorized, Forbidden, NotFound, TooSlow, Conflict, Exhausted, TooLarge, Invalid, Busy, Failed, Unavailable, Full)
}
"""The error of each status."""


def error_of(status: int, detail: str) -> ApiError:
    """The error of a status that was stored with a future."""
    return STATUS_ERRORS.get(status, Failed)(detail)


# The layers whose messages speak to callers.
_SPEAKING = ("twinkle_remote", "twinkle_data", "twinkle_train", "twinkle_transformers", "twinkle_megatron", "twinkle_vllm", "twinkle_server")


def describe(error: BaseException) -> ApiError:
    """What a caller is told about an exception: the layers' own messages; of all others only that the call failed."""
    if isinstance(error, ApiError):
        return error
    # A remote error derives from the original type and RemoteCallError; its text has the remote traceback after the message.
    # Libraries in other languages (safetensors, SQLite, PostgreSQL) and remote ones tell it in their text only.
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full or any(text in str(error) for text in ("No space left on device", "database or disk is full")):
        return Full("the server's disk is full: nothing was kept; its operator has to make room")
    own = [base for base in type(error).__mro__ if base.__name__ not in ("RemoteError", "RemoteCallError")]
    speaking = any(base.__module__.partition(".")[0] in _SPEAKING for base in own)
    message = str(error.args[0]) if error.args and isinstance(error.args[0], str) else str(error)
    message = message.partition("\n\n")[0][:2000]
    if speaking and isinstance(error, (ValueError, TypeError)):
        return Invalid(message)
    if speaking and isinstance(error, LookupError):
        return NotFound(message)
    if speaking and isinstance(error, ArithmeticError):
        return Invalid(message)
    if speaking and any(base.__name__ == "CallOrderError" for base in type(error).__mro__):
        return Conflict(message)
    if isinstance(error, StopIteration):
        return Exhausted("the iterator has ended")
    return Failed("the call failed on the server; its log has the reason under this request's id")
