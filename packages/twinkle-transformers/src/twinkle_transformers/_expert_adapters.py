"""Low-rank adapters on experts that transformers keep as fused weights, as if each expert were linear layers of its own.

Shape suffixes: E experts, M tokens sorted by expert, R rank.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from twinkle_train import LoraConfig, peft_name

from ._errors import UnsupportedModelError
from ._expert_parallel import StackedExperts, add_to_linear, expert_blocks, experts_of
from ._groups import Groups
from ._weights import in_checkpoint_form

_FUSED = ("gate_up_proj", "up_proj", "down_proj")
# The grouped matrix multiply wants rows of a multiple of 16 bytes.
_RANK_ALIGNMENT = 4


@dataclass(frozen=True, kw_only=True)
class FusedLinear:
    """One linear layer of each expert of a layer of the model: a stretch of a fused weight's rows.

    experts: the module. parameter: the name in the model of the weight, of whose rows this is the `number`-th of `count` stretches. names: of the
    layers in the Hugging Face checkpoint, expert by expert, over all ranks. out_features, in_features: of each.
    """

    experts: Any
    parameter: str
    number: int
    count: int
    names: tuple[str, ...]
    out_features: int
    in_features: int

    @property
    def weight(self) -> str:
        """The parameter's name in the module."""
        return self.parameter.rpartition(".")[2]


def fused_linear_layers(model: Any, groups: Groups) -> tuple[list[FusedLinear], dict[str, str]]:
    """Those that adapters can be on; and, of others, the names by which they could be asked for, with the class of their experts.

    Adapters can be on what the checkpoint has expert by expert, as matrices of a linear layer.
    """
    found: list[FusedLinear] = []
    others: dict[str, str] = {}
    names = {id(module): name for name, module in model.named_modules()}
    try:
        blocks = list(expert_blocks(model))
    except UnsupportedModelError:
        return found, others
    for block in blocks:
        experts: Any = experts_of(block)
        if isinstance(experts, nn.ModuleList):
            continue  # of linear layers
        prefix, ranks = names[id(experts)], 1 if groups.experts is None else groups.experts.size()
        if isinstance(experts, StackedExperts):
            others |= {f"{prefix}.{key.removesuffix('__weight')}": type(block).__name__ for key, _ in experts.named_parameters()}
            continue
        for weight in _FUSED:
            if hasattr(experts, weight):
                parts = _parts(model, experts, f"{prefix}.{weight}", getattr(experts, weight).shape, ranks)
                found += parts
                if not parts:
                    others[f"{prefix}.{weight}"] = type(experts).__name__
    return found, others


def _parts(model: Any, experts: Any, name: str, shape: torch.Size, ranks: int) -> list[FusedLinear]:
    """What a fused weight is in the checkpoint; found by what becomes of numbers."""
    if experts.is_transposed or experts.has_bias:
        return []
    total, count = shape[0] * ranks, 2 if name.endswith(".gate_up_proj") else 1
    numbers = torch.arange(total * count, dtype=torch.float32).view(total, count, 1)
    form = list(in_checkpoint_form(model, [(name, numbers)]))
    if len(form) != total * count or any(part.numel() != 1 for _, part in form):
        return []
    by_number = {int(part.item()): key.removesuffix(".weight") for key, part in form}
    return [
        FusedLinear(
            experts=experts,
            parameter=name,
            number=number,
            count=count,
            names=tuple(by_number[expert * count + number] for expert in range(total)),
            out_features=shape[1] // count,
            in_features=shape[2],
        )
        for number in range(count)
    ]


class ExpertLora:
    """The matrices of an adapter for one linear layer of each expert, A ``[E, R, in]`` and B ``[E, out, R]``, of all ranks' experts.

    Args:
        layer: where.
        lora: the adapter's configuration.
        groups: of the mesh.
    """

    def __init__(self, layer: FusedLinear, lora: LoraConfig, groups: Groups) -> None:
        total = len(layer.names)
        self.layer, self._lora = layer, lora
        self.scaling = lora.scaling
        rank, ranks = (0, 1) if groups.experts is None else (groups.experts.rank(), groups.experts.size())
        self._mine = slice(rank * total // ranks, (rank + 1) * total // ranks)
        self.a = nn.Parameter(torch.zeros(total, lora.r, layer.in_features, device=groups.device))
        self.b = nn.Parameter(torch.zeros(total, layer.out_features, lora.r, device=groups.device))

    def matrices(self) -> Iterator[tuple[list[str], nn.Parameter]]:
        """Both, each with peft's names of its parts, expert by expert."""
        yield [peft_name(name, "A") for name in self.layer.names], self.a
        yield [peft_name(name, "B") for name in self.layer.names], self.b

    def __call__(self, inputs: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's output, ``[M, out]`` in float32."""
        from transformers.integrations.moe import _grouped_linear

        padding = -self._lora.r % _RANK_ALIGNMENT
        a, b = F.pad(self.a[self._mine], (0, 0, 0, padding)), F.pad(self.b[self._mine], (0, padding))
        inputs = F.dropout(inputs.to(a.dtype), self._lora.lora_dropout, self.layer.experts.training)
        return _grouped_linear(_grouped_linear(inputs, a, ends_E), b, ends_E) * self.scaling


def put_into_effect(active: Iterable[ExpertLora], all_experts: Iterable[Any]) -> None:
    """These and no others. all_experts: the modules that any could be on."""
    by_weight: dict[int, dict[str, list[ExpertLora | None]]] = {}
    for lora in active:
        of_weight = by_weight.setdefault(id(lora.layer.experts), {}).setdefault(lora.layer.weight, [None] * lora.layer.count)
        of_weight[lora.layer.number] = lora
    for experts in all_experts:
        add_to_linear(experts, {weight: partial(_added, parts) for weight, parts in by_weight.get(id(experts), {}).items()})


def _added(parts: list[ExpertLora | None], inputs: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    width = next(part.layer.out_features for part in parts if part is not None)
    none = inputs.new_zeros(len(inputs), width, dtype=torch.float32)
    return torch.cat([none if part is None else part(inputs, ends_E) for part in parts], -1)


def merged(whole: torch.Tensor, loras: Iterable[ExpertLora]) -> torch.Tensor:
    """A whole fused weight with the products of an adapter's matrices added, in float32."""
    result = whole.float().clone()
    for lora in loras:
        size = lora.layer.out_features
        result[:, lora.layer.number * size :][:, :size] += torch.bmm(lora.b.detach(), lora.a.detach()) * lora.scaling
    return result.to(whole.dtype)
