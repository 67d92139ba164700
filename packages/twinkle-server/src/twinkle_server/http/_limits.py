"""What keeps one client from taking the server: sizes and times of bodies, rates of requests. Plain ASGI, before anything reads a body."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
REQUEST_ID = "X-Request-Id"
# Methods whose routes read no body; what is sent all the same is not kept.
BODILESS = ("GET", "HEAD", "OPTIONS")


class RequestIds:
    """Gives every request an id: the client's X-Request-Id where that is one, else a new one. It is in every answer."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
            await send(message)

        await self._app(scope, receive, send_with_id)


class BodyLimit:
    """Refuses bodies that are too large (413) or do not arrive in time (408). is_stream: requests whose bodies are read bit by bit elsewhere."""

    def __init__(self, app: App, *, size_bytes: int, timeout_s: float, is_stream: Callable[[Scope], bool]) -> None:
        self._app = app
        self._size_bytes = size_bytes
        self._timeout_s = timeout_s
        self._is_stream = is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in BODILESS or self._is_stream(scope):
            await self._app(scope, receive, send)
            return
        length = _header(scope, b"content-length")
        if length and (not length.isdigit() or int(length) > self._size_bytes):
            await answer(send, 413, f"the body is larger than {self._size_bytes} bytes")
            return
        if not length and not _header(scope, b"transfer-encoding"):
            await self._app(scope, receive, send)
            return
        chunks: list[bytes] = []
        size, more, deadline = 0, True, time.monotonic() + self._timeout_s
        while more:
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                    message = await receive()
            except TimeoutError:
                await answer(send, 408, f"the body did not arrive within {self._timeout_s:g} s")
                return
            if message["type"] == "http.disconnect":
                return
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._size_bytes:
                await answer(send, 413, f"the body is larger than {self._size_bytes} bytes")
                return
            more = message.get("more_body", False)
        body = b"".join(chunks)
        chunks.clear()
        given = False

        async def receive_whole() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_whole, send)


class Buckets:
    """Token buckets: `rate_per_s` sustained, `burst` at once, for each name."""

    def __init__(self, rate_per_s: float, burst: int, *, names: int = 100_000) -> None:
        self._rate = rate_per_s
        self._burst = float(burst)
        self._names = names
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, name: str) -> float:
        """Takes a token: 0, or how many seconds to wait for one."""
        now = time.monotonic()
        level, at = self._levels.get(name, (self._burst, now))
        level = min(self._burst, level + (now - at) * self._rate)
        if name not in self._levels and len(self._levels) >= self._names:
            self._levels.clear()
        self._levels[name] = (level - 1, now) if level >= 1 else (level, now)
        return 0.0 if level >= 1 else (1 - level) / self._rate

    def is_empty(self, name: str) -> bool:
        """Whether `take` would have to wait."""
        level, at = self._levels.get(name, (self._burst, time.monotonic()))
        return level + (time.monotonic() - at) * self._rate < 1


async def answer(send: Send, status: int, detail: str) -> None:
    """An error without FastAPI."""
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")
