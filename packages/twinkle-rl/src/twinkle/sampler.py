"""Samplers under the documented name: `from twinkle.sampler import vLLMSampler`."""

from twinkle._exports import EXTRAS, lazy_exports

__all__ = ["vLLMSampler"]  # noqa: F822  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = lazy_exports(__name__, {"vLLMSampler": "twinkle_vllm"}, EXTRAS)
