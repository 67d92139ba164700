"""What topology costs: slices and rank groups of 131,072 ranks, a placement of 16,384 devices, the import.

Each figure is the median of `--pairs` runs, in seconds of CPU time, which other jobs of the machine disturb least (all of it runs in one thread).
Where there is a raw alternative both run alternately, their results are compared once, and the ratio is the median of the pairs' ratios
(ours / raw). Exit status 1 if a bound is not met.

- Slices and rank groups, beside torch: the groups that torch's DeviceMesh computes before it creates process groups (a mesh without a backend).
- Rank groups, beside megatron-core: `RankGenerator.get_ranks`, on 16,384 ranks, since it takes tens of seconds on 131,072.
- A placement, beside a scan over the nodes for every worker.
- The import, beside `import numpy` and `import torch.distributed.device_mesh`, each in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from megatron_ranks import ORDER, load_rank_generator

from twinkle_mesh import DeviceGroup, DeviceMesh, Node, plan_placement
from twinkle_mesh._axes import clear_caches

SIZES: dict[str, Any] = {"pp_size": 16, "dp_size": 128, "fsdp_size": 8, "tp_size": 8}
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Row:
    """A line of the report: seconds of ours and of the raw alternative, their ratio, and what the first or the last may be at most."""

    what: str
    seconds: float
    raw: str = ""
    raw_seconds: float | None = None
    ratio: float | None = None
    most_seconds: float | None = None
    most_ratio: float | None = None

    @property
    def met(self) -> bool:
        too_slow = self.most_seconds is not None and self.seconds > self.most_seconds
        return not too_slow and not (self.most_ratio is not None and self.ratio is not None and self.ratio > self.most_ratio)

    def __str__(self) -> str:
        beside = "" if self.raw_seconds is None or self.ratio is None else f"{self.raw} {self.raw_seconds:.4f} s, ratio {self.ratio:.4f}"
        bounds = [f"{bound:g} {unit}" for bound, unit in ((self.most_seconds, "s"), (self.most_ratio, "x")) if bound is not None]
        verdict = f"at most {' and '.join(bounds)}: {'met' if self.met else 'NOT MET'}" if bounds else ""
        return f"{self.what:48} {self.seconds:7.4f} s   {beside:60} {verdict}".rstrip()


def seconds_of(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def paired(pairs: int, ours: Callable[[], float], raw: Callable[[], float]) -> tuple[float, float, float]:
    """Medians of both and of their ratios, measured alternately after one pair that is not counted."""
    times = [(ours(), raw()) for _ in range(pairs + 1)][1:]
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times), statistics.median(a / b for a, b in times)


def everything(sizes: dict[str, Any]) -> None:
    """What a scheduler may ask for: the mesh, the slice of every rank, and the rank groups along each dense and each expert axis."""
    clear_caches()
    mesh = DeviceMesh.from_sizes(**sizes, ep_size=64, etp_size=1)
    for rank in range(mesh.world_size):
        mesh.get_slice(1 << 20, rank)
    for axis in mesh.axis_sizes():
        mesh.rank_groups(axis)
    for axis in mesh.expert_axis_sizes():
        mesh.expert_rank_groups(axis)


def dense_groups(sizes: dict[str, Any], axes: Iterable[str]) -> dict[str, Groups]:
    clear_caches()
    mesh = DeviceMesh.from_sizes(**sizes)
    return {axis: mesh.rank_groups(axis) for axis in axes}


def torch_groups(sizes: dict[str, Any]) -> dict[str, list[list[int]]]:
    """As torch.distributed.device_mesh does it (torch 2.13): the axis last, then one row a group."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    shape, names = tuple(sizes.values()), tuple(name.removesuffix("_size") for name in sizes)
    ranks = torch.arange(DeviceMesh.from_sizes(**sizes).world_size).reshape(shape)
    mesh = TorchMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0).mesh
    return {name: mesh.swapdims(-1, i).reshape(-1, mesh.size(i)).tolist() for i, name in enumerate(names)}


