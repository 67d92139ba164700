"""The client under its documented name: `from twinkle_client.manager import TwinkleClient`."""

from typing import TYPE_CHECKING, Any

from ._client import TwinkleClient

if TYPE_CHECKING:
    from ._async_client import AsyncTwinkleClient

__all__ = ["AsyncTwinkleClient", "TwinkleClient"]


def __getattr__(name: str) -> Any:
    # asyncio, httpx and pydantic come with it.
    if name == "AsyncTwinkleClient":
        from ._async_client import AsyncTwinkleClient

        return AsyncTwinkleClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
