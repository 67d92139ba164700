"""Runs micro-batches through megatron-core's schedules: none, 1F1B, or interleaved 1F1B. Imported only once the platform is chosen."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from ._batches import MicroBatch

LastStage = Callable[[MicroBatch, torch.Tensor], torch.Tensor]


def run_schedule(chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], on_last_stage: LastStage, *, forward_only: bool) -> None:
    """Runs all micro-batches forward and, unless ``forward_only``, backward; gradients of the sum accumulate in ``main_grad``.

    Args:
        chunks: this rank's model chunks.
        micro_batches: of equal shape when there is a pipeline.
        on_last_stage: is called once a micro-batch, in order, where logits are, with the micro-batch and its logits ``[R, C, V]``; returns the
            0-d tensor whose gradient is wanted (the loss's sum). What else it makes it keeps itself.
        forward_only: no graph, no backward.
    """

    def take_last(micro_batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        # Three values with calculate_per_token_loss: the sum is left as it is, whatever the count in the second says.
        return on_last_stage(micro_batch, output), torch.zeros((), dtype=torch.int, device=output.device), {}

    def forward_step(iterator: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        micro_batch = next(iterator)
        return chunk(micro_batch.input_ids_RC, micro_batch.position_ids_RC, None), partial(take_last, micro_batch)

    rows, columns = micro_batches[0].input_ids_RC.shape
    with torch.set_grad_enabled(not forward_only):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(micro_batches),
            seq_length=columns,
            micro_batch_size=rows,
            forward_only=forward_only,
        )
