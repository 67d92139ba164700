"""Expert parallelism: each rank has some of a layer's experts, and tokens travel to the experts that their router chose (arXiv:2006.16668).

Four stages: `preprocess` counts, `pre_all2all` sends tokens, `local_experts` computes, `post_all2all` brings results back and weighs them.
A model's routers, shared experts and whatever else is in its blocks stay its own.

Shape suffixes: T tokens of this rank, K experts a token, H hidden size, E experts, M tokens that came to this rank's experts.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from twinkle_train import ConfigError

from ._collectives import all_to_all
from ._errors import LayoutError, UnsupportedModelError
from ._order import copies_in_order, inverse_of

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of the largest output, in float32: far above rounding, far below what another routing does.
_TOLERANCE = 1e-4
# Between parts of a name where a dot cannot be.
_DOT = "__"


@dataclass(frozen=True, kw_only=True)
class ExpertParallelConfig:
    """How experts are divided.

    enabled: False is an error on a mesh that divides them. router_dtype: 'fp32', 'bf16' or 'fp16'; the router's product, and the routing
    weights when they are applied. keep_router_logits: keep those of the last forward, with their graph, for `router_logits`.
    ignore_shared_experts: leave shared experts out. ep_size: None, or what the mesh must have.

    Raises ConfigError for an unknown router_dtype or a size below 1.
    """

    enabled: bool = True
    router_dtype: str = "fp32"
    keep_router_logits: bool = True
    ignore_shared_experts: bool = False
    ep_size: int | None = None

    def __post_init__(self) -> None:
        if self.router_dtype not in _DTYPES:
            raise ConfigError(f"router_dtype is {', '.join(map(repr, _DTYPES))}, not {self.router_dtype!r}")
        if self.ep_size is not None and self.ep_size < 1:
            raise ConfigError(f"ep_size must be >= 1 or None, got {self.ep_size}")


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Where the tokens of one layer go.

    order: the T * K choices sorted by expert; inverse: where each of them is among the sorted. send, receive: how many go to, and come from, each
    rank. expert_ids_M: which of this rank's experts each token that comes is for. in_order: whether these are sorted.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    send: Sequence[int]
    receive: Sequence[int]
    expert_ids_M: torch.Tensor
    in_order: bool


class StackedExperts(nn.Module):
    """The experts of a ModuleList as one module, each parameter stacked over them, so that it is divided, sharded and gathered as fused experts are.

    Raises:
        UnsupportedModelError: experts that differ in their parameters, or have buffers.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        assert isinstance(experts, nn.ModuleList)
        first, name = experts[0], type(experts[0]).__name__
        shapes = [{key: parameter.shape for key, parameter in expert.named_parameters()} for expert in experts]
        if any(each != shapes[0] for each in shapes) or any(True for _ in experts.buffers()):
            raise UnsupportedModelError(f"experts of {name} differ in their parameters, or have buffers: they cannot be divided")
        self.num_experts = len(experts)
        for key, parameter in first.named_parameters():
            stacked = torch.stack([expert.get_parameter(key).detach() for expert in experts])
            self.register_parameter(key.replace(".", _DOT), nn.Parameter(stacked, requires_grad=parameter.requires_grad))
        # In a list: it is no module of the model, and its own weights are not used.
        self._template = [copy.deepcopy(first).to("meta")]

    def one_by_one(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Each expert of this rank."""
        template = self._template[0].train(self.training)
        for index in range(self.num_experts):
            weights = {key.replace(_DOT, "."): parameter[index] for key, parameter in self.named_parameters()}
            yield partial(torch.func.functional_call, template, weights)


def unstacked(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by their names in a model, those of `StackedExperts` as its checkpoints have them: expert by expert."""
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, StackedExperts))
    for name, tensor in tensors:
        if not name.startswith(prefixes or ("\0",)):
            yield name, tensor
            continue
        prefix, _, rest = name.rpartition(".")
        for index, part in enumerate(tensor):
            yield f"{prefix}.{index}.{rest.replace(_DOT, '.')}", part


def stacked_from(model: nn.Module, name: str, num_experts: int) -> list[str]:
    """The other way: which weights of a checkpoint's model, one after another, a weight of `StackedExperts` is; nothing for any other weight.

    num_experts: of all ranks.
    """
    prefix, _, key = name.rpartition(".")
    if not isinstance(model.get_submodule(prefix), StackedExperts):
        return []
    return [f"{prefix}.{index}.{key.replace(_DOT, '.')}" for index in range(num_experts)]


