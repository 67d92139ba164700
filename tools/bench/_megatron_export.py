"""One rank of `./dev bench megatron export`: RANK WORLD_SIZE STORE_FILE MODEL REPEAT."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Exports, alternating with the raw copy or all-gather; rank 0 prints the figures."""
    rank, size, store, path, repeat = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=300))
    from paired import pairs

    from twinkle_megatron import MegatronModel
    from twinkle_mesh import DeviceMesh

    model = MegatronModel(path, device_mesh=DeviceMesh.from_sizes(world_size=size, tp_size=size, device_type="cpu"))
    # Whole weights are on rank 0 only; the all-gathers need as many bytes everywhere.
    shapes: list[list[tuple[int, ...]]] = [[tuple(tensor.shape) for _, tensor in model.iter_weights()]]
    dist.broadcast_object_list(shapes, src=0)
    source = [torch.randn(shape) for shape in shapes[0]]
    size_bytes = sum(tensor.nbytes for tensor in source)
    buffer = torch.empty(max(tensor.numel() for tensor in source))
    shards = [torch.empty(max(tensor.numel() for tensor in source) // size + 1) for _ in range(size)]

    def ours() -> None:
        # What takes a weight copies it once: into a bucket, at the least.
        for _, tensor in model.iter_weights():
            buffer[: tensor.numel()].copy_(tensor.reshape(-1))

    def copy() -> None:
        for tensor in source:
            buffer[: tensor.numel()].copy_(tensor.view(-1))

    def gather() -> None:
        for tensor in source:
            part = tensor.view(-1)[: tensor.numel() // size]
            dist.all_gather([shard[: part.numel()] for shard in shards], part)

    other, mine, ratio = pairs(copy if size == 1 else gather, ours, repeat, warm_up=1)
    if rank == 0:
        raw = f"one {'copy' if size == 1 else 'all-gather over gloo'} of them {other:.3f} s"
        speed = f"{1 / ratio:.2f} of its speed (at least 0.7 is wanted)"
        print(f"tp {size}: {size_bytes / 2**20:.0f} MiB in {mine:.3f} s; {raw}: {speed}", flush=True)
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
