"""Runs micro-batches through megatron-core's schedules: none, 1F1B, or interleaved 1F1B. Imported only once the platform is chosen."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from ._views import View

CallChunk = Callable[[torch.nn.Module, View], torch.Tensor]
LastStage = Callable[[View, torch.Tensor], torch.Tensor]


def run_schedule(chunks: Sequence[torch.nn.Module], views: Sequence[View], call: CallChunk, on_last_stage: LastStage, *, forward_only: bool) -> None:
    """Runs all micro-batches forward and, unless ``forward_only``, backward; gradients of the sum accumulate in ``main_grad``.

    Args:
        chunks: this rank's model chunks.
        views: of equal shape when there is a pipeline.
        call: a chunk on a view: logits ``[R, K, V]`` on the last stage.
        on_last_stage: is called once a micro-batch, in order, where logits are, with the view and its logits; returns the
            0-d tensor whose gradient is wanted (the loss's sum). What else it makes it keeps itself.
        forward_only: no graph, no backward.
    """

    def take_last(view: View, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        # Three values with calculate_per_token_loss: the sum is left as it is, whatever the count in the second says.
        return on_last_stage(view, output), torch.zeros((), dtype=torch.int, device=output.device), {}

    def forward_step(iterator: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        view = next(iterator)
        return call(chunk, view), partial(take_last, view)

    with torch.set_grad_enabled(not forward_only):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(views) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(views),
            # Of all ranks together: megatron-core divides by the context- and sequence-parallel sizes itself.
            seq_length=views[0].shape.columns,
            micro_batch_size=views[0].shape.rows,
            forward_only=forward_only,
        )


def packed_parameters(view: View) -> PackedSeqParams | None:
    """megatron-core's description of a row of several sequences; None for plain rows."""
    bounds = view.cu_seqlens
    if bounds is None:
        return None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=view.max_length,
        max_seqlen_kv=view.max_length,
    )
