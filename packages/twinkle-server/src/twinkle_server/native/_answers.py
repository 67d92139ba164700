"""How a verb's call is submitted and answered: at once, when it is done, or as a future."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from fastapi import Request, Response

from .._errors import Invalid
from .._keys import Principal
from ..engine import reply_of
from ..http._auth import get_service, request_id
from ..http._json import json_of
from ..store import Run
from ._futures import future_of

_KEY = re.compile(r"[\x21-\x7e]{1,200}")
_WAIT = re.compile(r"wait=(\d{1,4}(?:\.\d+)?)")


def idempotency_key(request: Request) -> str | None:
    """The request's Idempotency-Key; Invalid when it is none."""
    key = request.headers.get("idempotency-key")
    if key is not None and _KEY.fullmatch(key) is None:
        raise Invalid("Idempotency-Key is up to 200 printable characters")
    return key


def id_of_key(prefix: str, caller: Principal, request: Request) -> str | None:
    """An id that is the same whenever the same request is sent again; None without a key."""
    key = idempotency_key(request)
    return None if key is None else prefix + hashlib.sha256(f"{caller.tenant}\0{request.url.path}\0{key}".encode()).hexdigest()[:20]


async def answer_call(
    request: Request, caller: Principal, kind: str, *, queue: str, value: Any, run: Run | None = None, payload: bytes | None = None
) -> Response:
    """Submits a call and answers with its result.

    With an Idempotency-Key it is stored, and the same key never runs it twice. With `Prefer: respond-async, wait=N` the answer comes after N
    seconds at the latest: 202 and the future, where the call has not finished.
    """
    service = get_service(request)
    key, prefer = idempotency_key(request), request.headers.get("prefer", "")
    is_async = "respond-async" in prefer
    body = await request.body() if payload is None else payload
    future = await service.calls.submit(
        caller,
        kind,
        body,
        queue=queue,
        value=value,
        run=run,
        dedup=None if key is None else f"native:{key}",
        request_id=request_id(request),
        durable=is_async or key is not None,
    )
    wait_s = service.config.limits.call_s
    if is_async:
        found = _WAIT.search(prefer)
        wait_s = min(float(found[1]) if found else 0.0, service.config.limits.wait_s)
    future = await service.calls.wait(caller, future.id, wait_s)
    if is_async and not future.is_finished:
        return Response(json_of(future_of(service.calls, future)), 202, media_type="application/json")
    reply = reply_of(future)
    return Response(reply.body, media_type=reply.media_type)
