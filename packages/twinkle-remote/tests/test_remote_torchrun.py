"""Under torchrun: the same script in several processes."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

SCRIPT = """
import sys
import torch.distributed as dist
import twinkle_remote as tr
from twinkle_mesh import DeviceGroup, DeviceMesh, launcher_rank

@tr.remote_class()
class Model:
    @tr.remote_function(dispatch="slice_dp", collect="mean", lazy_collect=False)
    def loss(self, batch):
        return {"n": float(len(batch)), f"rank{launcher_rank()}": 1.0 + launcher_rank()}

    @tr.remote_function(collect="flatten")
    def mine(self, batch):
        return [launcher_rank()] * len(batch)

rank = launcher_rank()
try:
    tr.initialize("local", groups=[DeviceGroup("a", 1, "cpu"), DeviceGroup("b", 2, "cpu")])
except tr.GroupError as error:
    assert "torchrun --nproc-per-node 1" in str(error), error
try:
    tr.initialize("local", groups=[DeviceGroup("a", [0, 1], "cuda"), DeviceGroup("b", [2, 3], "cuda")])
except tr.GroupError as error:
    assert "different ranks" in str(error) and "ray" in str(error), error
try:
    tr.initialize("ray")
except tr.GroupError as error:
    assert "plain python" in str(error), error
with tr.initialize("local", groups=[DeviceGroup("a", 2, "cpu")]) as runtime:
    assert (runtime.mode, runtime.slices_in_loader) == ("torchrun", True)
    model = Model(remote_group="a")
    batch = [0] * (3 + 2 * rank)
    alone = model.loss(batch)
    assert alone == {"n": len(batch), f"rank{rank}": 1.0 + rank}, alone  # the control: nothing reduces before the ranks have met
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    both = model.loss(batch)
    assert both == {"n": (3 * 3 + 5 * 5) / 8, "rank0": 1.0, "rank1": 2.0}, both  # over the items
    assert model.mine(batch).get() == [rank] * len(batch)
    tensor_parallel = Model(remote_group="a", device_mesh=DeviceMesh.from_sizes(tp_size=2))
    assert tensor_parallel.loss(batch)["n"] == len(batch)
    dist.destroy_process_group()
print("fine", rank)
"""


def test_mean_reduces_over_data_ranks_and_groups_are_checked(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # They meet in a file: torchrun's own agent would hold a port, but these two processes have none.
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "meeting")],
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
    assert all(f"fine {rank}" in output for rank, output in enumerate(outputs))
