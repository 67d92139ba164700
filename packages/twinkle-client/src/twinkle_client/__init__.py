"""The client of the Twinkle training service: `TwinkleClient` and the wire types."""

from . import types
from ._errors import ClientError

__all__ = ["ClientError", "types"]
