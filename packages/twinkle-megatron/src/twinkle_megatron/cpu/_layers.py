"""Layers with TransformerEngine's names and parameter names, made of megatron-core's own torch layers.

Hugging Face bridges and megatron-core's layer specs expect TransformerEngine's layout: the norm before a column-parallel linear layer is
fused into it, as ``layer_norm_weight``. TransformerEngine does not run without a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint


class CpuNorm:
    """Builds a torch norm whose gradients megatron-core sums over the tensor-parallel group under sequence parallelism.

    megatron-core's ``WrappedTorchNorm`` refuses sequence parallelism; what is missing is only the mark on the parameters.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object) -> torch.nn.Module:  # type: ignore[misc]
        del unused
        _refuse_zero_centered(config)
        norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        return norm


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm followed by a column-parallel linear layer, with TransformerEngine's parameter names.

    The norm runs on this rank's part of the sequence.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, init_method: Callable[..., Any], **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, init_method=init_method, **options)
        _refuse_zero_centered(config)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_bias = None
        if config.normalization != "RMSNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))
            self.layer_norm_bias.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns what ``ColumnParallelLinear`` returns for the normed input."""
        shape = (input_.shape[-1],)
        if self.layer_norm_bias is None:
            normed = torch.nn.functional.rms_norm(input_, shape, self.layer_norm_weight, self.eps)
        else:
            normed = torch.nn.functional.layer_norm(input_, shape, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        return super().forward(normed, *args, **kwargs)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None) -> Any:
        """As ``ColumnParallelLinear``; the norm's parameters are replicated over the tensor-parallel group."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,  # pyright: ignore[reportArgumentType]
            dp_cp_group=metadata["dp_cp_group"],
        )


class ReplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds whole (``TELinear`` with ``parallel_mode="duplicated"``).

    Under sequence parallelism each rank applies it to its part of the sequence, so that its gradients are summed over the group.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool = False,
        **unused: object,
    ) -> None:
        super().__init__()
        del unused
        if parallel_mode != "duplicated" or bias:
            raise NotImplementedError(f"TELinear(parallel_mode={parallel_mode!r}, bias={bias}) is not supported on the CPU platform")
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns the output and no bias, as TransformerEngine's layers do."""
        return torch.nn.functional.linear(input_, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None) -> Any:
        """The weight, replicated over the tensor-parallel group."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, sharded_offsets=sharded_offsets, dp_cp_group=metadata["dp_cp_group"]
        )


def _refuse_zero_centered(config: TransformerConfig) -> None:
    if config.layernorm_zero_centered_gamma:
        raise NotImplementedError("layernorm_zero_centered_gamma is not supported on the CPU platform")
