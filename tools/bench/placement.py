"""How long a placement of 16,384 devices takes, beside a scan over the nodes for every worker.

Run: python tools/bench/placement.py [--nodes 2048] [--devices-per-node 8] [--repeat 3]
"""

import argparse
import time
from collections.abc import Callable

from twinkle_mesh import DeviceGroup, DeviceMesh, Node, plan_placement


def scan_per_worker(groups: list[DeviceGroup], nodes: list[Node]) -> dict[str, list[tuple[int, tuple[str, ...]]]]:
    """The raw alternative: for every worker the first node, from the beginning, that has enough free devices."""
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


def fastest_s(call: Callable[[], object], repeat: int) -> float:
    """The least seconds of `repeat` calls: the others also measured what else the machine did."""
    seconds: list[float] = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--devices-per-node", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    total = options.nodes * options.devices_per_node
    nodes = [Node(f"node-{i}", options.devices_per_node, 64) for i in range(options.nodes)]
    groups = [DeviceGroup("actor", total // 2, "cuda"), DeviceGroup("sampler", total - total // 2, "cuda")]

    plan = plan_placement(groups, nodes)
    planned = {name: [(slot.node_index, slot.device_ids) for slot in slots] for name, slots in plan.workers.items()}
    if planned != scan_per_worker(groups, nodes):
        raise SystemExit("the plan differs from the scan: the times cannot be compared")
    plan_s = fastest_s(lambda: plan_placement(groups, nodes), options.repeat)
    scan_s = fastest_s(lambda: scan_per_worker(groups, nodes), options.repeat)
    print(f"devices                 {total}")
    print(f"plan_placement          {plan_s:.3f} s")
    print(f"scan for every worker   {scan_s:.3f} s")
    print(f"ratio (scan / plan)     {scan_s / plan_s:.1f}")

    mesh = DeviceMesh.from_sizes(dp_size=total // 128, tp_size=8, pp_size=16) if total % 128 == 0 else DeviceMesh.from_sizes(dp_size=total)
    calls = 10_000
    slice_s = fastest_s(lambda: [mesh.get_slice(total * 4, rank % total) for rank in range(calls)], options.repeat)
    print(f"get_slice               {slice_s / calls * 1e6:.1f} us on a mesh of {mesh.world_size} ranks")


if __name__ == "__main__":
    main()
