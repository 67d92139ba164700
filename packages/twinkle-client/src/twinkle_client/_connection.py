"""The connection of a client to its server, waiting and asynchronous: pooled, thread-safe, with retries."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, TypeVar

import httpx

from ._attempts import Attempts, error_of, error_of_future
from ._calls import Call, ResultOf
from ._errors import ConfigError, SessionLost
from ._resources import Future
from ._settings import Settings

T = TypeVar("T")
_POLL_S = 20.0  # how long the server may hold a question after a future


class Headers:
    """What goes with every request of a client: its key and its session."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.session_id: str | None = None
        self.is_session_lost = False

    def of(self, call: Call[Any], request_id: str) -> dict[str, str]:
        """The headers of a call; raises SessionLost for one that needs the session that is lost."""
        if call.needs_session and self.is_session_lost:
            raise SessionLost(
                f"the server does not know the session {self.session_id} any more; renew_session() makes a new one, and its adapters begin at "
                "their last checkpoints"
            )
        headers = {"X-Request-Id": request_id, "User-Agent": "twinkle-client"}
        if self._settings.api_key is not None:
            headers["Authorization"] = f"Bearer {self._settings.api_key}"
        if self.session_id is not None:
            headers["X-Twinkle-Session-Id"] = self.session_id
        if call.content is not None:
            headers["Content-Type"] = "application/json"
        if call.idempotency_key is not None:
            headers["Idempotency-Key"] = call.idempotency_key
        if call.is_long:
            headers["Prefer"] = f"respond-async, wait={_POLL_S:g}"
        return headers


def _options(settings: Settings) -> dict[str, Any]:
    # A proxy of the environment cannot know this machine's own addresses.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=30)
    return {"trust_env": not settings.is_loopback, "limits": limits, "follow_redirects": False}


def _timeout(attempts: Attempts) -> httpx.Timeout:
    left_s = attempts.left_s
    return httpx.Timeout(left_s, connect=min(left_s, 10.0))


def _poll(call: Call[Any], future: Future) -> Call[Future]:
    return Call(
        method="GET",
        path=f"{{prefix}}/futures/{future.request_id}",
        read=Future.model_validate_json,
        params={"wait_s": f"{_POLL_S:g}"},
        is_long=call.is_long,
    )


def _ended(future: Future) -> bool:
    if future.status in ("queued", "running"):
        return False
    if future.status != "done":
        raise error_of_future(future)
    return True


def _result(call: Call[T], future: Future) -> T:
    return call.read(json.dumps({"result": future.result} if isinstance(call.read, ResultOf) else future.result).encode())


