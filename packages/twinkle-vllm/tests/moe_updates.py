"""Run by test_vllm_updates in a process of its own: weight updates of a mixture of experts. Prints the errors as JSON."""

import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from twinkle_sync import CheckpointEngineManager, CheckpointFolder
from twinkle_vllm import _weights, vLLMSampler
from twinkle_vllm.testing import logprob_error

PROMPTS = [[5, 6, 7, 8, 9, 10], [90, 3, 44], [20] * 12]


def save_moe(path: Path, seed: int, heads: int = 2, kv_heads: int = 1) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = {"head_dim": 32}  # not in the signature that type checkers see
    config = Qwen3MoeConfig(
        **settings,
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.1,
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    model.save_pretrained(path)
    return model


def error(sampler: vLLMSampler, model: Any) -> float:
    return logprob_error(sampler, model, PROMPTS)


def warns_of_templates(sampler: vLLMSampler) -> bool:
    """Whether an engine without tokenizer warns that it cannot try a conversation, as it does when it is built."""
    from vllm.renderers import ChatParams

    written = io.StringIO()
    logger = logging.getLogger("vllm.renderers.base")
    logger.addHandler(logging.StreamHandler(written))
    logger.propagate = False  # it is not to be printed here either
    sampler._engine.renderer.warmup(ChatParams())
    return "Chat template warmup failed" in written.getvalue()


def main(root: Path) -> None:
    old, new = save_moe(root / "old", 0), save_moe(root / "new", 1)
    sampler = vLLMSampler(root / "old", {"max_model_len": 64, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20})
    manager = CheckpointEngineManager(model=CheckpointFolder(root / "new"), sampler=sampler)
    errors: dict[str, Any] = {"at_start": error(sampler, old), "control": error(sampler, new)}
    errors["warns_of_templates"] = warns_of_templates(sampler)
    for name in ("after_first_update", "after_second_update"):
        manager.sync_weights()
        errors[name] = error(sampler, new)
    repair, _weights.repair_on_cpu = _weights.repair_on_cpu, lambda model: None
    manager.sync_weights()
    errors["without_repair"] = error(sampler, new)
    _weights.repair_on_cpu = repair
    manager.sync_weights()
    errors["repaired_again"] = error(sampler, new)
    print(json.dumps(errors))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
