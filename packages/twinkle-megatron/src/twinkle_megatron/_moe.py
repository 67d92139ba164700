"""Routing of experts: megatron-core's router with losses that do not depend on the layout, load counts, and replay.

Imported only once the platform is chosen. megatron-core takes the router's class from the layer's specification, so nothing is patched.

What megatron-core 0.16.1's own router does otherwise, with ``calculate_per_token_loss``: auxiliary and z losses are weighed by a rank's own
tokens, so that tensor and context parallelism divide them by their sizes; counts for the expert bias fail when rows are padded.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class Replay:
    """Records or replays which experts each token goes to, in the order in which a router sees micro-batches.

    recorded: int64 ``[tokens, k]`` a micro-batch, this rank's tokens in the model's order. given: the same, to be replayed, -1 where the router
    chooses itself (for padding: who goes to an expert with a token decides how its sums round); None: routing as usual.
    """

    recording: bool = False
    recorded: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    given: list[torch.Tensor] | None = None
    recomputes: bool = False
    _forward: int = 0
    _recompute: int = 0

    def clear(self) -> None:
        """Routing as usual again; what was recorded is dropped."""
        self.recording, self.recorded, self.given = False, [], None
        self._forward = self._recompute = 0

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute_topk: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What megatron-core calls to choose experts: the scores and numbers of the chosen ones, ``[tokens, k]``."""
        chosen, indices = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.given is not None:
            given = self.given[self._next()].to(scores.device)
            indices = torch.where(given < 0, indices, given)
            return scores.gather(1, indices), indices
        if self.recording:
            self.recorded.append(indices.detach().clone())
        return chosen, indices

    def _next(self) -> int:
        # Recomputation comes in the order of the micro-batches too, but later: it runs with a graph, the forward before it ran without.
        if self.recomputes and torch.is_grad_enabled():
            self._recompute += 1
            return self._recompute - 1
        self._forward += 1
        return self._forward - 1


class Router(TopKRouter):
    """A top-k router whose auxiliary losses are means over all tokens of a micro-batch, whatever the layout.

    aux_weight: by how much a token's share of the auxiliary losses is multiplied, so that the later division by the loss's weight leaves their
    weighted mean over micro-batches. loads, loads_since_step: how many tokens each expert got in training, padding left out.
    """

    loads: torch.Tensor
    loads_since_step: torch.Tensor

    def __init__(self, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config, pg_collection)
        assert config.num_moe_experts is not None, "the model has experts"
        self.aux_weight = 1.0
        # Integers: a model in bfloat16 casts its buffers of floating point.
        self.register_buffer("loads", torch.zeros(config.num_moe_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("loads_since_step", torch.zeros(config.num_moe_experts, dtype=torch.int64), persistent=False)
        self.loss_sums: dict[str, torch.Tensor] = {}
        recomputes = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
        )
        self.replay = Replay(recomputes=recomputes)
        self.router_replay = self.replay  # pyright: ignore[reportAttributeAccessIssue]

    def _apply_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor, with_padding_mask: bool = False
    ) -> torch.Tensor:
        """The Switch Transformer's load-balancing loss (arXiv:2101.03961, section 2.2): E * sum over experts of (share of tokens * mean score)."""
        del with_padding_mask  # padding has no entry in scores and map
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        counts = routing_map.sum(0).to(scores_for_aux_loss.dtype)
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        # Times the number of tokens: a rank's summands add up to the loss of the micro-batch times its tokens.
        num_tokens = (counts.sum() / self.topk).clamp(min=1)
        loss = (scores_for_aux_loss.sum(0) * counts).sum() * (len(counts) / (self.topk * num_tokens))
        self._note("moe_aux_loss", loss)
        return MoEAuxLossAutoScaler.apply(probs, loss * (coefficient * self.aux_weight))  # pyright: ignore[reportReturnType]

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """The router z-loss (ST-MoE, arXiv:2202.08906, equation 5): the mean over tokens of the squared log-sum-exp of the router's logits."""
        if self.config.moe_z_loss_coeff is None or not self.training or not torch.is_grad_enabled():
            return logits
        squares = torch.logsumexp(logits.float(), -1).square()
        loss = squares.sum() if padding_mask is None else (squares * ~padding_mask).sum()
        self._note("moe_z_loss", loss)
        return MoEAuxLossAutoScaler.apply(logits, loss * (self.config.moe_z_loss_coeff * self.aux_weight))  # pyright: ignore[reportReturnType]

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        if not self.training or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            counts = (routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]).sum(0)
            self.loads += counts
            if self.weight.requires_grad:  # what adapters are trained on does not move the frozen base
                self.loads_since_step += counts

    def _note(self, name: str, loss: torch.Tensor) -> None:
        summed = self.loss_sums.get(name)
        self.loss_sums[name] = loss.detach().double() if summed is None else summed + loss.detach()