def preprocess(top_k_index_TK: torch.Tensor, num_experts: int, group: Any) -> Dispatch:
    """Stage 1: counts how many tokens go to each expert of each rank, and exchanges the counts. Collective.

    top_k_index_TK: the experts chosen for each token, 0 to num_experts - 1. group: the ranks that hold them, equally many each, in order;
    None: only this one.
    """
    chosen = top_k_index_TK.flatten()
    sorted_ids, order = torch.sort(chosen, stable=True)
    if group is None:
        return Dispatch(order=order, inverse=inverse_of(order), send=(), receive=(), expert_ids_M=sorted_ids, in_order=True)
    ranks = group.size()
    sent_RE = torch.bincount(chosen, minlength=num_experts).view(ranks, -1)
    came_RE = torch.empty_like(sent_RE)
    dist.all_to_all_single(came_RE, sent_RE, group=group)
    local = torch.arange(num_experts // ranks, device=chosen.device).repeat(ranks)
    return Dispatch(
        order=order,
        inverse=inverse_of(order),
        send=sent_RE.sum(1).tolist(),
        receive=came_RE.sum(1).tolist(),
        expert_ids_M=local.repeat_interleave(came_RE.flatten()),
        in_order=ranks == num_experts,  # one expert a rank
    )


def pre_all2all(hidden_TH: torch.Tensor, dispatch: Dispatch, num_choices: int, group: Any) -> torch.Tensor:
    """Stage 2: sends each token to the ranks of its `num_choices` experts; gives what came, ``[M, H]``, rank by rank, each by expert."""
    sorted_tokens = copies_in_order(hidden_TH, num_choices, dispatch.order, dispatch.inverse)
    return sorted_tokens if group is None else all_to_all(sorted_tokens, dispatch.receive, dispatch.send, group)


def local_experts(experts: nn.Module, tokens_MH: torch.Tensor, expert_ids_M: torch.Tensor, *, in_order: bool = False) -> torch.Tensor:
    """Stage 3: each token through its expert of this rank, ``[M, H]``, unweighed.

    Fused experts by grouped matrix multiply; those of a ModuleList one expert after another. A rank without tokens computes a row of
    zeros for nobody, so that it takes part in what backward exchanges. in_order: tokens are sorted by expert.
    """
    if len(tokens_MH) == 0:
        zero = tokens_MH.sum(0, keepdim=True)
        return local_experts(experts, zero, torch.zeros(1, dtype=torch.long, device=zero.device))[:0]
    if not in_order:
        sorted_ids, order = torch.sort(expert_ids_M, stable=True)
        inverse = inverse_of(order)
        out_MH = local_experts(experts, copies_in_order(tokens_MH, 1, order, inverse), sorted_ids, in_order=True)
        return copies_in_order(out_MH, 1, inverse, order)
    counts = torch.bincount(expert_ids_M, minlength=_num_experts(experts))
    if isinstance(experts, (nn.ModuleList, StackedExperts)):
        one_by_one = experts if isinstance(experts, nn.ModuleList) else experts.one_by_one()
        return torch.cat([expert(part) for expert, part in zip(one_by_one, tokens_MH.split(counts.tolist()), strict=True)])
    return _fused(experts, tokens_MH, expert_ids_M, counts.cumsum(0, dtype=torch.int32))


def _fused(experts: Any, tokens_MH: torch.Tensor, expert_ids_M: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Fused experts, of transformers' experts interface, on tokens sorted by expert. ends_E: where those of each expert end."""
    from transformers.integrations.moe import _grouped_linear

    added = getattr(experts, "_twinkle_added", {})  # by adapters

    def linear(name: str, inputs: torch.Tensor) -> torch.Tensor:
        bias = getattr(experts, f"{name}_bias")[expert_ids_M] if experts.has_bias else None
        out = _grouped_linear(inputs, getattr(experts, name), ends_E, bias=bias, is_transposed=experts.is_transposed)
        return out if name not in added else out + added[name](inputs, ends_E).to(out.dtype)

    inner = experts._apply_gate(linear("gate_up_proj", tokens_MH)) if experts.has_gate else experts.act_fn(linear("up_proj", tokens_MH))
    return linear("down_proj", inner)


def post_all2all(out_MH: torch.Tensor, dispatch: Dispatch, weights_TK: torch.Tensor, dtype: torch.dtype, group: Any) -> torch.Tensor:
    """Stage 4: results back to the ranks of their tokens, and there the sum over a token's experts, weighed in `dtype`; gives ``[T, H]``."""
    back = out_MH if group is None else all_to_all(out_MH, dispatch.send, dispatch.receive, group)
    choices_TKH = copies_in_order(back, 1, dispatch.inverse, dispatch.order).view(*weights_TK.shape, -1)
    return (choices_TKH.to(dtype) * weights_TK.to(dtype)[..., None]).sum(1).to(out_MH.dtype)


def shard_experts(block: nn.Module, rank: int, ranks: int) -> None:
    """Keeps this rank's share of a block's experts, in order and equally many on each rank, and forgets the others.

    Raises:
        UnsupportedModelError: the block's experts are of no known kind. LayoutError: their number does not divide.
    """
    experts, name = experts_of(block), type(block).__name__
    total = _num_experts(experts)
    if total % ranks:
        raise LayoutError(f"ep_size={ranks} does not divide the {total} experts of {name}")
    share = slice(rank * total // ranks, (rank + 1) * total // ranks)
    if isinstance(experts, nn.ModuleList):
        block.experts = experts[share]
        return
    for parameter_name, parameter in list(experts.named_parameters(recurse=False)):
        if parameter.shape[0] != total:
            raise UnsupportedModelError(f"{type(experts).__name__}.{parameter_name} {tuple(parameter.shape)} has no axis of {total} experts first")
        part = nn.Parameter(parameter.detach()[share].clone(), requires_grad=parameter.requires_grad)
        setattr(experts, parameter_name, part)
    experts.num_experts = total // ranks  # pyright: ignore[reportArgumentType]


def patch_forward(block: nn.Module, config: ExpertParallelConfig, group: Any, num_experts: int) -> None:
    """Makes a block, of which `shard_experts` has kept a share, send tokens to the ranks of a group; None: all experts are here.

    num_experts: of all ranks.
    """
    experts, dtype = experts_of(block), _DTYPES[config.router_dtype]
    _patch_router(block, config)
    if config.ignore_shared_experts:
        for name in ("shared_expert", "shared_experts"):
            if isinstance(shared := getattr(block, name, None), nn.Module):
                shared.forward = torch.zeros_like

    def route(hidden_TH: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return _through_stages(experts, hidden_TH, top_k_index, top_k_weights, num_experts, dtype, group)

    experts.forward = route
    if isinstance(experts, (nn.ModuleList, StackedExperts)):
        block.forward = _module_list_forward(block, returns_logits=bool(getattr(block, "_twinkle_returns_logits", False)))


def add_to_linear(experts: Any, added: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]) -> None:
    """From now on adds something to what the fused weights of experts give.

    added: by the name of the weight, what is called with the tokens, sorted by expert, and where those of each expert end.
    """
    experts._twinkle_added = dict(added)
    if not added or "forward" in experts.__dict__:
        return
    own_forward = experts.forward

    def forward(hidden_TH: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        if not experts._twinkle_added:
            return own_forward(hidden_TH, top_k_index, top_k_weights)
        dtype = torch.promote_types(hidden_TH.dtype, top_k_weights.dtype)
        return _through_stages(experts, hidden_TH, top_k_index, top_k_weights, experts.num_experts, dtype, None)

    experts.forward = forward


def _through_stages(
    experts: nn.Module, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int, dtype: torch.dtype, group: Any
) -> torch.Tensor:
    dispatch = preprocess(index_TK, num_experts, group)
    came_MH = pre_all2all(hidden_TH, dispatch, index_TK.shape[-1], group)
    out_MH = local_experts(experts, came_MH, dispatch.expert_ids_M, in_order=dispatch.in_order)
    return post_all2all(out_MH, dispatch, weights_TK, dtype, group)


def apply_expert_parallel(model: nn.Module, group: Any, config: ExpertParallelConfig | None = None) -> list[nn.Module]:
    """Divides the experts of every block of a model over the ranks of a group.

    The model must be whole, in float32 on the CPU, and alike on all ranks. Each kind of block is first compared with itself before, on random
    tokens, so that one that routes in a way not known here is found out.

    Args:
        model: of transformers, or any with blocks that have a `gate` or `router` and `experts`, fused or a ModuleList.
        group: of torch.distributed; None: only this rank (nothing is divided).
        config: see ExpertParallelConfig.

    Returns:
        the modules whose parameters are this rank's experts. Gradients of these are whole already, for the tokens of all ranks of the group;
        those of all other weights are of this rank's tokens.

    Raises:
        ConfigError: enabled is False. LayoutError: ep_size is another, or does not divide the experts.
        UnsupportedModelError: there are no experts, or a block is not understood; names its class.
    """
    return divide_experts(model, group, config, understood_blocks(model), stack=False)


def understood_blocks(model: nn.Module) -> dict[str, bool]:
    """A model's kinds of blocks of experts, by class, and whether they return their router's logits beside their output.

    model: whole, in float32 on the CPU.

    Raises:
        UnsupportedModelError: a block that routes tokens in a way not known here; names its class.
    """
    kinds: dict[str, bool] = {}
    for block in expert_blocks(model):
        name = type(block).__name__
        if name not in kinds:
            _check_understood(block, _num_experts(experts_of(block)))
            kinds[name] = _returns_logits(block)
    return kinds


def divide_experts(model: nn.Module, group: Any, config: ExpertParallelConfig | None, kinds: Mapping[str, bool], *, stack: bool) -> list[nn.Module]:
    """`apply_expert_parallel` on a model whose values may not be there yet.

    kinds: of `understood_blocks`. stack: experts of a ModuleList become `StackedExperts`, whose weights are divided as fused ones are.
    """
    config = config or ExpertParallelConfig(keep_router_logits=False)
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    if not config.enabled:
        raise ConfigError("expert parallelism is not enabled, but the mesh divides experts: leave ep_size and ep_fsdp_size out")
    if config.ep_size is not None and config.ep_size != ranks:
        raise LayoutError(f"ExpertParallelConfig has ep_size={config.ep_size}, the mesh has {ranks}")
    blocks = list(expert_blocks(model))
    if not blocks:
        raise UnsupportedModelError(f"{type(model).__name__} has no experts to divide: leave ep_size and ExpertParallelConfig out")
    for block in blocks:
        total = _num_experts(experts_of(block))
        if isinstance(experts_of(block), nn.ModuleList):
            block._twinkle_returns_logits = kinds[type(block).__name__]  # pyright: ignore[reportArgumentType]
            if stack:
                block.experts = StackedExperts(experts_of(block))
        shard_experts(block, rank, ranks)
        patch_forward(block, config, group, total)
    return [experts_of(block) for block in blocks]


def expert_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that have `experts`.

    Raises:
        UnsupportedModelError: one has them in a form that is not known.
    """
    for module in model.modules():
        if isinstance(getattr(module, "experts", None), nn.Module):
            experts_of(module)
            router_of(module)
            yield module


def experts_of(block: nn.Module) -> nn.Module:
    """A block's experts: a ModuleList, or fused weights that are called with tokens, chosen experts and routing weights."""
    experts: Any = block.experts
    if isinstance(experts, (nn.ModuleList, StackedExperts)):
        return experts
    fused = all(hasattr(experts, name) for name in ("num_experts", "has_gate", "has_bias", "is_transposed", "down_proj"))
    if not fused or len(inspect.signature(type(experts).forward).parameters) != 4:
        raise UnsupportedModelError(
            f"{type(block).__name__} has experts of {type(experts).__name__}, which is neither a ModuleList nor called as "
            "experts(hidden_states, top_k_index, top_k_weights) through transformers' experts interface"
        )
    return experts


def router_logits(model: nn.Module) -> list[torch.Tensor]:
    """Those of the last forward, block by block, ``[T, E]`` of this rank's tokens, with their graph; where keep_router_logits was set."""
    return [module._twinkle_router_logits for module in model.modules() if hasattr(module, "_twinkle_router_logits")]  # pyright: ignore[reportReturnType]


def _num_experts(experts: nn.Module) -> int:
    return len(experts) if isinstance(experts, nn.ModuleList) else int(experts.num_experts)  # pyright: ignore[reportArgumentType]


def router_of(block: nn.Module) -> nn.Module:
    """A block's gate or router; UnsupportedModelError when it has neither."""
    for name in ("gate", "router"):
        if isinstance(router := getattr(block, name, None), nn.Module):
            return router
    raise UnsupportedModelError(f"{type(block).__name__} has experts, but neither a gate nor a router")


def logits_of(out: Any) -> torch.Tensor:
    """A router's logits among what it returns: first, or, behind the chosen experts and their weights, last."""
    if isinstance(out, torch.Tensor):
        return out
    return out[0] if out[0].is_floating_point() else out[-1]


def _patch_router(block: nn.Module, config: ExpertParallelConfig) -> None:
    """Runs the router in the stated type, whatever type its weights are gathered in, and keeps its logits if asked."""
    router, dtype = router_of(block), _DTYPES[config.router_dtype]
    own_forward, inside = router.forward, False

    def forward(*inputs: Any) -> Any:
        nonlocal inside
        if inside:
            return own_forward(*inputs)
        parameters = {name: parameter.to(dtype) for name, parameter in router.named_parameters()}
        inside = True
        try:
            out = torch.func.functional_call(router, parameters, tuple(_cast(value, dtype) for value in inputs))
        finally:
            inside = False
        if config.keep_router_logits:
            router._twinkle_router_logits = logits_of(out)  # pyright: ignore[reportArgumentType]
        return out

    router.forward = forward


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _module_list_forward(block: nn.Module, *, returns_logits: bool) -> Callable[..., Any]:
    """The forward of a block that loops over a ModuleList: softmax, the largest, normalized unless norm_topk_prob says no, and shared experts."""
    attributes: Any = block

    def forward(hidden: torch.Tensor) -> Any:
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        logits_TE = router_of(block)(hidden_TH)
        weights_TK, index_TK = torch.topk(logits_TE.float().softmax(-1), attributes.top_k, dim=-1)
        if getattr(block, "norm_topk_prob", True):
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        out_TH = experts_of(block)(hidden_TH, index_TK, weights_TK)
        for name in ("shared_expert", "shared_experts"):
            if isinstance(shared := getattr(block, name, None), nn.Module):
                gate = getattr(block, f"{name}_gate", None)
                out_TH = out_TH + shared(hidden_TH) * (1.0 if gate is None else torch.sigmoid(gate(hidden_TH)))
        out = out_TH.view(hidden.shape)
        return (out, logits_TE) if returns_logits else out

    return forward


def _check_understood(block: nn.Module, num_experts: int) -> None:
    """UnsupportedModelError unless the four stages, on this rank alone, give what the block itself gives."""
    experts = experts_of(block)
    if isinstance(experts, nn.ModuleList) and (not isinstance(router_of(block), nn.Linear) or not hasattr(block, "top_k")):
        raise UnsupportedModelError(f"{type(block).__name__} has a ModuleList of experts, but no linear gate or no top_k: how it routes is not known")
    want = _output(block)
    kept = [(module, module.__dict__.get("forward")) for module in (block, experts, router_of(block))]
    try:
        patch_forward(block, ExpertParallelConfig(keep_router_logits=False), None, num_experts)
        have = _output(block)
    finally:
        for module, forward in kept:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.forward = forward
    if not (have - want).abs().max() <= _TOLERANCE * want.abs().max():
        raise UnsupportedModelError(f"{type(block).__name__} routes tokens in a way that is not known: its own output is another")


@torch.no_grad()
def _output(block: nn.Module) -> torch.Tensor:
    out = _run(block)
    return out[0] if isinstance(out, tuple) else out


@torch.no_grad()
def _returns_logits(block: nn.Module) -> bool:
    return isinstance(_run(block), tuple)


def _run(block: nn.Module) -> Any:
    """The block on a few tokens, the same every time and everywhere."""
    parameter = next(block.parameters())
    hidden_size = next(router_of(block).parameters()).shape[-1]
    tokens = torch.randn(1, 16, hidden_size, generator=torch.Generator().manual_seed(0)).to(parameter)
    # Hash routing (DeepSeek-V4) looks at the tokens themselves.
    named = {"input_ids": torch.arange(16)[None]} if "input_ids" in inspect.signature(block.forward).parameters else {}
    training = block.training
    block.eval()
    try:
        return block(tokens, **named)
    finally:
        block.train(training)
