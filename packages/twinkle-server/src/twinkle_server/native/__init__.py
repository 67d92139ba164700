"""The native REST interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from ._chat import chat_router, register_chat
from ._control import control_router
from ._futures import futures_router
from ._models import models_router
from ._processing import processing_router
from ._samplers import samplers_router
from ._transfer import transfer_router

if TYPE_CHECKING:
    from .._service import Service


def include_native(app: FastAPI, service: Service, prefix: str, api: str) -> None:
    """Adds the native routes: control endpoints under `prefix`, verbs under `api`."""
    app.include_router(control_router, prefix=prefix)
    app.include_router(futures_router, prefix=prefix)
    app.include_router(transfer_router, prefix=prefix)
    register_chat(service)
    app.include_router(chat_router, prefix=api)
    app.include_router(chat_router, prefix=prefix, include_in_schema=False)  # the same, beside the other routes
    route_prefix = service.config.route_prefix
    app.include_router(models_router(service, route_prefix), prefix=api)
    app.include_router(samplers_router(service, route_prefix), prefix=api)
    app.include_router(processing_router, prefix=f"{api}/processor{route_prefix}")
