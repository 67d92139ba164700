"""Grouped linear layers of a mixture of experts, under TransformerEngine's names: a loop over the experts of this rank."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class CpuGroupedLinear(torch.nn.Module):
    """One weight an expert (``weight0`` ... as in TransformerEngine's GroupedLinear), split over the expert-tensor-parallel group.

    ``partition_dim`` is 0 in a column-parallel layer (output features are split), 1 in a row-parallel one.
    """

    partition_dim = 0

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool = False,
        skip_bias_add: bool = False,
        is_expert: bool = True,
        tp_comm_buffer_name: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        del skip_bias_add, is_expert, tp_comm_buffer_name
        if bias:
            raise NotImplementedError("biases in experts are not supported on the CPU platform")
        self.num_gemms = num_gemms
        shards = pg_collection.expt_tp.size()
        shape = (output_size // shards, input_size) if self.partition_dim == 0 else (output_size, input_size // shards)
        for expert in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(weight)
            # Gradients of experts are reduced over the expert-data-parallel group when experts are spread over ranks.
            weight.allreduce = pg_collection.ep.size() == 1  # pyright: ignore[reportAttributeAccessIssue]
            weight.tensor_model_parallel = True  # pyright: ignore[reportAttributeAccessIssue]
            weight.partition_dim = self.partition_dim  # pyright: ignore[reportAttributeAccessIssue]
            weight.partition_stride = 1  # pyright: ignore[reportAttributeAccessIssue]
            setattr(self, f"weight{expert}", weight)

    def forward(self, tokens: torch.Tensor, tokens_per_expert: list[int]) -> tuple[torch.Tensor, None]:
        """Applies each expert to its run of tokens: ``[sum(tokens_per_expert), input]`` to ``[..., output]``."""
        parts = torch.split(tokens, tokens_per_expert)
        outputs = [torch.nn.functional.linear(part, getattr(self, f"weight{expert}")) for expert, part in enumerate(parts)]
        return torch.cat(outputs), None


class CpuColumnParallelGroupedLinear(CpuGroupedLinear):
    """Splits the output features of every expert."""

    partition_dim = 0


class CpuRowParallelGroupedLinear(CpuGroupedLinear):
    """Splits the input features of every expert."""

    partition_dim = 1
