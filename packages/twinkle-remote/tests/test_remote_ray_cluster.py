"""Several nodes: real raylets on one machine, each with an address of its own. One cluster serves the module; its last test takes a node away."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("ray")

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

import twinkle_remote as tr
from twinkle_mesh import DeviceGroup, PlacementError

SECOND, THIRD = "127.0.0.2", "127.0.0.3"
pytestmark = pytest.mark.timeout(300)  # three raylets to start
GROUPS = [DeviceGroup("wide", 5, "cpu"), DeviceGroup("gpus", [0, 1, 2, 3], "cuda", gpus_per_worker=2), DeviceGroup("near", [0], "cuda")]
COMPRESS_ABOVE = 2 << 20
OTHER_DRIVER = """
import os, sys, time
import twinkle_remote as tr
from twinkle_mesh import DeviceGroup

@tr.remote_class()
class Part:
    @tr.remote_function(dispatch="all")
    def work(self, seconds=0.0):
        time.sleep(seconds)
        return os.getpid()

tr.initialize("ray", groups=[DeviceGroup("other", 1, "cpu")], address=sys.argv[1])
part = Part(remote_group="other")
print("pid", part.work().get(), flush=True)
part.work(600).get()
"""


@tr.remote_class()
class Where:
    @tr.remote_function(dispatch="all", lazy_collect=False)
    def where(self):
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")
        return SimpleNamespace(node=ray.util.get_node_ip_address(), pid=os.getpid(), **{name: os.environ.get(name) for name in names})

    @tr.remote_function(dispatch="all", lazy_collect=False, timeout_s=60)
    def meet(self):
        """All ranks connect to the socket that rank 0 holds."""
        place = tr.rendezvous()
        assert place is not None
        if place.listen_fd is None:
            with socket.create_connection((place.host, place.port), timeout=30):
                return place.host
        with socket.socket(fileno=os.dup(place.listen_fd)) as listener:
            listener.settimeout(30)
            for _ in range(place.world_size - 1):
                listener.accept()[0].close()
        return place.host

    @tr.remote_function(dispatch="slice_dp", collect="flatten")
    def echo(self, values):
        return values

    @tr.remote_function(dispatch="all", lazy_collect=False)
    def total(self, values):
        return int(values.sum())


def start_cluster(folder):
    """A head and two nodes with addresses of their own. Ray 2.60 gives a raylet 30 s to start, whatever the machine is busy with, and one that starts
    after that stays: so it is tried again as a whole.
    """
    for tries_left in (3, 2, 1, 0):
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=1, temp_dir=folder, include_dashboard=False, object_store_memory=80 << 20)
            nodes = [cluster.add_node(num_cpus=2, num_gpus=2, node_ip_address=host, object_store_memory=80 << 20) for host in (SECOND, THIRD)]
        except Exception as error:
            cluster.shutdown()
            if type(error) is not Exception or not tries_left:  # a late raylet is a bare one; anything else is a fault
                raise
        else:
            return cluster, nodes[1]
    raise AssertionError("the last try returns or raises")


@pytest.fixture(scope="module")
def cluster():
    folder = tempfile.mkdtemp(prefix="tc", dir="/tmp")  # short: Ray's sockets lie in it
    # Ray 2.60 writes the cluster's address there, and does not make the folder when another was given for the session.
    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
    cluster, third = start_cluster(folder)
    try:
        yield SimpleNamespace(address=cluster.address, remove_third=lambda: cluster.remove_node(third, allow_graceful=False))
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def runtime(cluster):
    with tr.initialize("ray", groups=GROUPS, address=cluster.address, compress="zstd", compress_above_bytes=COMPRESS_ABOVE) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def wide(runtime):
    return Where(remote_group="wide", on_failure="restart")


def test_a_short_cluster_is_refused_with_what_each_node_has_before_anything_starts(cluster):
    with pytest.raises(PlacementError) as caught:
        tr.initialize("ray", groups=[DeviceGroup("big", 6, "cuda")], address=cluster.address)
    text = str(caught.value)
    assert "'big' needs 6 worker(s)" in text
    assert "only 4 fit" in text
    assert all(f"({address}): 2 of 2 cuda" in text for address in (SECOND, THIRD))
    assert not ray.is_initialized()


def test_a_group_spans_nodes_with_its_ranks_in_node_order(wide, runtime):
    places = wide.where()
    nodes = [place.node for place in places]
    assert sorted(nodes.count(node) for node in set(nodes)) == [1, 2, 2]
    assert len({node for before, node in zip([None, *nodes], nodes, strict=False) if node != before}) == 3  # each node once
    assert [runtime.plan.nodes[slot.node_index].address for slot in runtime.plan.workers["wide"]] == nodes
    for node in set(nodes):
        on_node = [place for place in places if place.node == node]
        assert [place.LOCAL_RANK for place in on_node] == [str(index) for index in range(len(on_node))]
        assert {place.LOCAL_WORLD_SIZE for place in on_node} == {str(len(on_node))}


def test_the_ranks_meet_on_the_node_of_rank_0(wide):
    first = wide.where()[0]
    assert first.node == first.MASTER_ADDR
    assert wide.meet() == [first.node] * 5
    assert len({place.pid for place in wide.where()}) == 5


def test_the_devices_of_a_worker_are_on_one_node(runtime):
    places = Where(remote_group="gpus").where()
    assert sorted(place.node for place in places) == [SECOND, THIRD]
    assert [place.CUDA_VISIBLE_DEVICES for place in places] == ["0,1", "0,1"]


def test_a_batch_crosses_nodes(wide, runtime):
    batch = [np.full(50_000, i) for i in range(7)]
    assert [int(array[0]) for array in Where(remote_group="gpus").echo(wide.echo(batch))] == list(range(7))


def stored_bytes(address):
    """What a node's store has held in all: what its workers put there, and what came from other nodes."""
    node = next(node for node in ray.nodes() if node["NodeManagerAddress"] == address)
    return node_stats(address, node["NodeManagerPort"], include_memory_info=False).store_stats.cumulative_created_bytes


