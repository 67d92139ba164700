"""`/processor/twinkle/...`: datasets, loaders and templates that the server holds."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from twinkle_client import types as wire

from ..http._auth import Caller, get_service
from ..http._json import StrictRoute
from ._answers import id_of_key
from ._examples import with_example

processing_router = APIRouter(route_class=StrictRoute, tags=["processor"])


_END: dict[int | str, dict[str, Any]] = {410: {"model": wire.ErrorBody, "description": "An iterator's end"}}


@processing_router.post("/create", responses=_END, openapi_extra=with_example("create_processor"))
async def create_processor(request: Request, caller: Caller, body: wire.CreateProcessor) -> wire.ProcessorCreated:
    """Makes a dataset, a loader or a template, by a class of the list."""
    service = get_service(request)
    made = await service.file_io(service.processors.create, caller.tenant, body, id_of_key("prc-", caller, request))
    return wire.ProcessorCreated(processor_id=made)


@processing_router.post("/call", response_model=wire.Result[object], responses=_END, openapi_extra=with_example("call_processor"))
async def call_processor(request: Request, caller: Caller, body: wire.CallProcessor) -> Response:
    """Calls a function of the list; 410 at an iterator's end. With an Idempotency-Key the same call is done once while the object lives."""
    service = get_service(request)
    key = id_of_key("", caller, request)
    result = await service.file_io(service.processors.call, caller.tenant, body.processor_id, body.function, body.options, key)
    return Response(to_json({"result": result}, inf_nan_mode="strings"), media_type="application/json")
