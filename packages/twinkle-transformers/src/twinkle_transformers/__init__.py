"""Train any causal LM of transformers: FSDP2 and padding-free batches, proven exact on a CPU."""

from ._errors import CheckpointError, LayoutError, ModelNotFoundError, TransformersError, UnsupportedModelError
from ._model import TransformersModel

__all__ = [
    "CheckpointError",
    "LayoutError",
    "ModelNotFoundError",
    "TransformersError",
    "TransformersModel",
    "UnsupportedModelError",
]
