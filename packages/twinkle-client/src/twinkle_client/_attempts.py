"""What is done after each attempt of a call: whether it is over, what it raises, or how long to wait before the next one. No input or output here."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from typing import Any, cast

import httpx
from pydantic import ValidationError

from ._calls import Call
from ._errors import (
    ClientError,
    Conflict,
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    RequestFailed,
    ServerFailed,
    Unauthorized,
    Unreachable,
    WorkLost,
)
from ._resources import Future
from ._settings import TOKEN_VARIABLE, URL_VARIABLE, Settings

# The server has not done it, or is not there for the moment.
_TRY_AGAIN = frozenset({429, 502, 503, 504})
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_CLASSES: dict[int, type[RequestFailed]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    409: Conflict,
    410: Exhausted,
    413: InvalidRequest,
    422: InvalidRequest,
    429: QuotaExceeded,
    507: QuotaExceeded,
}


class Attempts:
    """The attempts of one call."""

    def __init__(self, call: Call[Any], settings: Settings, request_id: str, timeout_s: float | None = None) -> None:
        self._call, self._settings, self._request_id = call, settings, request_id
        self._limit_s = timeout_s if timeout_s is not None else settings.call_timeout_s if call.is_long else settings.timeout_s
        self._deadline = time.monotonic() + self._limit_s
        self._done = 0

    @property
    def left_s(self) -> float:
        """The time that is left for the call."""
        return max(self._deadline - time.monotonic(), 0.001)

    def after_failure(self, error: httpx.HTTPError) -> float:
        """How long to wait after an attempt without an answer; raises where there is no other attempt."""
        never_sent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
        try:
            return self._wait(self._failure(error), repeatable=never_sent or self._call.is_repeatable)
        except ClientError as told:
            raise told from error

    def after_answer(self, status: int, headers: Mapping[str, str], content: bytes) -> float | None:
        """None: the answer is one to read. A number: wait so long, then try again. Raises what else the answer is."""
        if status < 300:
            return None
        error = error_of(status, headers, content)
        if status in (404, 405) and not _is_the_services(content):
            told = f"{self._what}: {error.message[:100]}; is the service there? (base_url, or {URL_VARIABLE}, and route_prefix)"
            raise Unreachable(told, request_id=error.request_id or self._request_id, status=status)
        if status not in _TRY_AGAIN:
            raise error
        return self._wait(error, repeatable=self._call.is_repeatable)

    def read(self, content: bytes) -> Any:
        """What the call reads from an answer; ServerFailed for one that it cannot read, as of a proxy's page of greeting."""
        try:
            return self._call.read(content)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
            told = f"{self._what}: the answer cannot be read ({problem}); is the service there? (base_url, or {URL_VARIABLE})"
            raise ServerFailed(told, request_id=self._request_id) from error

    def _wait(self, error: ClientError, *, repeatable: bool) -> float:
        self._done += 1
        if not repeatable or self._done > self._settings.max_retries:
            raise error
        # Full jitter, so that clients which lost one server do not return at once.
        backoff = random.uniform(0.5, 1.0) * min(_FIRST_WAIT_S * 2 ** (self._done - 1), _LONGEST_WAIT_S)
        wait_s = backoff if error.retry_after_s is None else max(error.retry_after_s, backoff)
        if time.monotonic() + wait_s > self._deadline:
            raise error
        return wait_s

    @property
    def _what(self) -> str:
        return f"{self._call.method} {self._settings.url}{self._call.path.replace('{prefix}', self._settings.prefix)}"

    def _failure(self, error: httpx.HTTPError) -> ClientError:
        what = self._what
        if isinstance(error, (httpx.ReadTimeout, httpx.WriteTimeout)):
            return DeadlineExceeded(f"{what}: no answer within {self._limit_s:g} s", request_id=self._request_id)
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            told = f"{what}: {str(error) or type(error).__name__}; is the server running there? (base_url, or {URL_VARIABLE})"
            return Unreachable(told, request_id=self._request_id)
        return Unreachable(f"{what}: the connection broke ({str(error) or type(error).__name__})", request_id=self._request_id)


def error_of(status: int, headers: Mapping[str, str], content: bytes) -> RequestFailed:
    """The error that an answer from status 300 on stands for."""
    message = _message(content) or f"the server answered {status}"
    if status in (401, 403):
        message += f" (the key is api_key, or the variable {TOKEN_VARIABLE})"
    kind = _CLASSES.get(status, ServerFailed if status >= 500 else RequestFailed)
    if status >= 500 and headers.get("x-twinkle-error") == "lost":
        kind = WorkLost
    return kind(message, request_id=headers.get("x-request-id"), status=status, retry_after_s=_seconds(headers.get("retry-after")))


def error_of_future(future: Future) -> RequestFailed:
    """The error of a future that did not end well."""
    message = future.error or f"the call ended as {future.status!r}"
    if future.status == "lost":
        return WorkLost(message, request_id=future.request_id, status=future.error_status)
    kind = _CLASSES.get(future.error_status or 500, ServerFailed)
    return kind(message, request_id=future.request_id, status=future.error_status)


def _message(content: bytes) -> str:
    try:
        body = json.loads(content)
    except ValueError:
        return content[:500].decode("utf-8", "replace").strip()
    detail = cast("dict[str, Any]", body).get("detail") if isinstance(body, dict) else body
    if isinstance(detail, list):
        return "; ".join(_of_argument(each) for each in cast("list[Any]", detail)[:10])
    return detail if isinstance(detail, str) else json.dumps(detail)[:2000]


def _is_the_services(content: bytes) -> bool:
    """Whether a 404 or 405 speaks of an object; otherwise there is no such route, or another program answers."""
    try:
        body = json.loads(content)
    except ValueError:
        return False
    return isinstance(body, dict) and cast("dict[str, Any]", body).get("detail") not in (None, "Not Found", "Method Not Allowed")


def _of_argument(problem: Any) -> str:
    """'body.inputs.0.labels: Field required', of pydantic's description of a problem."""
    if not isinstance(problem, dict):
        return str(problem)
    told = cast("dict[str, Any]", problem)
    return f"{'.'.join(str(part) for part in told.get('loc', ()))}: {told.get('msg', told)}"


def _seconds(value: str | None) -> float | None:
    try:
        return None if value is None else max(float(value), 0.0)
    except ValueError:  # a date, which servers of this service do not send
        return None
