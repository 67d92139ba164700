"""For tests of trainers: tiny checkpoints made from code, a reference trainer, and the conformance suite.

Needs transformers: pip install 'twinkle-train[testing]'.
"""

from ._models import tiny_llama, tiny_qwen2, tiny_qwen3
from ._reference import ReferenceTrainer

__all__ = ["ReferenceTrainer", "tiny_llama", "tiny_qwen2", "tiny_qwen3"]
