"""How a trainer's outputs come together from its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from twinkle_data import ModelOutput

from ._errors import InputError

if TYPE_CHECKING:
    from twinkle_mesh import DeviceMesh


def collect_model_output(all_results: Sequence[ModelOutput], device_mesh: DeviceMesh | None) -> ModelOutput:
    """One ModelOutput from those of all workers; the `collect` of a trainer's remote methods that take a batch.

    all_results: one a worker, in order of rank. device_mesh: the trainer's mesh; without one every worker holds its own data.

    The per-sequence lists (`logprobs`, `entropy`, `router_logits`, `top_tokens`, `top_logprobs`, `logits`) are joined in the order of the data, from
    one worker of each data group (its last pipeline stage, rank 0 of tp, cp and ulysses). Loss, weight and metrics are the same on every
    worker, since a trainer reduces them: the first one's are kept.

    Raises InputError when the number of results is not the mesh's world size, or only some workers have a list.
    """
    ranks = range(len(all_results)) if device_mesh is None else device_mesh.representatives()
    if device_mesh is not None and len(all_results) != device_mesh.world_size:
        raise InputError(f"{len(all_results)} results for a mesh of {device_mesh.world_size} ranks")
    chosen = [all_results[rank] for rank in ranks]
    if not chosen:
        raise InputError("no worker returned a result")
    return replace(
        chosen[0],
        logprobs=_joined("logprobs", [result.logprobs for result in chosen]),
        entropy=_joined("entropy", [result.entropy for result in chosen]),
        router_logits=_joined("router_logits", [result.router_logits for result in chosen]),
        top_tokens=_joined("top_tokens", [result.top_tokens for result in chosen]),
        top_logprobs=_joined("top_logprobs", [result.top_logprobs for result in chosen]),
        logits=_joined("logits", [result.logits for result in chosen]),
    )


T = TypeVar("T")


def _joined(name: str, lists: Sequence[list[T] | None]) -> list[T] | None:
    present = [each for each in lists if each is not None]
    if not present:
        return None
    if len(present) != len(lists):
        raise InputError(f"{len(lists) - len(present)} of {len(lists)} data ranks returned no {name}")
    return [item for each in present for item in each]
