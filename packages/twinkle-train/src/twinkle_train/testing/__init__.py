"""For tests of trainers: tiny checkpoints made from code, a reference trainer, the conformance suite (`testing.conformance`), what adapters must do
alike (`testing.adapters`), what is left when something ends in the middle (`testing.interrupts`), float16 and what is not finite
(`testing.precision`), what plain peft makes of rows (`testing.plain_peft`), and functions run on several ranks.

Needs transformers and peft: pip install 'twinkle-train[testing]'.
"""

from . import adapters, conformance, interrupts, plain_peft, precision
from ._features import random_features, rollout_features
from ._models import tiny_llama, tiny_qwen2, tiny_qwen3, tiny_qwen3_moe
from ._rank_pool import RankPool
from ._ranks import run_ranks
from ._reference import ReferenceTrainer

__all__ = [
    "RankPool",
    "ReferenceTrainer",
    "adapters",
    "conformance",
    "interrupts",
    "plain_peft",
    "precision",
    "random_features",
    "rollout_features",
    "run_ranks",
    "tiny_llama",
    "tiny_qwen2",
    "tiny_qwen3",
    "tiny_qwen3_moe",
]
