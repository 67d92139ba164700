"""Tiny checkpoints of many model types, made from code. Loaded by conftest.py."""

import json
import shutil
from pathlib import Path
from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_ROUTED: dict[str, Any] = {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_mtp_layers": 0}
_CHOSEN: dict[str, Any] = {"num_experts_per_tok": 2}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# model_type: what is special about it here.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 6, "head_dim": 16},
    "phi3": {},
    "olmo2": {},
    "glm4": {"head_dim": 16},
    "smollm3": {"no_rope_layer_interval": 2},
    "cohere2": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {"sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 6, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neox": {},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], **_CHOSEN},
    "afmoe": {
        "num_experts": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "head_dim": 16,
        "num_dense_layers": 1,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        **_CHOSEN,
    },
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, **_CHOSEN},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True, **_CHOSEN},
    "mixtral": {"num_local_experts": 4, "sliding_window": None, "head_dim": 16, **_CHOSEN},
    "olmoe": {"num_experts": 4, **_CHOSEN},
    "deepseek_v3": {**_LATENT, **_ROUTED, **_CHOSEN, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
    "glm4_moe": {**_ROUTED, **_CHOSEN, "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.3},
    "qwen3_next": {"num_experts": 0, "head_dim": 16, **_LINEAR},
    "qwen3_5_text": {"head_dim": 16, **_LINEAR},
    "qwen3_5_moe_text": {
        "head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        **_CHOSEN,
        **_LINEAR,
    },
    # Padded rows only: state space layers and compressed keys do not keep sequences apart.
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "num_hidden_layers": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        **_CHOSEN,
    },
    # One layer is routed by a hash of the token.
    "deepseek_v4": {
        "num_local_experts": 4,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["hash_moe", "moe"],
        "q_lora_rank": 24,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_rate_hca": 4,
        **_CHOSEN,
    },
    # Code of its own, in the checkpoint.
    "listed_moe": {"head_dim": 16},
    # Models whose sequences do not stay apart, each for another reason.
    "olmo_hybrid": {**_LINEAR, "linear_num_key_heads": 4},
    "mamba": {"state_size": 8},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_head": 4, "n_layer": 2},
    "falcon": {"alibi": False, "multi_query": True},
}


def make(folder: Path, family: str, **sizes: Any) -> Path:
    """Writes a checkpoint of a family into the folder. Equal arguments give equal weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    remote = family == "listed_moe"
    options = _SIZES | FAMILIES[family] | sizes
    if remote:
        shutil.copy(Path(__file__).with_name("remote_code_model.py"), folder)
        code = {"AutoConfig": "remote_code_model.ListedConfig", "AutoModelForCausalLM": "remote_code_model.ListedForCausalLM"}
        (folder / "config.json").write_text(json.dumps(options | {"model_type": family, "auto_map": code}))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    else:
        config = AutoConfig.for_model(family, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=remote)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                # Norms of exactly one, biases of exactly zero and routers that are nearly undecided would hide faults.
                if name.endswith("e_score_correction_bias"):
                    tensor.copy_(torch.randn_like(tensor) * 0.1)
                elif name.endswith("tid2eid"):
                    tensor.copy_(torch.rand(len(tensor), config.num_local_experts).topk(tensor.shape[1]).indices)
                elif name.endswith(("gate.weight", "router.weight")):
                    tensor.copy_(torch.randn_like(tensor) * 0.3)
                elif tensor.is_floating_point() and ("bias" in name or "sinks" in name or tensor.dim() == 1) and "inv_freq" not in name:
                    tensor.add_(torch.randn_like(tensor), alpha=0.1)
    model.save_pretrained(folder)
    return folder
