"""The errors of twinkle-client.

```
ClientError
+-- ConfigError (ValueError)             the client is set up in a way that cannot work; nothing was sent
+-- Unreachable (ConnectionError)        no server answered: nothing listens, the name is unknown, the connection broke
+-- DeadlineExceeded (TimeoutError)      the server did not answer in time
+-- DamagedCheckpoint (ValueError)       what was downloaded is not what the server has
+-- SessionLost (RuntimeError)           the server does not know this client's session any more
+-- RequestFailed (RuntimeError)         the server answered with an error; also the base of these
    +-- Unauthorized (PermissionError)   401, 403: no key, a wrong, expired or revoked one, or one without the scope
    +-- NotFound (LookupError)           404: no such object, or it is another tenant's
    +-- Conflict                         409: the object is in another state, or its name is taken
    +-- Exhausted                        410: an iterator of the server has no more rows
    +-- InvalidRequest (ValueError)      400, 413, 422: an argument is wrong; the message names it
    +-- QuotaExceeded                    429, 507: a rate limit or quota; `retry_after_s` where the server tells
    +-- ServerFailed                     5xx, and work that failed on the server
        +-- WorkLost                     work in flight when the server ended; it was not repeated
```

Each carries the server's `message`, the `request_id` by which the server's log knows the request, and the HTTP `status` (None where no server
answered), and pickles.
"""

from __future__ import annotations

from typing import Any


class ClientError(Exception):
    """Base of every error that twinkle-client raises itself. `str(error)` is the message, and the request id where there is one."""

    def __init__(self, message: str = "", *, request_id: str | None = None, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.status = status
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.message} (request {self.request_id})" if self.request_id else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.request_id, self.status, self.retry_after_s)


def _rebuild(cls: type[ClientError], message: str, request_id: str | None, status: int | None, retry_after_s: float | None) -> ClientError:
    return cls(message, request_id=request_id, status=status, retry_after_s=retry_after_s)


class ConfigError(ClientError, ValueError):
    """The client is set up in a way that cannot work; the message says what to do. Nothing was sent."""


class Unreachable(ClientError, ConnectionError):
    """No server answered: nothing listens there, its name is unknown, or the connection broke."""


class DeadlineExceeded(ClientError, TimeoutError):
    """The server did not answer in time. Whether it did the work is not known, unless the call carries an idempotency key."""


class DamagedCheckpoint(ClientError, ValueError):
    """A checkpoint that was downloaded is not, byte for byte, what the server has; nothing of it was kept."""


class SessionLost(ClientError, RuntimeError):
    """The server does not know this client's session any more: it ended it for want of heartbeats, or forgot it."""


class RequestFailed(ClientError, RuntimeError):
    """The server answered with an error."""


class Unauthorized(RequestFailed, PermissionError):
    """401 or 403: no API key, a wrong, expired or revoked one, or one without the scope that this needs."""


class NotFound(RequestFailed, LookupError):
    """404: there is no such object, or it belongs to another tenant."""


class Conflict(RequestFailed):
    """409: the object is in a state that does not allow this, or its name is taken."""


class Exhausted(RequestFailed):
    """410: an iterator that the server holds has no more rows."""


class InvalidRequest(RequestFailed, ValueError):
    """400, 413 or 422: something in the request is wrong; the message names it."""


class QuotaExceeded(RequestFailed):
    """429 or 507: a rate limit or a quota. `retry_after_s` is set where the server says when to try again."""


class ServerFailed(RequestFailed):
    """5xx, or work that failed on the server."""


class WorkLost(ServerFailed):
    """The work was under way when the server ended. It is not repeated silently: whether it took effect is not known."""
