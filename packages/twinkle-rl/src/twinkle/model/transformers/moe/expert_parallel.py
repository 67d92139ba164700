"""Expert parallelism under the documented name: `from twinkle.model.transformers.moe.expert_parallel import ExpertParallelConfig`."""

from twinkle._exports import EXTRAS, lazy_exports

_NAMES = ("ExpertParallelConfig", "apply_expert_parallel", "patch_forward", "router_logits", "shard_experts")

__all__ = list(_NAMES)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = lazy_exports(__name__, dict.fromkeys(_NAMES, "twinkle_transformers"), EXTRAS)
