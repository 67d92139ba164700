"""Fields of megatron-core's TransformerConfig: what the engine sets, what the user may. Imported only once the platform is chosen."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig

from twinkle_mesh import DeviceMesh
from twinkle_train import ConfigError

_OWNED = (
    "bf16",
    "calculate_per_token_loss",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "fp16",
    "moe_enable_routing_replay",
    "mtp_num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "params_dtype",
    "perform_initialization",
    "pipeline_dtype",
    "pipeline_model_parallel_layout",
    "pipeline_model_parallel_size",
    "sequence_parallel",
    "tensor_model_parallel_size",
    "variable_seq_lengths",
    "virtual_pipeline_model_parallel_size",
)


# Whatever the weights fit.
_OF_CONFIG = (
    "ffn_hidden_size",
    "hidden_size",
    "kv_channels",
    "layernorm_epsilon",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "multi_latent_attention",
    "normalization",
    "num_attention_heads",
    "num_layers",
    "num_moe_experts",
    "num_query_groups",
    "qk_layernorm",
)


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's fields of megatron-core's TransformerConfig.

    Raises:
        ConfigError: a name that it does not have, one that follows from the mesh, the precision or the trainer contract, or a value whose result
            would depend on the layout.
    """
    known = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    if unknown := sorted(set(options) - known):
        raise ConfigError(f"transformer_options: megatron-core's TransformerConfig has no {', '.join(unknown)}")
    if owned := sorted(set(options) & set(_OWNED)):
        raise ConfigError(f"transformer_options: {', '.join(owned)} follow from device_mesh, mixed_precision and the trainer contract; set those")
    if given := sorted(set(options) & set(_OF_CONFIG)):
        raise ConfigError(f"transformer_options: {', '.join(given)} follow from the checkpoint's config.json; another model needs another checkpoint")
    balancing = options.get("moe_router_load_balancing_type", "none")
    if balancing not in ("none", "aux_loss"):
        raise ConfigError(
            f"transformer_options: moe_router_load_balancing_type is 'none' or 'aux_loss', not {balancing!r}: the others depend on how a batch is "
            "split (with micro_batch_size=1, 'aux_loss' is a loss of each sequence)"
        )
    if options.get("moe_token_dispatcher_type", "alltoall") == "flex" and "moe_flex_dispatcher_backend" not in options:
        raise ConfigError("transformer_options: the 'flex' token dispatcher needs moe_flex_dispatcher_backend ('deepep' or 'hybridep'), and GPUs")
    if balancing == "aux_loss" and not options.get("moe_aux_loss_coeff"):
        raise ConfigError("transformer_options: moe_router_load_balancing_type='aux_loss' needs moe_aux_loss_coeff > 0")
    return dict(options)


def base_options(mesh: DeviceMesh, layers_per_stage: Sequence[int] | None) -> dict[str, Any]:
    """What follows from the mesh, the machine and the trainer contract."""
    on_cpu = mesh.device_type == "cpu"
    options: dict[str, Any] = {
        "sequence_parallel": mesh.sequence_parallel,
        # Loss functions return sums, which megatron-core then leaves alone, and gradients are summed over data ranks, not averaged.
        "calculate_per_token_loss": True,
        # Every weight comes from the checkpoint, but megatron-core 0.16.1 marks tensor-parallel weights as such only while initializing them.
        "perform_initialization": True,
        # All micro-batches of a call have one shape; see View.
        "variable_seq_lengths": False,
        # Needs apex or TransformerEngine's fused kernels.
        "gradient_accumulation_fusion": False,
    }
    if on_cpu:
        options |= {
            "use_cpu_initialization": True,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
            "persist_layer_norm": False,
            "cross_entropy_loss_fusion": False,
            # Overlapping wants streams.
            "moe_shared_expert_overlap": False,
        }
    if mesh.pp_size > 1:
        # batch_p2p_comm with virtual stages gives wrong gradients on gloo, silently: two messages to one peer are told apart by order alone.
        options |= {"batch_p2p_comm": False, "overlap_p2p_comm": mesh.vpp_size is not None}
    if layers_per_stage is not None and mesh.pp_size > 1:
        stages = [["decoder"] * number for number in layers_per_stage]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        options["pipeline_model_parallel_layout"] = stages
    return options
