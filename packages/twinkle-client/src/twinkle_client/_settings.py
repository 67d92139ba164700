"""Where the server is and how it is asked: constructor arguments over environment variables over defaults."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from ._errors import ConfigError

URL_VARIABLE = "TWINKLE_SERVER_URL"
TOKEN_VARIABLE = "TWINKLE_SERVER_TOKEN"
DEFAULT_URL = "http://localhost:8000"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a client reaches its server.

    url: with `/api/v1`. prefix: of the routes, '/twinkle'. api_key: never part of the repr. timeout_s: of a control request. call_timeout_s: of a
    verb of a model or sampler, from its first attempt on. max_retries: attempts after the first one.
    """

    url: str
    prefix: str
    api_key: str | None = field(repr=False)
    timeout_s: float
    call_timeout_s: float
    max_retries: int

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine, so that no proxy lies between."""
        host = urlsplit(self.url).hostname or ""
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def make_settings(
    base_url: str | None, api_key: str | None, route_prefix: str, timeout_s: float, call_timeout_s: float, max_retries: int
) -> Settings:
    """The settings; raises ConfigError for what cannot work."""
    base = (base_url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/").removesuffix("/api/v1")
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"base_url is {base!r}; it must be like {DEFAULT_URL!r} (an argument, or the variable {URL_VARIABLE})")
    if parts.username or parts.password:
        raise ConfigError(f"base_url holds a user name or a password; give the key as api_key, or in the variable {TOKEN_VARIABLE}")
    key = api_key if api_key is not None else os.environ.get(TOKEN_VARIABLE)
    key = (key or "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("api_key holds spaces or characters that no key has")
    if not (timeout_s > 0 and call_timeout_s > 0):
        raise ConfigError("timeout_s and call_timeout_s must be above 0")
    if max_retries < 0:
        raise ConfigError(f"max_retries is {max_retries}; it must be at least 0")
    prefix = route_prefix.strip("/")
    return Settings(
        url=f"{base}/api/v1",
        prefix=f"/{prefix}" if prefix else "",
        api_key=key or None,
        timeout_s=timeout_s,
        call_timeout_s=call_timeout_s,
        max_retries=max_retries,
    )


def in_path(*parts: str) -> str:
    """The parts of a URL's path, encoded, so that none can mean another path.

    Raises:
        ConfigError: a part that is empty, '.' or '..'.
    """
    for part in parts:
        if part in ("", ".", ".."):
            raise ConfigError(f"{part!r} is no name or id")
    return "/".join(quote(part, safe="") for part in parts)
