"""Puts the CPU layers where megatron-core looks for TransformerEngine's."""

from typing import Any

import megatron.core.extensions.transformer_engine as te_layers
import megatron.core.models.gpt.gpt_layer_specs as gpt_specs
import megatron.core.transformer.multi_latent_attention as latent_attention
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from ._attention import CpuCoreAttention
from ._experts import CpuColumnParallelGroupedLinear, CpuGroupedLinear, CpuRowParallelGroupedLinear
from ._layers import CpuNorm, LayerNormColumnParallelLinear, ReplicatedLinear


class CpuSpecProvider(LocalSpecProvider):
    """What a transformer layer is made of on a CPU, in the shape of megatron-core's ``TESpecProvider``."""

    def linear(self) -> type:
        """The replicated linear layer."""
        return ReplicatedLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """The norm is part of the linear layer after it."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """The fused norm and linear layer."""
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """The norm where it is not fused."""
        del rms_norm, for_qk
        return CpuNorm

    def core_attention(self) -> type:
        """Attention between the projections."""
        return CpuCoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> tuple[type, Any]:
        """The experts and their layers."""
        if moe_use_grouped_gemm and not moe_use_legacy_grouped_gemm:
            return TEGroupedMLP, MLPSubmodules(linear_fc1=CpuColumnParallelGroupedLinear, linear_fc2=CpuRowParallelGroupedLinear)
        return SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

    def activation_func(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """None: the activation named in the config."""


def install() -> None:
    """Replaces TransformerEngine's names in megatron-core's modules of this process."""
    replacements: dict[str, object] = {
        "TELinear": ReplicatedLinear,
        "TENorm": CpuNorm,
        "TEDotProductAttention": CpuCoreAttention,
        "TELayerNormColumnParallelLinear": LayerNormColumnParallelLinear,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
        "TEGroupedLinear": CpuGroupedLinear,
        "TEColumnParallelGroupedLinear": CpuColumnParallelGroupedLinear,
        "TERowParallelGroupedLinear": CpuRowParallelGroupedLinear,
    }
    for name, replacement in replacements.items():
        setattr(te_layers, name, replacement)
    # Latent attention asks which layer it got, by the name that it imported.
    latent_attention.TELinear = ReplicatedLinear
    # The specs read these three when they build a model with use_transformer_engine=True.
    gpt_specs.TESpecProvider = CpuSpecProvider
    gpt_specs.TENorm = CpuNorm
    gpt_specs.HAVE_TE = True
