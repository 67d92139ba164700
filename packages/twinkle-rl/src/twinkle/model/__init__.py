"""Trainers under the documented name: `from twinkle.model import MegatronModel`."""

from twinkle._exports import EXTRAS, lazy_exports

__all__ = ["MegatronModel", "TransformersModel"]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = lazy_exports(__name__, {"MegatronModel": "twinkle_megatron", "TransformersModel": "twinkle_transformers"}, EXTRAS)
