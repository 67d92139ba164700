"""Train any causal LM of transformers: FSDP2, sequence and expert parallelism, and padding-free batches, proven exact on a CPU."""

from twinkle_train import AdapterSource

from ._errors import CheckpointError, LayoutError, ModelNotFoundError, TransformersError, UnsupportedModelError
from ._expert_parallel import ExpertParallelConfig, apply_expert_parallel, patch_forward, router_logits, shard_experts
from ._gated_delta import GatedDeltaNetPaddingFreePatch, Qwen3_5GatedDeltaNetUlyssesPatch
from ._model import TransformersModel
from ._sequence_parallel import SequenceParallel, SequenceParallelConfig, SequenceParallelStrategy

__all__ = [
    "AdapterSource",
    "CheckpointError",
    "ExpertParallelConfig",
    "GatedDeltaNetPaddingFreePatch",
    "LayoutError",
    "ModelNotFoundError",
    "Qwen3_5GatedDeltaNetUlyssesPatch",
    "SequenceParallel",
    "SequenceParallelConfig",
    "SequenceParallelStrategy",
    "TransformersError",
    "TransformersModel",
    "UnsupportedModelError",
    "apply_expert_parallel",
    "patch_forward",
    "router_logits",
    "shard_experts",
]