class Connection:
    """Waiting requests. Any number of threads may use one."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.headers = settings, Headers(settings)
        self._http = httpx.Client(**_options(settings))
        self._closed = threading.Event()

    def run(self, call: Call[T], timeout_s: float | None = None) -> T:
        """Send a call, again where it may be, and read its answer."""
        request_id = uuid.uuid4().hex
        attempts = Attempts(call, self.settings, request_id, timeout_s)
        status, content = self._attempt(call, attempts, request_id)
        if status != 202:
            return attempts.read(content)
        future = Future.model_validate_json(content)
        while not _ended(future):
            poll = _poll(call, future)
            _, content = self._attempt(poll, Attempts(poll, self.settings, request_id, attempts.left_s), request_id)
            future = Future.model_validate_json(content)
        return _result(call, future)

    def _attempt(self, call: Call[Any], attempts: Attempts, request_id: str) -> tuple[int, bytes]:
        while True:
            self._require_open()
            try:
                response = self._http.request(
                    call.method,
                    self._url(call),
                    content=call.content,
                    params=call.params or None,
                    headers=self.headers.of(call, request_id),
                    timeout=_timeout(attempts),
                )
            except httpx.HTTPError as error:
                wait_s = attempts.after_failure(error)
            else:
                answered = attempts.after_answer(response.status_code, response.headers, response.content)
                if answered is None:
                    return response.status_code, response.content
                wait_s = answered
            self._closed.wait(wait_s)

    def stream(
        self, call: Call[Any], request_id: str, headers: Mapping[str, str], content: Iterator[bytes] | None = None
    ) -> AbstractContextManager[httpx.Response]:
        """An answer whose body is read bit by bit. timeout_s is for each bit, not for the whole."""
        self._require_open()
        return self._http.stream(
            call.method,
            self._url(call),
            content=content,
            params=call.params or None,
            headers=self.headers.of(call, request_id) | dict(headers),
            timeout=httpx.Timeout(self.settings.timeout_s if content is None else None, connect=min(self.settings.timeout_s, 10.0)),
        )

    def pause(self, seconds: float) -> None:
        """Waits before another attempt; raises ConfigError where the client is closed meanwhile."""
        self._closed.wait(seconds)
        self._require_open()

    def lines(self, call: Call[T]) -> Iterator[T]:
        """The lines of an answer that is a stream, each read as it comes. Not repeated."""
        request_id = uuid.uuid4().hex
        attempts = Attempts(call, self.settings, request_id)
        self._require_open()
        try:
            with self._http.stream(
                call.method,
                self._url(call),
                content=call.content,
                headers=self.headers.of(call, request_id),
                timeout=_timeout(attempts),
            ) as response:
                if response.status_code >= 300:
                    raise error_of(response.status_code, response.headers, response.read())
                for line in response.iter_lines():
                    if line.strip():
                        yield call.read(line.encode())
        except httpx.HTTPError as error:
            attempts.after_failure(error)
            raise  # pragma: no cover (a stream is not repeatable, so the line above raises)

    def close(self) -> None:
        """End; calls of other threads that wait for another attempt fail."""
        self._closed.set()
        self._http.close()

    def _url(self, call: Call[Any]) -> str:
        return self.settings.url + call.path.replace("{prefix}", self.settings.prefix, 1)

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise ConfigError("the client is closed")


class AsyncConnection:
    """The same for an event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.headers = settings, Headers(settings)
        self._http = httpx.AsyncClient(**_options(settings))

    async def run(self, call: Call[T], timeout_s: float | None = None) -> T:
        """Send a call, again where it may be, and read its answer."""
        request_id = uuid.uuid4().hex
        attempts = Attempts(call, self.settings, request_id, timeout_s)
        status, content = await self._attempt(call, attempts, request_id)
        if status != 202:
            return attempts.read(content)
        future = Future.model_validate_json(content)
        while not _ended(future):
            poll = _poll(call, future)
            _, content = await self._attempt(poll, Attempts(poll, self.settings, request_id, attempts.left_s), request_id)
            future = Future.model_validate_json(content)
        return _result(call, future)

    async def _attempt(self, call: Call[Any], attempts: Attempts, request_id: str) -> tuple[int, bytes]:
        while True:
            self._require_open()
            try:
                response = await self._http.request(
                    call.method,
                    self._url(call),
                    content=call.content,
                    params=call.params or None,
                    headers=self.headers.of(call, request_id),
                    timeout=_timeout(attempts),
                )
            except httpx.HTTPError as error:
                wait_s = attempts.after_failure(error)
            else:
                answered = attempts.after_answer(response.status_code, response.headers, response.content)
                if answered is None:
                    return response.status_code, response.content
                wait_s = answered
            await asyncio.sleep(wait_s)

    def stream(
        self, call: Call[Any], request_id: str, headers: Mapping[str, str], content: AsyncIterator[bytes] | None = None
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """An answer whose body is read bit by bit. timeout_s is for each bit, not for the whole."""
        self._require_open()
        return self._http.stream(
            call.method,
            self._url(call),
            content=content,
            params=call.params or None,
            headers=self.headers.of(call, request_id) | dict(headers),
            timeout=httpx.Timeout(self.settings.timeout_s if content is None else None, connect=min(self.settings.timeout_s, 10.0)),
        )

    async def lines(self, call: Call[T]) -> AsyncIterator[T]:
        """The lines of an answer that is a stream, each read as it comes. Not repeated."""
        request_id = uuid.uuid4().hex
        attempts = Attempts(call, self.settings, request_id)
        self._require_open()
        try:
            async with self._http.stream(
                call.method,
                self._url(call),
                content=call.content,
                headers=self.headers.of(call, request_id),
                timeout=_timeout(attempts),
            ) as response:
                if response.status_code >= 300:
                    raise error_of(response.status_code, response.headers, await response.aread())
                async for line in response.aiter_lines():
                    if line.strip():
                        yield call.read(line.encode())
        except httpx.HTTPError as error:
            attempts.after_failure(error)
            raise  # pragma: no cover (a stream is not repeatable, so the line above raises)

    async def close(self) -> None:
        """End."""
        await self._http.aclose()

    def _url(self, call: Call[Any]) -> str:
        return self.settings.url + call.path.replace("{prefix}", self.settings.prefix, 1)

    def _require_open(self) -> None:
        if self._http.is_closed:
            raise ConfigError("the client is closed")
