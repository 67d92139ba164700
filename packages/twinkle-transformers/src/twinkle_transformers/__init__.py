"""Train any causal LM of transformers: FSDP2, sequence parallelism and padding-free batches, proven exact on a CPU."""

from ._errors import CheckpointError, LayoutError, ModelNotFoundError, TransformersError, UnsupportedModelError
from ._model import TransformersModel
from ._sequence_parallel import SequenceParallel, SequenceParallelConfig, SequenceParallelStrategy

__all__ = [
    "CheckpointError",
    "LayoutError",
    "ModelNotFoundError",
    "SequenceParallel",
    "SequenceParallelConfig",
    "SequenceParallelStrategy",
    "TransformersError",
    "TransformersModel",
    "UnsupportedModelError",
]
