"""Which experts each token goes to, between rows and the places that the model has them in. Imported only once the platform is chosen.

Shape suffixes: T tokens of a row, L expert layers of the whole model, k experts of a token; N flattened positions of a batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from twinkle_data import InputFeature, PackedFeature
from twinkle_train import InputError

from ._moe import Router
from ._views import View

KEY = "routed_experts"


def replay(routers: Sequence[Router], views: Sequence[View], rows: Sequence[Sequence[Any]], *, tp_size: int, tp_rank: int) -> None:
    """Makes the routers send each token where its row's ``user_data["routed_experts"]`` says, for one run over these micro-batches.

    rows: of each view that is no filler. tp_size, tp_rank: of sequence parallelism, else 1 and 0.

    Raises:
        InputError: a row without it, or of another shape, or with numbers that are no experts.
    """
    given = [_given(view, rows[view.index], routers) for view in views]
    for router in routers:
        layer = moe_layer(router)
        router.replay.given = [
            torch.as_tensor(_local(view, layers_NLk[:, layer], tp_size, tp_rank)) for view, layers_NLk in zip(views, given, strict=True)
        ]


def recorded(routers: Sequence[Router], views: Sequence[View], *, tp_size: int, tp_rank: int, config: Any) -> list[NDArray[np.int16]]:
    """What the routers recorded in a run over these micro-batches: int16 ``[T, L, k]`` a sequence. Collective over the ranks that share rows."""
    found: list[NDArray[np.int16]] = []
    for number, view in enumerate(views):
        if view.is_filler:
            continue
        layers = torch.full((view.batch.input_ids.size, num_moe_layers(config), config.moe_router_topk), -1, dtype=torch.int64)
        for router in routers:
            places = _local(view, np.arange(view.batch.input_ids.size), tp_size, tp_rank)
            held = torch.as_tensor(places >= 0)
            layers[torch.as_tensor(places)[held], moe_layer(router)] = router.replay.recorded[number].cpu()[held]
        layers = layers.to(torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
        groups: list[Any] = [parallel_state.get_tensor_and_context_parallel_group(), parallel_state.get_pipeline_model_parallel_group()]
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(layers, op=dist.ReduceOp.MAX, group=group)
        whole = layers.cpu().numpy().astype(np.int16).reshape(*view.batch.input_ids.shape, *layers.shape[1:])
        found += view.batch.split(whole)
    return found


def num_moe_layers(config: Any) -> int:
    """The expert layers of the whole model."""
    return sum(_is_moe(config, layer) for layer in range(config.num_layers))


def moe_layer(router: Router) -> int:
    """Which of the whole model's expert layers a router is in."""
    assert router.layer_number is not None
    return sum(_is_moe(router.config, layer) for layer in range(router.layer_number - 1))


def _is_moe(config: Any, layer: int) -> bool:
    pattern = config.moe_layer_freq
    return layer % pattern == 0 if isinstance(pattern, int) else bool(pattern[layer])


def _given(view: View, rows: Sequence[Any], routers: Sequence[Router]) -> NDArray[np.int64]:
    """``[N, L, k]`` of a micro-batch; positions without a token have zeros."""
    config: Any = routers[0].config
    shape = (num_moe_layers(config), config.moe_router_topk)
    sequences: list[InputFeature] = [one for row in rows for one in (row.features if isinstance(row, PackedFeature) else (row,))]
    batch = view.batch
    if len(sequences) != len(batch.lengths):
        raise InputError("router replay takes packed rows as PackedFeature, not as one InputFeature whose position_ids begin anew")
    layers_NLk = np.zeros((batch.input_ids.size, *shape), np.int64)
    for index, (feature, length, row, start) in enumerate(zip(sequences, batch.lengths, batch.rows, batch.starts, strict=True)):
        chosen = feature.user_data.get(KEY)
        if chosen is None or np.shape(chosen) != (length, *shape):
            what = "no" if chosen is None else f"a {np.shape(chosen)} array as"
            raise InputError(
                f"sequence {index} of a micro-batch has {what} user_data[{KEY!r}]: router replay needs [tokens, expert layers, k] = "
                f"{(int(length), *shape)}, as record_routing gives it"
            )
        first = row * batch.input_ids.shape[1] + start
        layers_NLk[first : first + length] = chosen
        if (np.asarray(chosen) < 0).any() or (np.asarray(chosen) >= config.num_moe_experts).any():
            raise InputError(f"user_data[{KEY!r}] of sequence {index} has numbers outside 0 to {config.num_moe_experts - 1}, the model's experts")
        if (np.diff(np.sort(chosen, -1), axis=-1) == 0).any():
            raise InputError(f"user_data[{KEY!r}] of sequence {index} names one expert twice for a token")
    return layers_NLk


def _local(view: View, values_N: NDArray[np.int64], tp_size: int, tp_rank: int) -> NDArray[np.int64]:
    """This rank's tokens in the router's order (columns, then rows); -1 on padding."""
    cp: Any = parallel_state.get_context_parallel_group()
    places_KR = view.places_PRK[cp.rank()].T
    places = np.split(places_KR, tp_size)[tp_rank].reshape(-1)
    picked = values_N[np.maximum(places, 0)]
    picked[places < 0] = -1
    return picked
