"""Four gloo ranks that compare the torch mesh with ours. Torch is imported once, then forked: that saves three imports."""

import os
import sys
import traceback
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

from twinkle_mesh import DeviceMesh

WORLD_SIZE = 4
DEADLINE_S = 60


def compare(rank: int) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2, device_type="cpu")
    torch_mesh = mesh.to_torch_device_mesh()
    assert torch_mesh.mesh_dim_names == ("dp", "tp")
    assert list(torch_mesh.get_coordinate() or ()) == [mesh.coordinates(rank)["dp"], mesh.coordinates(rank)["tp"]]
    for axis in ("dp", "tp"):
        group = torch_mesh.get_group(axis)
        assert tuple(dist.get_process_group_ranks(group)) == mesh.group_of(rank, axis)
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=group)
        assert total.item() == sum(mesh.group_of(rank, axis))
    # The two axes are told apart: the check above would fail for the other one.
    assert mesh.group_of(rank, "dp") != mesh.group_of(rank, "tp")
    flat = DeviceMesh.from_sizes(fsdp_size=4, device_type="cpu").to_torch_device_mesh()
    assert flat.mesh_dim_names == ("fsdp",)
    assert flat.size() == WORLD_SIZE


def run(rank: int, folder: str) -> None:
    try:
        store = dist.FileStore(os.path.join(folder, "store"), WORLD_SIZE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=DEADLINE_S))
        compare(rank)
        dist.destroy_process_group()
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        sys.exit(1)
    # A file, not a line: four processes that share a pipe write into one another's lines.
    (Path(folder) / f"rank-{rank}").touch()


def main() -> int:
    fork = get_context("fork")
    processes = [fork.Process(target=run, args=(rank, sys.argv[1])) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
        if process.is_alive():
            process.kill()
            process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
