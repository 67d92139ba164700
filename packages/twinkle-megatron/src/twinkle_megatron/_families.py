"""The model families that MegatronModel supports: what is checked in a configuration, and what megatron-core is told of it.

Facts about configurations only, so that a driver without megatron-core can check a layout.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ._errors import UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class MoeSizes:
    """The sizes of expert layers that a mesh must divide. shared_features: of the shared experts, 0 without."""

    num_experts: int
    expert_features: int
    shared_features: int = 0


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family's configuration is read.

    refused: configuration fields that must have one value (or be absent). options: fields of megatron-core's TransformerConfig that follow
    from the configuration; mbridge 0.15.1 has them wrong or not at all. moe: its expert sizes; None for dense models. check_more: further checks.
    """

    refused: Mapping[str, Any]
    options: Callable[[Any], dict[str, Any]]
    moe: Callable[[Any], MoeSizes] | None = None
    check_more: Callable[[Any], None] | None = None

    def check(self, config: Any) -> None:
        """Refuses what megatron-core would compute differently.

        Raises:
            UnsupportedModelError: the entry of config.json.
        """
        for name, accepted in self.refused.items():
            value = getattr(config, name, accepted)
            if value != accepted and not (value is None and not accepted):
                raise UnsupportedModelError(f"config.json has {name} = {value!r}, which MegatronModel does not support (it must be {accepted!r}).")
        if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
            raise UnsupportedModelError(f"config.json has layer_types = {config.layer_types!r}; MegatronModel supports 'full_attention' layers.")
        if self.check_more is not None:
            self.check_more(config)


def moe_sizes(config: Any) -> MoeSizes | None:
    """The expert sizes of a configuration; None for dense models and for bridges of one's own."""
    family = FAMILIES.get(config.model_type)
    return None if family is None or family.moe is None else family.moe(config)


