"""Who makes a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends, Request, Response

from .._errors import ApiError, Busy, Forbidden, Unauthorized
from .._keys import USE, Principal
from ._limits import BODILESS, App, Receive, Scope, Send

if TYPE_CHECKING:
    from .._service import Service


def get_service(request: Request) -> Service:
    """The service behind the application."""
    return cast("Service", request.app.state.service)


def given_key(request: Request) -> str:
    """The key of a request's headers: Authorization or Twinkle-Authorization (with or without 'Bearer'), or X-API-Key; '' without one."""
    for name in ("twinkle-authorization", "authorization", "x-api-key"):
        value = request.headers.get(name, "").strip()
        scheme, _, rest = value.partition(" ")
        key = rest.strip() if scheme.lower() == "bearer" else value
        if key:
            return key
    return ""


async def authenticate(request: Request) -> Principal:
    """The owner of the request's key.

    Raises Unauthorized without a valid one, Forbidden for a key that may not use the service, Busy beyond the key's or the address's rate.
    """
    service = get_service(request)
    if (known := getattr(request.state, "principal", None)) is not None:
        return cast(Principal, known)
    key = given_key(request)
    principal = service.keys.remembered(key)
    if principal is None:
        address = request.client.host if request.client else ""
        if service.failed_logins.is_empty(address) and not service.keys.has_seen(key):
            raise Busy("too many requests with wrong keys from this address", retry_after_s=60)
        principal = await service.io(service.keys.check, key) if key else None
        if principal is None:
            service.failed_logins.take(address)
            raise Unauthorized("no valid API key: send it as `Authorization: Bearer KEY`, Twinkle-Authorization or X-API-Key")
    request.state.principal = principal
    if wait_s := service.requests.take(principal.key_id):
        raise Busy("too many requests with this key", retry_after_s=wait_s)
    if USE not in principal.scopes and not principal.is_admin:
        raise Forbidden("this key has no scope for it")
    return principal


Caller = Annotated[Principal, Depends(authenticate)]
"""A parameter of this type is the authenticated caller."""


class KeyFirst:
    """Checks the key of a request that has a body before anything of that is read. Plain ASGI; refuse: answers with an error."""

    def __init__(self, app: App, *, refuse: Callable[[Request, ApiError], Awaitable[Response]]) -> None:
        self._app, self._refuse = app, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in BODILESS:
            request = Request(scope)
            if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
                try:
                    await authenticate(request)
                except ApiError as error:
                    response = await self._refuse(request, error)
                    response.headers["Connection"] = "close"
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def request_id(request: Request) -> str:
    """The request's id."""
    return cast(str, request.state.request_id)
