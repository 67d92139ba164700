"""For tests of trainers: tiny checkpoints made from code, a reference trainer, the conformance suite (`testing.conformance`),
and functions run on several ranks.

Needs transformers: pip install 'twinkle-train[testing]'.
"""

from . import conformance
from ._features import random_features, rollout_features
from ._models import tiny_llama, tiny_qwen2, tiny_qwen3
from ._rank_pool import RankPool
from ._ranks import run_ranks
from ._reference import ReferenceTrainer

__all__ = [
    "RankPool",
    "ReferenceTrainer",
    "conformance",
    "random_features",
    "rollout_features",
    "run_ranks",
    "tiny_llama",
    "tiny_qwen2",
    "tiny_qwen3",
]