def beside_torch(pairs: int) -> list[Row]:
    all_s = statistics.median([seconds_of(lambda: everything(SIZES)) for _ in range(pairs)])
    rows = [Row("every slice and all rank groups, 131,072 ranks", all_s, most_seconds=1.0)]
    axes = [name.removesuffix("_size") for name in SIZES]
    if find_spec("torch") is None:
        return rows
    theirs = torch_groups(SIZES)
    for axis, groups in dense_groups(SIZES, axes).items():
        if sorted(map(list, groups)) != sorted(theirs[axis]):
            raise SystemExit(f"torch has other {axis} groups: the times cannot be compared")
    figures = paired(pairs, lambda: seconds_of(lambda: dense_groups(SIZES, axes)), lambda: seconds_of(lambda: torch_groups(SIZES)))
    return [*rows, Row("rank groups of pp, dp, fsdp, tp, 131,072 ranks", figures[0], "torch's DeviceMesh", *figures[1:])]


def beside_megatron(pairs: int) -> list[Row]:
    generator: Any = load_rank_generator()
    if generator is None:
        return []
    sizes: dict[str, Any] = {"pp_size": 16, "dp_size": 128, "tp_size": 8}
    theirs = generator(tp=8, ep=1, dp=128, pp=16, cp=1, order=ORDER)

    def raw() -> dict[str, Groups]:
        return {axis: tuple(map(tuple, theirs.get_ranks(axis))) for axis in ("tp", "dp", "pp")}

    if raw() != dense_groups(sizes, ("tp", "dp", "pp")):
        raise SystemExit("megatron-core has other groups: the times cannot be compared")
    few = min(pairs, 3)  # seconds each
    figures = paired(few, lambda: seconds_of(lambda: dense_groups(sizes, ("tp", "dp", "pp"))), lambda: seconds_of(raw))
    return [Row("rank groups of tp, dp, pp, 16,384 ranks", figures[0], "megatron-core's RankGenerator", *figures[1:])]


def scan_per_worker(groups: list[DeviceGroup], nodes: list[Node]) -> dict[str, list[tuple[int, tuple[str, ...]]]]:
    """The raw alternative to a plan: for every worker the first node, from the beginning, that has enough free devices."""
    free = [list(node.device_ids) for node in nodes]
    found: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
    for group in groups:
        size = group.gpus_per_worker
        workers: list[tuple[int, tuple[str, ...]]] = []
        for _ in range(group.num_workers):
            index = next(i for i, ids in enumerate(free) if len(ids) >= size)
            workers.append((index, tuple(free[index][:size])))
            free[index] = free[index][size:]
        found[group.name] = workers
    return found


def placement(pairs: int) -> list[Row]:
    nodes = [Node(f"node-{i}", 8, 64) for i in range(2048)]
    groups = [DeviceGroup(f"group-{i}", 2048, "cuda") for i in range(8)]
    plan = plan_placement(groups, nodes)
    planned = {name: [(slot.node_index, slot.device_ids) for slot in slots] for name, slots in plan.workers.items()}
    if planned != scan_per_worker(groups, nodes):
        raise SystemExit("the plan differs from the scan: the times cannot be compared")
    plan_s, scan_s = (lambda: seconds_of(lambda: plan_placement(groups, nodes))), (lambda: seconds_of(lambda: scan_per_worker(groups, nodes)))
    figures = paired(min(pairs, 5), plan_s, scan_s)
    return [Row("placement of 16,384 GPUs in 8 groups", figures[0], "scan for every worker", *figures[1:], most_seconds=0.5)]


def import_seconds(module: str) -> float:
    program = f"import time; start = time.process_time(); import {module}; print(time.process_time() - start)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True).stdout)


def imports(pairs: int) -> list[Row]:
    rows: list[Row] = []
    for module, bound, runs in (("numpy", 1.3, pairs), ("torch.distributed.device_mesh", None, min(pairs, 3))):
        if find_spec(module.partition(".")[0]) is not None:
            figures = paired(runs, lambda: import_seconds("twinkle_mesh"), lambda module=module: import_seconds(module))
            rows.append(Row("import twinkle_mesh", figures[0], f"import {module}", *figures[1:], most_ratio=bound))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    pairs = parser.parse_args().pairs
    rows: list[Row] = []
    for measure in (beside_torch, beside_megatron, placement, imports):
        for row in measure(pairs):
            print(row, flush=True)
            rows.append(row)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
