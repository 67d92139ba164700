"""Tiny Hugging Face checkpoints made from code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from twinkle_data.toy import toy_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def tiny_qwen3(path: str | os.PathLike[str], **sizes: Any) -> Path:
    """Writes a random Qwen3 checkpoint (query and key norms) with a tokenizer into the folder, and returns it.

    fp32 safetensors; 2 layers, hidden size 128, 4 heads, 2 key-value heads, head size 32, MLP 256, tied embeddings. `sizes`: any field of
    transformers' configuration instead, `tie_word_embeddings` and `vocab_size` included (by default the tokenizer's), and `seed`
    (default 0). Equal arguments give equal weights.

    Raises ImportError without transformers.
    """
    from transformers import Qwen3Config

    return _write(path, Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True, **sizes})


def tiny_qwen3_moe(path: str | os.PathLike[str], **sizes: Any) -> Path:
    """As `tiny_qwen3`, a Qwen3-MoE: 4 experts of MLP 32 in each layer, 2 of them a token; untied embeddings."""
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return _write(path, Qwen3MoeConfig, {"head_dim": 32, "tie_word_embeddings": False, **experts, **sizes})


def tiny_qwen2(path: str | os.PathLike[str], **sizes: Any) -> Path:
    """As `tiny_qwen3`, a Qwen2: biases on queries, keys and values; untied embeddings."""
    from transformers import Qwen2Config

    # One token more than ours: transformers 5.19 loads every qwen2 checkpoint's tokenizer as Qwen2Tokenizer, which adds <|endoftext|>.
    return _write(path, Qwen2Config, {"vocab_size": _vocab_size() + 1, "tie_word_embeddings": False, **sizes})


def tiny_llama(path: str | os.PathLike[str], **sizes: Any) -> Path:
    """As `tiny_qwen3`, a Llama: neither biases nor query and key norms; untied embeddings."""
    from transformers import LlamaConfig

    return _write(path, LlamaConfig, {"tie_word_embeddings": False, **sizes})


def _write(path: str | os.PathLike[str], config_class: type[PreTrainedConfig], sizes: dict[str, Any]) -> Path:
    from transformers import AutoModelForCausalLM

    folder = Path(path)
    seed = sizes.pop("seed", 0)
    tokenizer = toy_tokenizer(_texts())
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.06,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        **sizes,
    }
    known = config_class()
    unknown = sorted(name for name in sizes if name not in ("head_dim", "vocab_size") and not hasattr(known, name))
    if unknown:
        raise TypeError(f"{config_class.__name__} has no {', '.join(unknown)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_class(**options), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                # Norms of exactly one and biases of exactly zero would hide a loader that forgets or swaps them.
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _vocab_size() -> int:
    return len(toy_tokenizer(_texts()))


def _texts() -> list[str]:
    # Sums of four digits, as in the arithmetic task, from a fixed linear congruence: no data set is needed.
    texts: list[str] = []
    state = 1
    for _ in range(200):
        numbers: list[str] = []
        for _ in range(4):
            state = (1103515245 * state + 12345) % 2**31
            numbers.append(str(state // 65536 % 10))
        texts.append(f"State the final answer to the following arithmetic problem: {numbers[0]} + {numbers[1]} - {numbers[2]} + {numbers[3]} =")
    return texts
