"""What is seen of every request: a metric, a line in the log, a span. Plain ASGI, around all the rest."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ._logging import log_context
from ._metrics import Metrics
from ._tracing import Tracing

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger("twinkle_server.requests")


class Observer:
    """Observes requests. Must be inside the middleware that gives requests their ids (`state["request_id"]`)."""

    def __init__(self, app: App, *, metrics: Metrics, tracing: Tracing) -> None:
        self._app, self._metrics, self._tracing = app, metrics, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, size_bytes = time.perf_counter(), 500, 0
        state = scope.setdefault("state", {})
        request_id = state.get("request_id", "")

        async def observed(message: Message) -> None:
            nonlocal status, size_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                size_bytes += len(message.get("body", b""))
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]} if self._tracing.is_on else {}
        attributes = {"http.request.method": scope["method"], "twinkle.request_id": request_id}
        with log_context(request_id=request_id), self._tracing.request(scope["method"], headers, attributes) as span:
            try:
                await self._app(scope, receive, observed)
            finally:
                seconds = time.perf_counter() - begun
                route = route_of(scope)
                self._metrics.request(_method(scope["method"]), route, status, seconds)
                principal = state.get("principal")
                level = logging.WARNING if status >= 500 else logging.INFO
                if logger.isEnabledFor(level):
                    told = {"method": scope["method"], "path": scope["path"][:500], "status": status, "ms": round(seconds * 1000, 2)}
                    more = {"size_bytes": size_bytes, "tenant": None if principal is None else principal.tenant}
                    # Escaped: a path that came percent-encoded may hold newlines, and what a terminal obeys.
                    path = route or scope["path"][:200].encode("unicode_escape").decode()
                    logger.log(level, "%s %s %d", scope["method"], path, status, extra={**told, **more})
                if span is not None:
                    span.update_name(f"{scope['method']} {route}".strip())
                    span.set_attributes({"http.response.status_code": status, "http.route": route})
                    if status >= 500:
                        self._tracing.fail(span, str(status))


def route_of(scope: Scope) -> str:
    """The template of the route that matched, '' where none did: a label must not be of the callers' choosing."""
    return getattr(scope.get("route"), "path", "")


def _method(name: str) -> str:
    return name if name in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "other"
