"""Bodies as strict JSON, parsed once: no NaN, no nesting beyond 200, no half surrogates; and answers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json

from .._errors import BadRequest


class StrictRequest(Request):
    """A request whose JSON is strict."""

    async def json(self) -> Any:
        """The body's content; HTTPException 400 when it is no JSON: of any other error FastAPI would not tell what is wrong."""
        if not hasattr(self, "_strict_json"):
            try:
                self._strict_json = parse_json(await self.body())
            except BadRequest as error:
                raise HTTPException(400, str(error)) from None
        return self._strict_json


def parse_json(body: bytes) -> Any:
    """The content of a JSON text; BadRequest when it is none."""
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {str(error)[:200]}") from None


class StrictRoute(APIRoute):
    """A route whose requests are strict."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given a strict request."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


def json_of(value: BaseModel) -> bytes:
    """An answer's bytes; NaN and infinity are texts."""
    return value.model_dump_json().encode()


def validation_detail(error: RequestValidationError) -> list[dict[str, Any]]:
    """What is wrong with each argument, without repeating what was sent."""
    return [{"loc": [str(part)[:200] for part in each["loc"]], "msg": str(each["msg"])[:500], "type": each["type"]} for each in error.errors()[:50]]
