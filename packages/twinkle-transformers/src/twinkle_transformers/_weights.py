"""A model's own weights on one rank, and the way to and from whole tensors."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from twinkle_train import Piece

from ._errors import CheckpointError
from ._expert_parallel import stacked_from, unstacked
from ._groups import Groups
from ._parameters import Parameters, Weight, local_part

Tensors = Iterator[tuple[str, torch.Tensor]]
_LAYER = re.compile(r"^(.*?\.\d+)\.")


class Weights(Parameters):
    """All of a model's weights on this rank.

    Args:
        model: sharded, on its device, without adapters.
        groups: of the mesh.
        experts: modules of the model whose parameters are this rank's share of the experts.
    """

    def __init__(self, model: Any, groups: Groups, experts: Iterable[nn.Module] = ()) -> None:
        self._model = model
        self._frozen = False
        expert_ids = {id(parameter) for module in experts for parameter in module.parameters()}
        # By the names that they have before there are adapters.
        self._all = [Weight.of(name, parameter, "expert" if id(parameter) in expert_ids else "dense") for name, parameter in model.named_parameters()]
        super().__init__([weight for weight in self._all if weight.parameter.requires_grad], groups)

    def freeze(self, frozen: bool) -> None:
        """Whether the trained weights want no gradients from now on. Gradients that are there stay."""
        if frozen == self._frozen:
            return
        if isinstance(self._model, FSDPModule):
            # fully_shard (torch 2.13) takes the type in which gradients are reduced from the weights that want some at the first forward, once and
            # for all: a model frozen until then would reduce in bfloat16.
            self._model._get_fsdp_state()._lazy_init()
        self.settle()
        for weight in self.trained:
            weight.parameter.requires_grad_(not frozen)
        self._frozen = frozen

    def settle(self) -> None:
        """Frees gathered copies of sharded weights: fully_shard (torch 2.13) keeps the root's after a forward without backward, and the next forward
        would run on it, whatever a step has made of the shards."""
        if isinstance(self._model, FSDPModule):
            self._model.reshard()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A forward or backward is in this context: when it does not end (an error, Ctrl-C), nothing of it is left in fully_shard."""
        try:
            yield
        except BaseException:
            if isinstance(self._model, FSDPModule) and hasattr(self._model, "reset_iter_state"):  # of torch 2.13
                self._model._get_fsdp_state()._lazy_init()
                self._model.reset_iter_state()
                for state in self._model._get_fsdp_state()._state_ctx.all_states:
                    for parameter in (each for group in state._fsdp_param_groups for each in group.fsdp_params):
                        # Not yet reduced: torch (2.13) would add the next backward's to them.
                        parameter.unsharded_accumulated_grad = None
                        if hasattr(parameter, "_unsharded_param"):
                            parameter._unsharded_param.grad = None
            raise

    # Training checkpoints.

    def pieces(self) -> Iterator[Piece]:
        """Rectangles of whole weights and buffers that this rank has; views, not copies."""
        for weight in self._all:
            yield from self.pieces_of(weight, f"model.{weight.name}", local_part(weight.parameter))
        for name, tensor in self._buffers():
            yield Piece(key=f"model.{name}", shape=tuple(tensor.shape), offset=(0,) * tensor.dim(), tensor=tensor, is_copy=self._groups.rank > 0)

    # Whole tensors. All methods are collective.

    def whole_weights(
        self, *, dtype: torch.dtype | None = None, buffers: bool = False, change: Callable[[Tensors], Tensors] | None = None
    ) -> Tensors:
        """Every weight, whole, under the name and in the form that it has in a checkpoint; a layer at a time is held in memory.

        dtype: of the parameters; None: as they are trained. buffers: those that checkpoints have, too (the routing bias of DeepSeek-V3).
        change: is given whole weights under their names in the model, as they are trained, and gives back what takes their place.
        """
        tensors: Tensors = ((weight.name, self._whole(weight, weight.parameter.detach())) for weight in self._all)
        if change is not None:
            tensors = change(tensors)
        tensors = ((name, tensor.to(dtype or tensor.dtype)) for name, tensor in tensors)
        if buffers:
            tensors = itertools.chain(tensors, self._buffers())
        return in_checkpoint_form(self._model, tensors)

    def whole_gradients(self) -> Tensors:
        """Every gradient, whole, as `whole_weights` gives the weights; zeros where there is none."""
        return in_checkpoint_form(self._model, ((weight.name, self._whole_gradient(weight)) for weight in self._all))

    def check(self, tensors: Mapping[str, torch.Tensor] | None, source: str) -> list[str]:
        """Whether whole tensors fit, as `take` gets them; gives the names of the buffers among them.

        source: where they come from.

        Raises:
            CheckpointError: a weight is not among them, or has another shape.
        """

        def compare() -> list[str]:
            assert tensors is not None, "readers have them"
            wanted: dict[str, tuple[int, ...]] = {}
            for weight in self._all:
                shape = self.whole_shape(weight)
                parts = stacked_from(self._model, weight.name, shape[0])
                wanted |= dict.fromkeys(parts, shape[1:]) if parts else {weight.name: shape}
            buffers = {name: tuple(buffer.shape) for name, buffer in self._model.named_buffers() if name in tensors}
            for name, shape in (wanted | buffers).items():
                if name not in tensors:
                    raise CheckpointError(f"{source} lacks {name}, which this model has")
                if tuple(tensors[name].shape) != shape:
                    raise CheckpointError(f"{source} has {name} of shape {tuple(tensors[name].shape)}, this model has it of shape {shape}")
            return list(buffers)

        return self._groups.from_readers(compare)

    @torch.no_grad()
    def take(self, tensors: dict[str, torch.Tensor] | None, buffers: Iterable[str]) -> None:
        """Takes this rank's part of whole tensors that `check` lets pass, one after another.

        tensors: by their names in a model that was read, emptied on the way; None on ranks that get them from rank 0. buffers: of `check`.
        """
        self.settle()
        for weight in self._all:
            self._take_weight(weight, tensors)
        here = dict(self._model.named_buffers())
        for name in buffers:
            here[name].copy_(self._received(here[name], None if tensors is None else tensors.pop(name)))

    def _take_weight(self, weight: Weight, tensors: dict[str, torch.Tensor] | None) -> None:
        shape, whole = self.whole_shape(weight), None
        if tensors is not None:
            parts = stacked_from(self._model, weight.name, shape[0])
            whole = torch.stack([tensors.pop(name) for name in parts]) if parts else tensors.pop(weight.name)
        whole = self._received(torch.empty(shape, dtype=weight.parameter.dtype, device="meta"), whole)
        if weight.kind == "expert" and self._groups.experts is not None:
            whole = whole.chunk(self._groups.experts.size())[self._groups.experts.rank()]
        local_part(weight.parameter).copy_(_shard_like(whole, weight.parameter))

    def _received(self, like: torch.Tensor, tensor: torch.Tensor | None) -> torch.Tensor:
        """A whole tensor on this rank's device: its own, or that of rank 0, of the same shape and type as another."""
        device = self._groups.device
        here = torch.empty_like(like, device=device) if tensor is None else tensor.to(device, like.dtype).contiguous()
        if self._groups.divides_weights:
            dist.broadcast(here, src=0)
        return here

    def _buffers(self) -> Tensors:
        """Those that checkpoints have."""
        for prefix, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}".lstrip("."), buffer

    def _whole_gradient(self, weight: Weight) -> torch.Tensor:
        gradient = weight.parameter.grad
        return self._whole(weight, torch.zeros_like(weight.parameter) if gradient is None else gradient)

    def _whole(self, weight: Weight, tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if weight.kind != "expert" or self._groups.experts is None:
            return whole
        parts = [torch.empty_like(whole) for _ in range(self._groups.experts.size())]
        dist.all_gather(parts, whole.contiguous(), group=self._groups.experts)
        return torch.cat(parts)


def in_checkpoint_form(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    """Tensors of a model under the names and in the form that they have in its checkpoints (experts one by one, for example), a layer at a time."""
    from transformers.core_model_loading import revert_weight_conversion

    for _, part in itertools.groupby(tensors, key=lambda item: _layer_of(item[0])):
        converted: Mapping[str, torch.Tensor] = revert_weight_conversion(model, dict(unstacked(model, part)))
        yield from converted.items()


def _layer_of(name: str) -> str:
    match = _LAYER.match(name)
    return match.group(1) if match else name


def _shard_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
