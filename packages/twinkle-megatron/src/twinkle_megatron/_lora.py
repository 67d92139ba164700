"""Low-rank adapters (LoRA, arXiv:2106.09685) beside megatron-core's linear layers. Imported only once the platform is chosen.

A layer's own computation is left alone: a hook adds B(A(x)) to what it returns. Between the two matrices there are `r` numbers a token, and that is
where ranks communicate, whatever the layout:

| the layer is | A | between | B |
|---|---|---|---|
| column-parallel | whole, on this rank's tokens | sequence gathered (or, without sequence parallelism, gradients summed) | its output rows |
| row-parallel | its input columns | summed, and the sequence scattered with sequence parallelism | whole |
| held whole | whole | | whole |
| experts, column-parallel | some of the `r` rows | gathered | its output rows |
| experts, row-parallel | its input columns | summed and scattered over `r` | some of the `r` columns: outputs are summed later |

Shape suffixes: none; inputs are [..., features].
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

from twinkle_train import LoraConfig

from ._lora_plan import LinearLayer, Matrix


class Beside(torch.nn.Module):
    """What one adapter adds to one of megatron-core's layers.

    Args:
        matrices: this rank's parts of A and B by Hugging Face layer (:class:`LinearLayer`): one pair, or one for each of the fused layers that the
            adapter is on.
        num_experts: on this rank; 1 for dense layers.
    """

    def __init__(
        self,
        matrices: Mapping[Matrix, torch.Tensor],
        *,
        lora: LoraConfig,
        config: Any,
        num_experts: int,
    ) -> None:
        super().__init__()
        self._layers: list[LinearLayer] = list(dict.fromkeys(matrix.layer for matrix in matrices))
        first = self._layers[0]
        self._split, self._is_expert, self._num_experts = first.split, first.is_expert, num_experts
        self._num_parts = first.num_parts
        self._scaling, self._dropout = lora.scaling, lora.lora_dropout
        self._sequence_parallel = bool(config.sequence_parallel)
        self._group: Any = _group(first)
        self._groups = first.groups if first.groups == 1 else first.groups // self._group.size()
        self.matrices = torch.nn.ParameterDict()
        for matrix, value in matrices.items():
            self.matrices[f"{matrix.letter}{matrix.layer.part}"] = self._parameter(matrix, value, config)

    def _parameter(self, matrix: Matrix, value: torch.Tensor, config: Any) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(value)
        marks: Any = parameter
        # megatron-core's marks: which ranks hold the same, over which gradients are summed, and which count for the norm.
        marks.allreduce = not self._is_expert or config.expert_model_parallel_size == 1
        if self._is_expert or matrix.split_axis is not None:
            marks.tensor_model_parallel, marks.partition_dim, marks.partition_stride = True, matrix.split_axis or 0, 1
        else:
            # With sequence parallelism each rank sees other tokens.
            marks.sequence_parallel = self._sequence_parallel
        return parameter

    def forward(self, inputs: torch.Tensor, tokens_per_expert: Sequence[int] | None, widths: "Widths", *, training: bool) -> torch.Tensor:
        """What is to be added to the layer's output."""
        low = torch.cat([self._times(self._dropped(inputs, training), f"A{layer.part}", tokens_per_expert) for layer in self._layers], -1)
        low = self._between(low)
        ups: dict[int, torch.Tensor] = {}
        for layer, part in zip(self._layers, low.split(low.shape[-1] // len(self._layers), -1), strict=True):
            ups[layer.part] = self._times(part, f"B{layer.part}", tokens_per_expert) * self._scaling
        return self._fused(ups, widths)

    def _times(self, inputs: torch.Tensor, name: str, tokens_per_expert: Sequence[int] | None) -> torch.Tensor:
        weight = self.matrices[name]
        if tokens_per_expert is None:
            return F.linear(inputs, weight)
        runs = zip(inputs.split(list(tokens_per_expert)), weight.chunk(self._num_experts), strict=True)
        return torch.cat([F.linear(tokens, of_one) for tokens, of_one in runs])

    def _between(self, low: torch.Tensor) -> torch.Tensor:
        group = self._group
        if group.size() == 1 or self._split is None:
            return low
        if self._is_expert:
            # All ranks of the group have the same tokens, so that none leaves the others waiting.
            if not len(low):
                ratio = group.size() if self._split == "column" else 1 / group.size()
                return low.new_zeros(0, int(low.shape[-1] * ratio))
            parts = low.split(low.shape[-1] // len(self._layers), -1)
            if self._split == "column":
                return torch.cat([mappings.all_gather_last_dim_from_tensor_parallel_region(part, group) for part in parts], -1)
            return torch.cat([mappings.reduce_scatter_last_dim_to_tensor_parallel_region(part, group) for part in parts], -1)
        if self._split == "column":
            if self._sequence_parallel:
                return mappings.gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=group)
            return mappings.copy_to_tensor_model_parallel_region(low, group)
        if self._sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(low, group)
        return mappings.reduce_from_tensor_model_parallel_region(low, group)

    def _fused(self, ups: Mapping[int, torch.Tensor], widths: "Widths") -> torch.Tensor:
        """The parts in the order in which the layer has its output features; zeros for those that the adapter is not on."""
        if self._num_parts == 1:
            return ups[0]
        like = next(iter(ups.values()))
        parts = [
            (ups[part] if part in ups else like.new_zeros(*like.shape[:-1], widths[part])).unflatten(-1, (self._groups, -1))
            for part in range(self._num_parts)
        ]
        return torch.cat(parts, -1).flatten(-2)

    def _dropped(self, inputs: torch.Tensor, training: bool) -> torch.Tensor:
        if not self._dropout or not training:
            return inputs
        with self._generator():
            return F.dropout(inputs, self._dropout)

    def _generator(self) -> contextlib.AbstractContextManager[Any]:
        """Inputs that ranks have in common lose the same numbers on all of them; others lose others."""
        tracker: Any = get_cuda_rng_tracker()
        if self._is_expert:
            return tracker.fork(get_expert_parallel_rng_tracker_name()) if self._split == "row" else contextlib.nullcontext()
        return tracker.fork() if self._split == "row" or self._sequence_parallel else contextlib.nullcontext()


Widths = Mapping[int, int]


class Site:
    """One of megatron-core's layers and what adapters add to it; at most one adapter at a time.

    Args:
        module: the layer.
        widths: how many of its output features on this rank belong to each part.
    """

    def __init__(self, module: torch.nn.Module, widths: Widths) -> None:
        self.active: Beside | None = None
        self._widths = widths
        module.register_forward_hook(self._add)

    def _add(self, module: Any, arguments: tuple[Any, ...], output: Any) -> Any:
        if self.active is None:
            return None
        inputs, *rest = arguments
        added = self.active(_normed(module, inputs), rest[0] if rest else None, self._widths, training=module.training)
        first, *others = output
        return (first + added, *others)


def _normed(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """What the matrix product of a layer sees: in a fused norm and linear layer the input is not yet normed."""
    weight = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return inputs
    if getattr(module, "zero_centered_gamma", False):
        weight = weight + 1
    bias = getattr(module, "layer_norm_bias", None)
    if bias is None:
        return F.rms_norm(inputs, (inputs.shape[-1],), weight, module.eps)
    return F.layer_norm(inputs, (inputs.shape[-1],), weight, bias, module.eps)


def _group(layer: LinearLayer) -> Any:
    if layer.is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def make_sites(chunks: Sequence[Any], layers: Sequence[LinearLayer]) -> dict[tuple[int, str], Site]:
    """A site for each of this rank's layers that an adapter may be on, by chunk and module."""
    widths: dict[tuple[int, str], dict[int, int]] = {}
    for layer in layers:
        size = _group(layer).size() if layer.split == "column" else 1
        widths.setdefault((layer.chunk, layer.module), {})[layer.part] = layer.out_features // size
    return {(chunk, name): Site(chunks[chunk].get_submodule(name), of_parts) for (chunk, name), of_parts in widths.items()}


class AdapterChunk(torch.nn.Module):
    """An adapter's matrices beside one of this rank's model chunks; what megatron-core's buffers and optimizers take for a model."""

    pre_process = True
    share_embeddings_and_output_weights = False

    def __init__(self, config: Any, besides: Mapping[str, Beside]) -> None:
        super().__init__()
        self.config = config
        self.besides = torch.nn.ModuleList(besides.values())
        self._names = list(besides)

    def items(self) -> Iterator[tuple[str, Beside]]:
        """What is beside which module."""
        for name, beside in zip(self._names, self.besides, strict=True):
            assert isinstance(beside, Beside)
            yield name, beside
