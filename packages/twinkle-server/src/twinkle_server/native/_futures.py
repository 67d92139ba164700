"""Calls that a client submitted and did not wait for."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic_core import from_json

from twinkle_client import types as wire

from ..engine import Calls
from ..engine._calls import JSON, LOST
from ..http._auth import Caller, get_service
from ..http._json import StrictRoute
from ..store import Future

futures_router = APIRouter(route_class=StrictRoute, tags=["futures"])


@futures_router.get("/futures/{future_id}")
async def get_future(
    request: Request,
    caller: Caller,
    future_id: Annotated[str, Path(max_length=100)],
    wait_s: Annotated[float, Query(ge=0, le=300, description="How long to wait for it to finish")] = 0.0,
) -> wire.Future:
    """A call and, once it has finished, what came of it. It can be asked for again, also after a restart of the server."""
    service = get_service(request)
    future = await service.calls.wait(caller, future_id, min(wait_s, service.config.limits.wait_s))
    return future_of(service.calls, future)


def future_of(calls: Calls, future: Future) -> wire.Future:
    """A future as the wire has it."""
    result = None
    if future.status == "done" and future.media_type == JSON and future.result:
        content = from_json(future.result)
        result = content["result"] if isinstance(content, dict) and set(content) == {"result"} else content
    return wire.Future(
        request_id=future.id,
        status="lost" if future.error == LOST else future.status,
        result=result,
        error=future.error,
        error_status=future.error_status,
        queue_position=calls.position(future) if future.status == "queued" else None,
    )