def use_router(spec: Any) -> None:
    """Puts :class:`Router` into the expert layers of a decoder block's specification."""
    for layer in spec.layer_specs:
        submodules = getattr(layer.submodules.mlp, "submodules", None)
        if isinstance(submodules, MoESubmodules):
            submodules.router = Router


def routers(chunks: Iterable[torch.nn.Module]) -> list[Router]:
    """The routers of this rank's chunks, in the order of their layers."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]


def forget_graphs(chunks: Iterable[torch.nn.Module]) -> None:
    """Drops what token dispatchers keep of the last micro-batch.

    megatron-core 0.16.1 leaves tensors with a graph there. The graph leads to the hooks of DistributedDataParallel and so to the model: a circle
    through autograd that Python cannot collect, and the activations of a micro-batch between steps.
    """
    for chunk in chunks:
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            for name, value in vars(dispatcher).items() if dispatcher is not None else ():
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    setattr(dispatcher, name, None)


def update_expert_biases(found: Iterable[Router], rate: float) -> None:
    """Moves each expert's routing bias towards balance: up by ``rate`` where it got less than the mean since the last step, down where it got more.

    Loss-free balancing (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Collective over the ranks that hold the same layers.
    """
    for router in found:
        if router.expert_bias is not None and rate:
            counts = _everywhere(router.loads_since_step).double()
            router.expert_bias += torch.sign(counts.mean() - counts).to(router.expert_bias.dtype) * rate
        router.loads_since_step.zero_()


def take_statistics(found: Iterable[Router], last_stage_group: dist.ProcessGroup | None) -> Iterator[tuple[str, float]]:
    """Load and losses of all expert layers since the last call, by metric name; nothing when no token was trained on. Collective over all ranks.

    ``moe_load_max`` and ``moe_load_min``: the largest and smallest load of any expert in any layer, as a multiple of its layer's mean.
    ``moe_aux_loss``, ``moe_z_loss``: the losses before their coefficients, means over tokens and layers.
    """
    largest, smallest, totals = 0.0, float("inf"), dict[str, tuple[float, float]]()
    for router in found:
        counts = _everywhere(router.loads).double()
        router.loads.zero_()
        num_tokens = float(counts.sum()) / router.topk
        for name, summed in sorted(router.loss_sums.items()):
            loss = float(_everywhere(summed))
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + loss, before[1] + num_tokens)
        router.loss_sums.clear()
        if num_tokens:
            largest = max(largest, float(counts.max() / counts.mean()))
            smallest = min(smallest, float(counts.min() / counts.mean()))
    parts: list[Any] = [(largest, smallest, totals)]
    if last_stage_group is not None:
        parts = [None] * last_stage_group.size()
        dist.all_gather_object(parts, (largest, smallest, totals), group=last_stage_group)
    if not any(part[0] for part in parts):
        return
    yield "moe_load_max", max(part[0] for part in parts)
    yield "moe_load_min", min(part[1] for part in parts)
    for name in sorted({name for part in parts for name in part[2]}):
        sums = [part[2][name] for part in parts if name in part[2]]
        yield name, sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)


def _everywhere(counts: torch.Tensor) -> torch.Tensor:
    # Over all ranks that hold this layer: sequence, context and data parallel ranks have tokens of their own.
    summed = counts.clone()
    group: Any = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        dist.all_reduce(summed, group=group)
    return summed
