"""The model of the benchmarks of sampling and of GRPO."""

from pathlib import Path
from typing import Any


def save_small_qwen3(folder: Path, **ids: int | None) -> None:
    """A Qwen3 of 3.4M parameters, fp32, vocabulary of 512.

    ids: bos_token_id, eos_token_id and pad_token_id. Without an end token every completion has its full length.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {"head_dim": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0} | ids
    config = Qwen3Config(
        **settings,
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
