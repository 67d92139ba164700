"""Who makes a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends, Request

from .._errors import Busy, Forbidden, Unauthorized
from .._keys import USE, Principal

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
    key = given_key(request)
    principal = service.keys.remembered(key)
    if principal is None:
        address = request.client.host if request.client else ""
        if service.failed_logins.is_empty(address):
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


def request_id(request: Request) -> str:
    """The request's id."""
    return cast(str, request.state.request_id)