def test_what_goes_to_another_node_is_compressed_above_the_size(wide, runtime):
    near = Where(remote_group="near")
    place = near.where()
    assert place.node in (SECOND, THIRD)  # the driver's node has no devices
    even = np.ones(8 << 20, np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, 8 << 20, np.uint8)
    below = np.ones(COMPRESS_ABOVE // 2, np.uint8)
    came = []
    for values in (even, noise, below):
        before = stored_bytes(place.node)
        assert near.total(values) == int(values.sum())
        came.append(stored_bytes(place.node) - before)
    assert 0 < came[0] < len(even) // 100
    assert came[1] >= len(noise)  # the controls: what does not shrink, and what is below the size
    assert came[2] >= len(below)


def test_the_workers_of_a_driver_that_is_killed_end(cluster, wide, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(OTHER_DRIVER)
    driver = subprocess.Popen([sys.executable, str(script), cluster.address], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert driver.stdout is not None
        line = driver.stdout.readline()
        assert line.startswith("pid "), line
        pid = int(line.split()[1])
        assert Path(f"/proc/{pid}").exists()
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
    assert len(wide.where()) == 5


def test_the_loss_of_a_node_is_told_and_a_restart_says_what_is_missing(cluster, wide):
    nodes = [place.node for place in wide.where()]
    lost_ranks = [rank for rank, node in enumerate(nodes) if node == THIRD]
    near = Where(remote_group="near")
    kept, lost = (wide.echo([np.full(50_000, i) for i in range(5)]) for _ in range(2))
    assert len(kept.get()) == 5
    while not lost.ready():
        time.sleep(0.01)
    cluster.remove_third()
    with pytest.raises(tr.WorkerDiedError, match=rf"rank {lost_ranks[0]} of .*on {THIRD}|rank {lost_ranks[1]} of .*on {THIRD}"):
        wide.where()
    assert [int(array[0]) for array in near.echo([kept[0]])] == [0]  # what was collected is here
    with pytest.raises(tr.WorkerDiedError, match=r"the result of Where.echo.* is lost: its worker has ended"):
        lost.get()
    with pytest.raises(tr.WorkerDiedError, match="a LazyResult among the arguments of echo is lost"):
        near.echo(lost).get()
    deadline = time.monotonic() + 60
    while THIRD in {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]} and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(tr.WorkerDiedError, match=rf"node {THIRD} \(ranks \[{lost_ranks[0]}, {lost_ranks[1]}\]\) is gone"):
        wide.where()
