"""The ASGI application."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from twinkle_client.types import ErrorBody

from .._config import ServerConfig
from .._dashboard import include_dashboard
from .._errors import ApiError, Lost
from .._observing import Observer
from .._service import Service
from ..native import include_native
from ..tinker import include_tinker
from ._auth import KeyFirst
from ._json import validation_detail
from ._limits import BodyLimit, RequestIds

logger = logging.getLogger(__name__)

API = "/api/v1"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "No JSON, or not as HTTP has it",
        401: "No valid API key",
        403: "The key lacks a scope",
        404: "Not there, or another tenant's",
        408: "The body did not arrive in time",
        409: "Not in this state",
        413: "The body is too large",
        422: "Understood, but wrong",
        429: "A quota, a full queue or a rate",
        500: "The call failed, or was lost with the server",
        503: "Not ready, or stopping",
        507: "The server's disk is full",
    }.items()
}


def create_app(config: ServerConfig, service: Service | None = None) -> FastAPI:
    """The application that serves a configuration. Models are loaded when it starts, not before.

    service: one that was made already (tests, embedding); it is started and stopped by the application.
    """
    served = service or Service(config)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        del app
        await served.start()
        try:
            yield
        finally:
            await served.stop()

    app = FastAPI(
        title="Twinkle",
        version=version("twinkle-server"),
        summary="Training as a service: LoRA adapters, sampling, checkpoints.",
        openapi_url=f"{API}/openapi.json",
        docs_url=f"{API}/docs",
        redoc_url=None,
        root_path=config.root_path,
        lifespan=life,
        responses=ERRORS,
        generate_unique_id_function=lambda route: f"{route.name}",
    )
    app.state.service = served
    include_native(app, served, f"{API}{config.route_prefix}", API)
    include_tinker(app, served, API)
    include_dashboard(app, f"{API}{config.route_prefix}")
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    limits = config.limits
    app.add_middleware(
        BodyLimit,  # pyright: ignore[reportArgumentType]  # starlette's protocol does not take plain ASGI classes with keyword arguments
        size_bytes=limits.body_bytes,
        timeout_s=limits.body_timeout_s,
        is_stream=lambda scope: scope["path"].endswith("/upload") and scope["method"] == "POST",
    )
    app.add_middleware(KeyFirst, refuse=_api_error)  # pyright: ignore[reportArgumentType]
    app.add_middleware(Observer, metrics=served.metrics, tracing=served.tracing)  # pyright: ignore[reportArgumentType]
    app.add_middleware(RequestIds)  # pyright: ignore[reportArgumentType]
    return app


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError), "it is registered for these"
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Lost):
        headers["X-Twinkle-Error"] = "lost"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _answer(request, error.detail, error.status, headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), "it is registered for these"
    return _answer(request, validation_detail(error), 422)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException), "it is registered for these"
    return _answer(request, error.detail, error.status_code, error.headers)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed [%s]", request.method, request.url.path, request.state.request_id, exc_info=error)
    return _answer(request, "the request failed on the server; its log has the reason under this request's id", 500)


def _answer(request: Request, detail: Any, status: int, headers: Mapping[str, str] | None = None) -> JSONResponse:
    content: dict[str, Any] = {"detail": detail}
    if request.url.path.endswith(("/chat/completions", "/models")):  # there OpenAI's clients look for the message
        told = detail if isinstance(detail, str) else "; ".join(f"{'.'.join(each['loc'])}: {each['msg']}" for each in detail)
        content["error"] = {"message": told, "type": "server_error" if status >= 500 else "invalid_request_error", "param": None, "code": None}
    return JSONResponse(content, status, headers)
