"""Plan a reinforcement-learning job on three nodes of 8 GPUs and draw it. Needs twinkle-mesh only and starts nothing.

python examples/topology.py [--svg FILE]
"""

import argparse
from pathlib import Path

from twinkle_mesh import DeviceGroup, DeviceMesh, Node, draw_topology, plan_placement

parser = argparse.ArgumentParser(description="Draw a planned job.")
parser.add_argument("--svg", type=Path, help="write the drawing to this file instead of printing it as plain text")
args = parser.parse_args()

groups = [
    DeviceGroup(name="actor", ranks=16, device_type="cuda"),
    DeviceGroup(name="sampler", ranks=8, device_type="cuda", gpus_per_worker=2),
    DeviceGroup(name="reward", ranks=2, device_type="cpu"),
]
nodes = [Node(f"10.0.0.{i}", num_gpus=8, num_cpus=64) for i in range(1, 4)]
components = [
    ("sampler", "sampler", None),
    ("reward", "reward", None),
    ("model", "actor", DeviceMesh.from_sizes(dp_size=2, pp_size=2, tp_size=4)),
]
plan = plan_placement(groups, nodes)
if args.svg is None:
    print(draw_topology(groups, components, plan))
else:
    args.svg.write_text(draw_topology(groups, components, plan, format="svg"), encoding="utf-8")
