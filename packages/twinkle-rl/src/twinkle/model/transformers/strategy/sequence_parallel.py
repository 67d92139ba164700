"""Sequence parallelism under the documented name: `from twinkle.model.transformers.strategy.sequence_parallel import SequenceParallelConfig`."""

from twinkle._exports import EXTRAS, lazy_exports

_NAMES = (
    "GatedDeltaNetPaddingFreePatch",
    "Qwen3_5GatedDeltaNetUlyssesPatch",
    "SequenceParallel",
    "SequenceParallelConfig",
    "SequenceParallelStrategy",
)

__all__ = list(_NAMES)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = lazy_exports(__name__, dict.fromkeys(_NAMES, "twinkle_transformers"), EXTRAS)
