"""Gradient buffers of megatron-core: when they are reduced, and their norm. Imported only once the platform is chosen."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared


class Gradients:
    """The gradients of this rank's chunks, in float32 buffers that megatron-core reduces over the data ranks.

    With ``overlap`` the reduction starts in the backward of the last micro-batch of the first call after `zero`; with sharded states, too, parameters
    are gathered while the next forward runs. A further call that accumulates takes the reduction back: each rank keeps its shard of the sums, so
    that reducing once more, at the end, adds up to the right thing.

    Args:
        chunks: the bare chunks.
        sharded: reduce-scatter, for optimizer states that are sharded over the data ranks, instead of all-reduce.
        overlap: communicate while computing.
    """

    def __init__(self, chunks: Sequence[Any], *, sharded: bool, overlap: bool) -> None:
        self.sharded = sharded
        self.overlap = overlap
        # Bare chunks are wrapped in the order of their stages; only the first has buckets of its own, since the others' communication
        # overlaps with other chunks' computation anyway.
        self.chunks: list[Any] = [
            DistributedDataParallel(
                chunk.config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    use_distributed_optimizer=sharded,
                    overlap_grad_reduce=overlap,
                    overlap_param_gather=overlap and sharded,
                ),
                chunk,
                disable_bucketing=index > 0,
            )
            for index, chunk in enumerate(chunks)
        ]
        if overlap:
            synced = [chunk.no_sync for chunk in self.chunks]
            self.chunks[0].config.no_sync_func = synced if len(synced) > 1 else synced[0]
        self._state: Literal["clean", "started", "accumulating"] = "clean"

    def before_backward(self) -> None:
        """Called before micro-batches are run backward."""
        if not self.overlap:
            return
        if self._state == "started":
            for chunk in self.chunks:
                chunk.finish_grad_sync()
                _keep_own_shard(chunk)
                chunk.ddp_config.overlap_grad_reduce = False
            self._state = "accumulating"
        elif self._state == "clean":
            self._state = "started"

    def reduce(self) -> None:
        """Sums the accumulated gradients over the data and context ranks and what else is shared. Collective.

        What else: norms under sequence parallelism over the tensor-parallel group, tied embeddings over the first and last stage.
        """
        finalize_model_grads(self.chunks)

    def make_whole(self) -> None:
        """Makes the buffers whole again after a reduce-scatter. Collective; for export."""
        if not self.sharded:
            return
        for bucket, group in _buckets(self.chunks):
            mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)

    def scale(self, factor: float) -> None:
        """Multiplies all gradients."""
        for chunk in self.chunks:
            chunk.scale_gradients(factor)

    def norm(self) -> float:
        """The 2-norm of whole gradients (not of shards), each weight counted once. Collective."""
        mine: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                # Experts that are spread over ranks: each rank has others, or another part.
                is_expert = not getattr(parameter, "allreduce", True)
                counts = is_expert or param_is_not_tensor_parallel_duplicate(parameter)
                if parameter.requires_grad and counts and param_is_not_shared(parameter):
                    mine[is_expert].append(parameter.main_grad)
        dense: Any = parallel_state.get_model_parallel_group()
        experts: Any = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        total = sum_of_squares(mine[False], dense)
        if any(getattr(chunk.config, "num_moe_experts", None) for chunk in self.chunks):
            total += sum_of_squares(mine[True], experts)
        return total**0.5

    def zero(self) -> None:
        """Drops all gradients."""
        for chunk in self.chunks:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if group.grad_reduce_handle is not None:
                    group.grad_reduce_handle.wait()
                    group.grad_reduce_handle = None
                if len(group.per_param_grad_ready_counts) < len(group.params):
                    # Of an interrupted backward, too: megatron-core takes the first that it finds for those of a whole one.
                    group.per_param_grad_ready_counts = {}
            for parameter in chunk.parameters():
                # Of a backward that was interrupted before megatron-core moved it into the buffer.
                parameter.grad = None
            chunk.zero_grad_buffer()
            chunk.ddp_config.overlap_grad_reduce = self.overlap
        self._state = "clean"

    def parameters_changed(self) -> None:
        """Called after a step: what was gathered is out of date, so that the next forward gathers anew."""
        for chunk in self.chunks:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                group.param_gather_dispatched = False

    def gather_in_forward(self, enabled: bool) -> None:
        """Whether a forward waits for parameters that are being gathered. A frozen model's must not: megatron-core asserts that they want gradients.

        Collective.
        """
        for chunk in self.chunks if self.overlap and self.sharded else ():
            if enabled:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook()

    def settle_parameters(self) -> None:
        """Waits for parameters that are still being gathered, before somebody reads or replaces them. Collective."""
        if self.overlap and self.sharded:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)


# On a CPU torch 2.13 adds the squares of a whole tensor up in float32, one after the other: of 28 million numbers the norm is 1e-3 too small.
_ENTRIES_AT_ONCE = 1 << 16


def sum_of_squares(gradients: Sequence[torch.Tensor], group: Any) -> float:
    """Of all entries, over all ranks of a group, to float32 rounding however large they are. Collective."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    pieces: list[torch.Tensor] = []
    for gradient in gradients:
        flat = gradient.detach().reshape(-1)
        pieces += flat.split(_ENTRIES_AT_ONCE) if flat.device.type == "cpu" else [flat]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if pieces := [piece for piece in pieces if piece.numel()]:
        total += torch.stack(torch._foreach_norm(pieces)).double().square().sum()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total.item()


def _buckets(chunks: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            for bucket in buffer.buckets:
                yield bucket, buffer.data_parallel_group


def _keep_own_shard(chunk: Any) -> None:
    for bucket, group in _buckets([chunk]):
        for rank, shard in enumerate(bucket.grad_data.chunk(group.size())):
            if rank != group.rank():
                shard.zero_()