def rope_arguments(config: Any) -> dict[str, Any]:
    """megatron-core's rotary arguments for a Hugging Face configuration.

    Raises:
        UnsupportedModelError: a kind of rotary scaling that megatron-core computes differently.
    """
    rope = dict(config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    arguments: dict[str, Any] = {"rotary_base": rope.get("rope_theta", 10000.0)}
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        if config.model_type != "glm4_moe":
            raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported: it must be 1.")
        arguments["rotary_percent"] = partial
    if kind == "default":
        return arguments
    if kind == "linear":
        return arguments | {"seq_len_interpolation_factor": float(rope["factor"])}
    if kind == "llama3":
        # megatron-core 0.16.1 fixes these three.
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        wrong = {name: rope.get(name) for name, value in fixed.items() if rope.get(name) != value}
        if wrong:
            raise UnsupportedModelError(f"rope_type 'llama3' is supported with {fixed} only; config.json has {wrong}.")
        return arguments | {"rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    raise UnsupportedModelError(f"rope_type {kind!r} is not supported: default, linear and llama3 are.")


def mla_options(config: Any) -> dict[str, Any]:
    """megatron-core's options of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Raises:
        UnsupportedModelError: a kind of rotary scaling other than none and yarn.
    """
    rope = dict(config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise UnsupportedModelError(f"rope_type {kind!r} is not supported with latent attention: default and yarn are.")
    options: dict[str, Any] = {
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "rope" if kind == "default" else "yarn",
        "rotary_base": rope.get("rope_theta", 10000.0),
        "rotary_scaling_factor": 1.0,
    }
    if kind == "yarn":
        options |= {
            "rotary_scaling_factor": float(rope["factor"]),
            "original_max_position_embeddings": rope.get("original_max_position_embeddings") or config.max_position_embeddings,
            "beta_fast": rope.get("beta_fast") or 32,
            "beta_slow": rope.get("beta_slow") or 1,
            "mscale": rope.get("mscale") or 1.0,
            "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        }
    return options


def _dense(config: Any) -> dict[str, Any]:
    del config
    return {}


def _softmax_router(config: Any, *, num_experts: int, expert_features: int, normalized: bool) -> dict[str, Any]:
    return {
        "num_moe_experts": num_experts,
        "moe_ffn_hidden_size": expert_features,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        # The softmax over the chosen experts' logits is the normalized softmax over all.
        "moe_router_pre_softmax": not normalized,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _sigmoid_router(config: Any) -> dict[str, Any]:
    groups = {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group} if config.n_group > 1 else {}
    dense = config.first_k_dense_replace
    return groups | {
        "num_moe_experts": config.n_routed_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_layer_freq": [int(layer >= dense) for layer in range(config.num_hidden_layers)],
    }


def _check_sigmoid_router(config: Any) -> None:
    if config.n_group > 1 and config.num_experts_per_tok != 2 * config.topk_group:
        raise UnsupportedModelError(
            f"config.json has n_group = {config.n_group} with num_experts_per_tok = {config.num_experts_per_tok} and topk_group = "
            f"{config.topk_group}: megatron-core ranks groups by as many experts as it takes from each, transformers by two, so "
            "num_experts_per_tok must be 2 x topk_group."
        )
    if not config.norm_topk_prob and config.num_experts_per_tok > 1:
        raise UnsupportedModelError("config.json has norm_topk_prob = False, and megatron-core always normalizes sigmoid scores.")


def _check_deepseek(config: Any) -> None:
    mla_options(config)
    _check_sigmoid_router(config)
    if config.rms_norm_eps != 1e-6:
        raise UnsupportedModelError(
            f"config.json has rms_norm_eps = {config.rms_norm_eps}; transformers norms the latents with 1e-6 whatever it is, megatron-core with it."
        )


def _check_rope(config: Any) -> None:
    rope_arguments(config)


def _check_glm(config: Any) -> None:
    rope_arguments(config)
    _check_sigmoid_router(config)


def _qwen3_moe_layers(config: Any) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    return {"moe_layer_freq": [int(i not in config.mlp_only_layers and (i + 1) % config.decoder_sparse_step == 0) for i in layers]}


_DENSE_REFUSED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "attention_dropout": 0.0}
_MOE_REFUSED = {"hidden_act": "silu", "use_sliding_window": False, "attention_dropout": 0.0}

FAMILIES: dict[str, Family] = {
    "llama": Family(refused=_DENSE_REFUSED, options=_dense, check_more=_check_rope),
    "qwen2": Family(refused=_DENSE_REFUSED, options=_dense, check_more=_check_rope),
    "qwen3": Family(refused=_DENSE_REFUSED, options=_dense, check_more=_check_rope),
    "qwen3_moe": Family(
        refused=_MOE_REFUSED | {"attention_bias": False},
        options=lambda c: (
            _softmax_router(c, num_experts=c.num_experts, expert_features=c.moe_intermediate_size, normalized=c.norm_topk_prob) | _qwen3_moe_layers(c)
        ),
        moe=lambda c: MoeSizes(num_experts=c.num_experts, expert_features=c.moe_intermediate_size),
        check_more=_check_rope,
    ),
    "mixtral": Family(
        refused=_MOE_REFUSED | {"sliding_window": None, "router_jitter_noise": 0.0},
        options=lambda c: _softmax_router(c, num_experts=c.num_local_experts, expert_features=c.intermediate_size, normalized=True),
        moe=lambda c: MoeSizes(num_experts=c.num_local_experts, expert_features=c.intermediate_size),
        check_more=_check_rope,
    ),
    "deepseek_v3": Family(
        refused=_MOE_REFUSED | {"attention_bias": False, "rope_interleave": True},
        options=lambda c: mla_options(c) | _sigmoid_router(c),
        moe=lambda c: MoeSizes(
            num_experts=c.n_routed_experts, expert_features=c.moe_intermediate_size, shared_features=c.moe_intermediate_size * c.n_shared_experts
        ),
        check_more=_check_deepseek,
    ),
    "glm4_moe": Family(
        refused=_MOE_REFUSED,
        options=lambda c: _sigmoid_router(c) | {"qk_layernorm": c.use_qk_norm, "add_qkv_bias": c.attention_bias, "add_bias_linear": False},
        moe=lambda c: MoeSizes(
            num_experts=c.n_routed_experts, expert_features=c.moe_intermediate_size, shared_features=c.moe_intermediate_size * c.n_shared_experts
        ),
        check_more=_check_glm,
    ),
}
