"""The Tinker protocol: what the official `tinker` SDK speaks, over this server's models, runs and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from ._control import control_router
from ._futures import futures_router
from ._handlers import register_calls

if TYPE_CHECKING:
    from .._service import Service

__all__ = ["include_tinker"]


def include_tinker(app: FastAPI, service: Service, api: str) -> None:
    """Adds the protocol's routes under `api` ('/api/v1'), and says how its calls run."""
    register_calls(service.calls)
    app.include_router(futures_router, prefix=api)
    app.include_router(control_router, prefix=api)
