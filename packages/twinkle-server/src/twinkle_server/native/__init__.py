"""The native REST interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from ._control import control_router
from ._futures import futures_router

if TYPE_CHECKING:
    from .._service import Service


def include_native(app: FastAPI, service: Service, prefix: str, api: str) -> None:
    """Adds the native routes: control endpoints under `prefix`, verbs under `api`."""
    del service, api
    app.include_router(control_router, prefix=prefix)
    app.include_router(futures_router, prefix=prefix)
