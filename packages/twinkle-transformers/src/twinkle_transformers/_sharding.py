"""FSDP2 (torch's fully_shard) over a model's layers and experts; sums, not means, of gradients."""

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ._errors import UnsupportedModelError


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded one by one: those that transformers says must not be split.

    Raises:
        UnsupportedModelError: it names none.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in classes]
    if not layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} names no modules to be sharded one by one (_no_split_modules): train it without fsdp_size"
        )
    return layers


def shard_model(model: nn.Module, mesh: TorchMesh, *, experts: Iterable[nn.Module], expert_mesh: TorchMesh, compute_dtype: torch.dtype) -> None:
    """Shards every layer, and what is left, over the ranks of a mesh, and experts over theirs.

    Args:
        model: its parameters are those of this rank (experts are divided already), in float32.
        mesh: over which the dense weights are sharded; of one rank, it only brings mixed precision.
        experts: modules whose weights are this rank's experts.
        expert_mesh: over which these are sharded.
        compute_dtype: of the weights in forward and backward; what is sharded, reduced and trained is float32.
    """
    precision = (
        MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32) if compute_dtype != torch.float32 else MixedPrecisionPolicy()
    )
    for module in experts:
        # Routing weights come in the router's type, and are to be applied in it.
        _shard(module, expert_mesh, dataclasses.replace(precision, cast_forward_inputs=False))
    for layer in decoder_layers(model):
        _shard(layer, mesh, precision)
    _shard(model, mesh, precision)


def _shard(module: nn.Module, mesh: TorchMesh, precision: MixedPrecisionPolicy) -> None:
    fully_shard(module, mesh=mesh, mp_policy=precision)
    assert isinstance(module, FSDPModule)
    # Sums over ranks: the trainer divides once, by the global weight. gloo has no average.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
