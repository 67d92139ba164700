"""Gated DeltaNet layers (Qwen3-Next, Qwen3.5) that keep the sequences of a packed row apart, and whose sequences can be divided over ranks.

transformers' own layers (5.19) run convolution and recurrence over whole rows on a CPU, whatever sequences are in them. Here both begin anew in
each sequence. Where rows are divided, each rank computes some of the heads for all columns (as Ulysses does, arXiv:2309.14509), in the batch's own
order, so that it does not matter whether attention beside it is a ring. The layer is arXiv:2412.06464; kernels are those of flash-linear-attention
on GPUs that have it, and transformers' torch ones elsewhere.

Shape suffixes: B rows, T columns of the batch, L columns of one rank, N = B * T tokens, C channels of the convolution, H heads, D size of a head.
"""

import inspect
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from ._collectives import all_to_all
from ._errors import LayoutError, UnsupportedModelError

if TYPE_CHECKING:
    from ._sequence_parallel import SequenceParallel

RUNS = "twinkle_runs"
"""The keyword by which a model's forward hands `Runs` to its layers: also where backward computes them again."""
_CHUNK = 64
_COMMON = ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "activation")
_PROJECTIONS = (("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
# Of the largest output, in float32: far above rounding.
_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Where the sequences of a batch are.

    bounds: where each sequence, or stretch of padding, begins among the B * T columns of the whole batch, and the end. place_BT, order_BP: where
    rows are divided, see `Columns`.
    """

    bounds: Sequence[int]
    place_BT: torch.Tensor | None = None
    order_BP: torch.Tensor | None = None


def gated_delta_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that can be made to keep sequences apart here."""
    return [
        module
        for module in model.modules()
        if all(hasattr(module, name) for name in _COMMON) and any(all(hasattr(module, name) for name in names) for names in _PROJECTIONS)
    ]


class GatedDeltaNetPaddingFreePatch:
    """Makes a model's Gated DeltaNet layers begin anew in each sequence of a packed row, from `apply` to `remove`.

    `TransformersModel` applies it by itself. On a bare model sequences begin where `position_ids` are 0:
    ``model(input_ids=ids, position_ids=positions, use_cache=False)``. With a cache, or without position ids, layers run as they did, and a row of
    several sequences is refused.
    """

    def __init__(self) -> None:
        self._layers: list[nn.Module] = []
        self._hook: Any = None
        self._core: SequenceParallel | None = None

    def apply(self, model: Any) -> "GatedDeltaNetPaddingFreePatch":
        """Changes the layers of this model, not of others of its class, and returns itself.

        Raises:
            UnsupportedModelError: the model has no such layers, or they compute otherwise than is known here. LayoutError: heads do not divide.
        """
        layers = gated_delta_layers(model)
        if not layers:
            raise UnsupportedModelError(f"{type(model).__name__} has no Gated DeltaNet layers that are known")
        if self._core is None:
            _check_understood(layers[0])
        return self.put_on(model)

    def put_on(self, model: Any) -> "GatedDeltaNetPaddingFreePatch":
        """`apply` to a model whose layers are known to compute as is known here; their values may not be there yet."""
        layers = gated_delta_layers(model)
        if self._core is not None:
            _check_heads(layers, self._core.ranks)
        for layer in layers:
            layer.forward = _Layer(layer, self._core).forward
        self._layers = layers
        self._hook = model.register_forward_pre_hook(_runs_from_positions, with_kwargs=True)
        return self

    def remove(self) -> None:
        """The layers run as they did before."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)
        if self._hook is not None:
            self._hook.remove()
        self._layers, self._hook = [], None


class Qwen3_5GatedDeltaNetUlyssesPatch(GatedDeltaNetPaddingFreePatch):
    """The same where rows are divided over ranks: each has some of the heads for all columns, with Ulysses, ring attention, or both.

    `SequenceParallelStrategy.install` applies it by itself. For Qwen3-Next as well as Qwen3.5.

    Args:
        core: this rank's part, which `SequenceParallelStrategy.install` returns.
    """

    def __init__(self, core: "SequenceParallel") -> None:
        super().__init__()
        self._core = core


class _Layer:
    """The forward of one layer."""

    def __init__(self, module: nn.Module, core: "SequenceParallel | None") -> None:
        self._module: Any = module
        self._core = core
        self._own_forward = module.forward

    def forward(self, hidden_states: torch.Tensor, cache_params: Any = None, attention_mask: Any = None, **options: Any) -> torch.Tensor:
        """What stands in for the layer's own forward, with the same arguments."""
        runs: Runs | None = options.pop(RUNS, None)
        if runs is None or cache_params is not None:
            if self._core is not None:
                raise UnsupportedModelError(
                    f"{type(self._module).__name__} is divided over ranks: call the model through its strategy, without a cache"
                )
            return self._own_forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **options)
        module, core = self._module, self._core
        query, key, value, z, beta, decay = _projected(module, hidden_states)
        rate, bias = module.A_log, module.dt_bias
        weights = _channels(module, module.conv1d.weight.squeeze(1))
        conv_bias = None if module.conv1d.bias is None else _channels(module, module.conv1d.bias)
        per_head = [query, key, value, beta[..., None], decay[..., None]]
        if core is not None:
            copies = math.lcm(module.num_k_heads, core.ranks) // module.num_k_heads
            per_head[:2] = (tensor.repeat_interleave(copies, 2) for tensor in per_head[:2])
            per_head = _heads_for_columns(core, runs, per_head)
            rate, bias = (tensor.chunk(core.ranks)[core.rank] for tensor in (rate, bias))
            weights = [_share(core, each, copies if index < 2 else 1) for index, each in enumerate(weights)]
            conv_bias = conv_bias and [_share(core, each, copies if index < 2 else 1) for index, each in enumerate(conv_bias)]
        query, key, value = _convolved(module, per_head[:3], weights, conv_bias, runs.bounds)
        beta, decay = (tensor[..., 0] for tensor in per_head[3:])
        decay = -rate.float().exp() * F.softplus(decay.float() + bias)
        out_BTHD = _recurrence(module, query, key, value, decay, beta.sigmoid(), runs.bounds)
        if core is not None:
            out_BTHD = _columns_for_heads(core, runs, out_BTHD)
        rows, columns = hidden_states.shape[:2]
        normed = module.norm(out_BTHD.reshape(-1, module.head_v_dim), z.reshape(-1, module.head_v_dim))
        return module.out_proj(normed.reshape(rows, columns, -1))


def _projected(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query, key, value and gate ``[B, L, H, D]``, and beta and decay before their functions, ``[B, L, H]``."""
    if hasattr(module, "in_proj_qkvz"):
        query, key, value, z, beta, decay = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
        return query, key, value, z, beta, decay
    widths = [module.num_k_heads * module.head_k_dim] * 2 + [module.num_v_heads * module.head_v_dim]
    query, key, value = module.in_proj_qkv(hidden).split(widths, -1)
    query, key = (tensor.unflatten(-1, (module.num_k_heads, -1)) for tensor in (query, key))
    value, z = (tensor.unflatten(-1, (module.num_v_heads, -1)) for tensor in (value, module.in_proj_z(hidden)))
    return query, key, value, z, module.in_proj_b(hidden), module.in_proj_a(hidden)


def _channels(module: Any, per_channel: torch.Tensor) -> list[torch.Tensor]:
    """A tensor of one entry a channel as those of query, key and value, ``[H, D, ...]``."""
    key_channels = module.num_k_heads * module.head_k_dim
    parts = per_channel.split([key_channels, key_channels, module.num_v_heads * module.head_v_dim])
    heads = (module.num_k_heads, module.num_k_heads, module.num_v_heads)
    return [part.unflatten(0, (count, -1)) for part, count in zip(parts, heads, strict=True)]


def _share(core: "SequenceParallel", per_head: torch.Tensor, copies: int) -> torch.Tensor:
    return per_head.repeat_interleave(copies, 0).chunk(core.ranks)[core.rank]


def _convolved(
    module: Any, tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None, bounds: Sequence[int]
) -> list[torch.Tensor]:
    """Query, key and value ``[B, T, H, D]`` behind the causal convolution of each sequence and its activation."""
    rows, columns = tensors[0].shape[:2]
    x_NC = torch.cat([tensor.flatten(2) for tensor in tensors], -1).flatten(0, 1)
    weight_CW = torch.cat([weight.flatten(0, 1) for weight in weights])
    bias_C = None if biases is None else torch.cat([bias.flatten() for bias in biases])
    if _has_kernels(x_NC):
        from fla.modules.convolution import causal_conv1d  # pyright: ignore[reportMissingImports]

        out_1NC, _ = causal_conv1d(x_NC[None], weight_CW, bias_C, activation=module.activation, cu_seqlens=_cu_seqlens(bounds, x_NC.device))
        out_NC = out_1NC[0]
    else:
        out_NC = _convolution(x_NC, weight_CW, bias_C, bounds)
        from transformers.activations import ACT2FN

        out_NC = ACT2FN[module.activation](out_NC)
    parts = out_NC.view(rows, columns, -1).split([math.prod(tensor.shape[2:]) for tensor in tensors], -1)
    return [part.unflatten(-1, tensor.shape[2:]) for part, tensor in zip(parts, tensors, strict=True)]


def _convolution(x_NC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor | None, bounds: Sequence[int]) -> torch.Tensor:
    """Channel by channel, a tap at a time, without those taps that would reach into the sequence before."""
    lengths = torch.tensor([end - begin for begin, end in itertools.pairwise(bounds)], device=x_NC.device)
    begins = torch.tensor(bounds[:-1], device=x_NC.device)
    position_N1 = (torch.arange(len(x_NC), device=x_NC.device) - begins.repeat_interleave(lengths))[:, None]
    out_NC = x_NC * weight_CW[:, -1]
    for back in range(1, weight_CW.shape[1]):
        earlier_NC = F.pad(x_NC, (0, 0, back, 0))[: len(x_NC)]
        out_NC = out_NC + torch.where(position_N1 >= back, earlier_NC * weight_CW[:, -1 - back], 0.0)
    return out_NC if bias_C is None else out_NC + bias_C


def _recurrence(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, bounds: Sequence[int]
) -> torch.Tensor:
    """The gated delta rule of each sequence, ``[B, T, H, D]``; query and key have as many heads as value, or a divisor."""
    rows, columns, heads = value.shape[:3]
    query, key = (tensor.repeat_interleave(heads // tensor.shape[2], 2) for tensor in (query, key))
    tensors = [tensor.flatten(0, 1) for tensor in (query, key, value, decay, beta)]
    if _has_kernels(value):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

        *qkv, g, b = (tensor[None] for tensor in tensors)
        out, _ = chunk_gated_delta_rule(*qkv, g=g, beta=b, use_qk_l2norm_in_kernel=True, cu_seqlens=_cu_seqlens(bounds, value.device))
        return out[0].view(rows, columns, heads, -1)
    rule = inspect.unwrap(sys.modules[type(module).__module__].torch_chunk_gated_delta_rule)
    # Sequences of equally many chunks together. What is behind a sequence's end changes nothing before it.
    alike: dict[int, list[int]] = {}
    for begin, end in itertools.pairwise(bounds):
        alike.setdefault(-(-(end - begin) // _CHUNK), []).append(begin)
    ends = dict(itertools.pairwise(bounds))
    outs: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    for begins in alike.values():
        longest = max(ends[begin] - begin for begin in begins)
        index_SL = torch.tensor(begins)[:, None] + torch.arange(longest)
        inside_SL = index_SL < torch.tensor([ends[begin] for begin in begins])[:, None]
        index_SL = torch.where(inside_SL, index_SL, index_SL[:, :1]).to(value.device)
        *qkv, g, b = (tensor[index_SL] for tensor in tensors)
        out_SLHD, _ = rule(*qkv, g=g, beta=b, chunk_size=min(_CHUNK, longest), use_qk_l2norm_in_kernel=True)
        inside_SL = inside_SL.to(value.device)
        outs.append(out_SLHD[inside_SL])
        places.append(index_SL[inside_SL])
    back_N = torch.argsort(torch.cat(places))
    return torch.cat(outs)[back_N].view(rows, columns, heads, -1)


def _heads_for_columns(core: "SequenceParallel", runs: Runs, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gives away heads for columns: ``[B, L, H, D]`` each to ``[B, T, H / ranks, D]`` in the batch's order."""
    assert runs.place_BT is not None, "rows are divided"
    shares = [tensor.unflatten(2, (core.ranks, -1)) for tensor in tensors]
    sent = torch.cat([share.flatten(3) for share in shares], -1).permute(2, 0, 1, 3)
    came = all_to_all(sent, [1] * core.ranks, [1] * core.ranks, core.group)
    whole_BPC = came.transpose(0, 1).flatten(1, 2)
    index = torch.arange(len(whole_BPC), device=whole_BPC.device)[:, None]
    parts = whole_BPC[index, runs.place_BT].split([math.prod(share.shape[3:]) for share in shares], -1)
    return [part.unflatten(-1, share.shape[3:]) for part, share in zip(parts, shares, strict=True)]


def _columns_for_heads(core: "SequenceParallel", runs: Runs, out_BTHD: torch.Tensor) -> torch.Tensor:
    """Gives away columns for heads: ``[B, T, H / ranks, D]`` to ``[B, L, H, D]``."""
    assert runs.order_BP is not None, "rows are divided"
    index = torch.arange(len(out_BTHD), device=out_BTHD.device)[:, None]
    placed_BPHD = torch.where((runs.order_BP >= 0)[..., None, None], out_BTHD[index, runs.order_BP.clamp(min=0)], 0.0)
    sent = placed_BPHD.unflatten(1, (core.ranks, -1)).transpose(0, 1)
    came = all_to_all(sent, [1] * core.ranks, [1] * core.ranks, core.group)
    return came.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _has_kernels(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and find_spec("fla") is not None


def _cu_seqlens(bounds: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32, device=device)


def _runs_from_positions(model: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """For calls that do not say where sequences are: they begin where positions do."""
    positions = named.get("position_ids")
    if RUNS in named or positions is None or named.get("past_key_values") is not None:
        return None
    positions_BT = positions if positions.dim() == 2 else positions[0]
    begins = positions_BT == 0
    begins[:, 0] = True
    bounds = [*begins.flatten().nonzero()[:, 0].tolist(), begins.numel()]
    if named.get("use_cache", getattr(model.config, "use_cache", False)):
        mask = named.get("attention_mask")
        if len(bounds) - 1 > len(begins) and (mask is None or bool(torch.as_tensor(mask).all())):
            raise UnsupportedModelError("a row of several sequences cannot be cached: call the model with use_cache=False")
        return None
    return inputs, named | {RUNS: Runs(bounds=bounds)}


def _check_heads(layers: Sequence[nn.Module], ranks: int) -> None:
    for layer in layers:
        if int(layer.num_v_heads) % ranks:  # pyright: ignore[reportArgumentType]
            raise LayoutError(f"the {layer.num_v_heads} value heads of {type(layer).__name__} cannot be divided over {ranks} ranks that share rows")


@torch.no_grad()
def _check_understood(module: Any) -> None:
    """UnsupportedModelError unless one sequence alone gives what the layer's own forward gives."""
    parameter = next(module.parameters())
    tokens = torch.randn(1, _CHUNK + 6, module.hidden_size, generator=torch.Generator().manual_seed(0)).to(parameter)
    want = module(tokens)
    have = _Layer(module, None).forward(tokens, **{RUNS: Runs(bounds=(0, tokens.shape[1]))})
    if not (have - want).abs().max() <= _TOLERANCE * want.abs().max():
        raise UnsupportedModelError(f"{type(module).__name__} computes otherwise than the Gated DeltaNet that is known: its own output is another")
