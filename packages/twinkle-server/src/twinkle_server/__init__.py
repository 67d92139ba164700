"""The Twinkle training service: REST, and the Tinker protocol, over trainers and samplers."""

__all__: list[str] = []
