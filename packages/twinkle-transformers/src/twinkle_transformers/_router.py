"""What the routers of a model's expert layers do: their logits, how loaded experts are, and the losses that keep them balanced.

The losses are those of one process that has all rows of a call, whatever is divided: their counts are of all ranks' tokens, and of all micro-batches.

Shape suffixes: N tokens of one forward on this rank, L layers with experts, E experts, K experts a token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from twinkle_data import Batch
from twinkle_train import ConfigError, LossOutput, ReduceGroups, reduce_sum

from ._errors import UnsupportedModelError
from ._expert_parallel import experts_of, logits_of, router_of
from ._inputs import counted_tokens


@dataclass
class Routing:
    """One forward of the model: of each layer the router's logits ``[N, E]``, with their graph, and the chosen experts ``[N, K]``.

    counted_N: 1 for tokens of sequences that are trained on, 0 for all others and for padding.
    """

    counted_N: torch.Tensor
    logits: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    chosen: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])

    def loads(self) -> torch.Tensor:
        """How many counted tokens went to each expert, ``[L, E]``."""
        loads: list[torch.Tensor] = []
        for layer, logits_NE in sorted(self.logits.items()):
            chosen_NK = self.chosen[layer]
            ones = self.counted_N.to(torch.float64)[:, None].expand(chosen_NK.shape)
            loads.append(torch.zeros(logits_NE.shape[-1], dtype=torch.float64, device=ones.device).index_add_(0, chosen_NK.flatten(), ones.flatten()))
        return torch.stack(loads)

    def all_logits(self, rows: int) -> torch.Tensor:
        """Of all layers, float32 without a graph, ``[rows, N / rows, L, E]``."""
        stacked_NLE = torch.stack([logits.detach().float() for _, logits in sorted(self.logits.items())], 1)
        return stacked_NLE.unflatten(0, (rows, -1))


class Routers:
    """The routers of a model's blocks of experts.

    Args:
        model: with its experts divided already, before it is sharded.
        aux_loss_coef: of the load-balancing loss of the Switch Transformer (arXiv:2101.03961, equations 4 to 6) as transformers computes it, over the
            tokens of all layers together. z_loss_coef: of the router z-loss (ST-MoE, arXiv:2202.08906, equation 5).
        groups: whose data ranks hold other rows. everyone: all ranks, None for only this one.

    Raises:
        ConfigError: a coefficient below 0, or one of a model without such a loss.
    """

    def __init__(self, model: Any, *, aux_loss_coef: float | None, z_loss_coef: float, groups: ReduceGroups, everyone: Any) -> None:
        self._groups, self._everyone = groups, everyone
        self._seen: Routing | None = None
        self.num_layers = 0
        for block in model.modules():
            if isinstance(getattr(block, "experts", None), nn.Module):
                self._watch_block(block)
        config, name = model.config.get_text_config(decoder=True), type(model).__name__
        if aux_loss_coef is None:
            aux_loss_coef = float(config.router_aux_loss_coef) if self.num_layers and getattr(config, "output_router_logits", False) else 0.0
        if aux_loss_coef < 0 or z_loss_coef < 0:
            raise ConfigError(f"router_aux_loss_coef and router_z_loss_coef must be >= 0, got {aux_loss_coef} and {z_loss_coef}")
        if (aux_loss_coef or z_loss_coef) and not self.num_layers:
            raise ConfigError(f"{name} has no routers that are understood: leave router_aux_loss_coef and router_z_loss_coef out")
        if aux_loss_coef and not hasattr(config, "router_aux_loss_coef"):
            raise ConfigError(f"{name} has no auxiliary loss (its config has no router_aux_loss_coef): leave router_aux_loss_coef out")
        self.aux_loss_coef, self.z_loss_coef = aux_loss_coef, z_loss_coef
        self._loads: torch.Tensor | None = None
        self._losses: dict[str, tuple[torch.Tensor, float]] = {}

    @property
    def has_losses(self) -> bool:
        """Whether something is added to the gradients."""
        return bool(self.aux_loss_coef or self.z_loss_coef)

    @contextmanager
    def watch(self, counted_BT: torch.Tensor) -> Iterator[Routing]:
        """What routers do in this context; a backward that recomputes comes later and is not seen."""
        self._seen = Routing(counted_BT.flatten())
        try:
            yield self._seen
        finally:
            self._seen = None

    def note(self, routing: Routing) -> None:
        """Counts a training forward for `take_statistics`."""
        if not routing.logits:
            return
        loads = routing.loads()
        self._loads = loads if self._loads is None else self._loads + loads

    def plan(self, batches: Sequence[Batch]) -> "RouterLosses":
        """The losses of the batches of one call. Collective over the data ranks."""
        mine = [sum(float(batch.loss_mask.sum(dtype="float64")) for batch in batches), sum(float(counted_tokens(batch).sum()) for batch in batches)]
        weight, tokens = reduce_sum(mine, self._groups)
        return RouterLosses(self, weight, tokens)

    def note_loss(self, name: str, share: torch.Tensor, tokens: float) -> None:
        """Adds this rank's share of a loss, times the tokens that it is of, to the statistics."""
        total, count = self._losses.get(name, (torch.zeros((), dtype=torch.float64, device=share.device), 0.0))
        self._losses[name] = (total + share.detach().double(), count + tokens)

    def sum_everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all ranks, in place."""
        if self._everyone is not None:
            dist.all_reduce(tensor, group=self._everyone)
        return tensor

    def take_statistics(self) -> dict[str, float]:
        """Of the training forwards since the last call, by name of the metric. Collective over all ranks.

        ``moe_tokens_expert_7``: how often a token of a sequence that is trained on went to expert 7 of some layer. ``moe_load_max``,
        ``moe_load_min``: the largest and smallest load of any expert in any layer, as a multiple of its layer's mean. ``moe_aux_loss``,
        ``moe_z_loss``: before their coefficients, means over calls with their tokens as weights.
        """
        if self._loads is None:
            return {}
        loads_LE = self.sum_everywhere(self._loads.clone())
        self._loads = None
        metrics = {f"moe_tokens_expert_{index}": count for index, count in enumerate(loads_LE.sum(0).tolist())}
        mean_L1 = loads_LE.mean(1, keepdim=True)
        if mean_L1.any():
            relative_LE = loads_LE / mean_L1
            metrics |= {"moe_load_max": float(relative_LE.max()), "moe_load_min": float(relative_LE.min())}
        for name, (total, count) in sorted(self._losses.items()):
            metrics[name] = float(self.sum_everywhere(total)) / max(count, 1.0)
        self._losses = {}
        return metrics

    def _watch_block(self, block: nn.Module) -> None:
        try:
            experts, router = experts_of(block), router_of(block)
        except UnsupportedModelError:
            return  # trained as it is; its routing is not looked at
        layer, self.num_layers = self.num_layers, self.num_layers + 1
        top_k: int | None = None
        if isinstance(experts, nn.ModuleList) and "forward" not in experts.__dict__:  # its block goes through it
            top_k = int(getattr(block, "top_k", 1))
        else:
            experts.register_forward_pre_hook(partial(self._see_chosen, layer), with_kwargs=True)
        router.register_forward_hook(partial(self._see_logits, layer, top_k))

    def _see_logits(self, layer: int, top_k: int | None, module: nn.Module, inputs: Any, out: Any) -> None:
        if self._seen is None:
            return
        logits = logits_of(out)
        self._seen.logits[layer] = logits.reshape(-1, logits.shape[-1])
        if top_k is not None:
            self._seen.chosen[layer] = self._seen.logits[layer].detach().topk(top_k, dim=-1).indices

    def _see_chosen(self, layer: int, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._seen is not None:
            self._seen.chosen[layer] = named["top_k_index"] if "top_k_index" in named else inputs[1]


class RouterLosses:
    """The losses of one call's micro-batches: first all are counted, then each gives its share.

    weight: by which the gradients of the call are divided later; the shares are multiplied by it. tokens: that are counted, of all ranks.
    """

    def __init__(self, routers: Routers, weight: float, tokens: float) -> None:
        self._routers, self._weight, self._tokens = routers, weight, tokens
        self._loads_E: torch.Tensor | None = None
        self._num_counted = 0

    def count(self, routing: Routing) -> None:
        """Adds a micro-batch of this rank to the counts."""
        loads_E = routing.loads().sum(0)
        self._loads_E = loads_E if self._loads_E is None else self._loads_E + loads_E
        self._num_counted += 1

    def reduce(self) -> None:
        """Makes the counts those of all ranks. Collective over all ranks."""
        assert self._loads_E is not None, "micro-batches are counted first"
        self._routers.sum_everywhere(self._loads_E)

    def share(self, routing: Routing) -> torch.Tensor:
        """This micro-batch's part of the losses, with a graph, times the weight."""
        assert self._loads_E is not None, "micro-batches are counted first"
        routers, counted_N1 = self._routers, routing.counted_N.float()[:, None]
        num_rows = max(self._tokens * routers.num_layers, 1.0)
        logits = [each.float() for _, each in sorted(routing.logits.items())]
        total = torch.zeros((), device=counted_N1.device)
        if routers.aux_loss_coef:
            scores_E = torch.stack([(each.softmax(-1) * counted_N1).sum(0) for each in logits]).sum(0)
            loss = len(scores_E) * (scores_E * (self._loads_E / num_rows).to(scores_E.dtype)).sum() / num_rows
            routers.note_loss("moe_aux_loss", loss * self._tokens, self._tokens / self._num_counted)
            total = total + routers.aux_loss_coef * loss
        if routers.z_loss_coef:
            squares = torch.stack([(each.logsumexp(-1, keepdim=True).square() * counted_N1).sum() for each in logits])
            loss = squares.sum() / num_rows
            routers.note_loss("moe_z_loss", loss * self._tokens, self._tokens / self._num_counted)
            total = total + routers.z_loss_coef * loss
        return total * self._weight

    def check(self, loss: LossOutput, batch: Batch) -> None:
        """Refuses a loss that weighs otherwise than by its mask, beside which the routers' losses would be out of proportion.

        Raises:
            ConfigError: a loss that counts sequences, for example.
        """
        expected = float(batch.loss_mask.sum(dtype="float64"))
        if abs(float(loss.weight) - expected) > 1e-3 * max(expected, 1.0):
            raise ConfigError(
                f"the loss weighs a micro-batch {float(loss.weight):g}, its tokens weigh {expected:g}: losses of the routers are weighed by "
                "tokens, so they need a loss that is, too; use one, or set router_aux_loss_coef and router_z_loss_coef to 0"
            )
