"""The client of the Twinkle training service: `TwinkleClient` and the wire types."""

__all__: list[str] = []
