"""What remote calls cost beside raw Ray: calls, batches, lazy chains, dispatch, collect, import; --soak: 10,000 calls and what they leave.

Each comparison alternates the two sides in one run, so that the machine's load hits both alike, and prints the medians and the median of the
pairs' ratios. `--only NAME` (calls, batch, chain, nodes, plan, import) runs one of them.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from paired import pairs

import twinkle_remote as tr
from twinkle_mesh import DeviceGroup, DeviceMesh

ROWS, COLUMNS, WIDTH = 512, "abcde", 4096
_SECOND = "127.0.0.2"
BATCH_BYTES = ROWS * len(COLUMNS) * WIDTH * 4


@tr.remote_class()
class Part:
    """The component."""

    def __init__(self, remote_group: str | None = None) -> None:
        self.taken = 0

    @tr.remote_function(dispatch="all", lazy_collect=False)
    def noop(self) -> None:
        return None

    @tr.remote_function(dispatch="slice_dp", lazy_collect=False)
    def take(self, rows: Sequence[dict[str, Any]]) -> int:
        return len(rows)

    @tr.remote_function(dispatch="slice_dp", collect="flatten")
    def make(self, seeds: list[int]) -> list[dict[str, Any]]:
        return make_rows(seeds)

    @tr.remote_function(dispatch="all")
    def count(self) -> None:
        count_what_is_taken(self)

    @tr.remote_function(dispatch="all", lazy_collect=False)
    def taken_bytes(self) -> int:
        return self.taken

    @tr.remote_function(dispatch="all", lazy_collect=False)
    def rss(self) -> float:
        return rss_bytes()


class RawPart:
    """The same as a plain actor, which is told what to hold by hand."""

    def noop(self) -> None:
        return None

    def take(self, *shards: list[dict[str, Any]]) -> int:
        return sum(map(len, shards))

    def make(self, seeds: list[int]) -> list[dict[str, Any]]:
        return make_rows(seeds)


def make_rows(seeds: list[int]) -> list[dict[str, Any]]:
    """Rows of five arrays; 512 are 42 MB."""
    return [{name: np.full(WIDTH, seed, np.int32) for name in COLUMNS} for seed in seeds]


def count_what_is_taken(part: Any) -> None:
    """From now on `part.taken` counts the stored sizes of all pieces that this process takes."""
    from twinkle_remote import _shards

    original = _shards._values

    def counting(pieces: Any, timeout_s: float | None) -> list[Any]:
        import ray

        stored = [piece for piece in pieces if not isinstance(piece, _shards.Inline)]
        part.taken += sum(one.size_bytes for one in ray.get(stored))
        return original(pieces, timeout_s)

    _shards._values = counting


def rss_bytes() -> float:
    """Memory of this process that it shares with nobody (not the object store's)."""
    import psutil

    return psutil.Process().memory_full_info().uss


def show(name: str, measured: tuple[float, float, float], aim: str) -> None:
    raw_s, ours_s, ratio = measured
    print(f"{name:44} {raw_s * 1e3:9.2f} ms {ours_s * 1e3:9.2f} ms {ratio:7.3f} x   aim {aim}", flush=True)


def raw_actors(ray: Any, count: int, **options: Any) -> list[Any]:
    return [ray.remote(RawPart).options(num_cpus=0, **options).remote() for _ in range(count)]


def bench_calls(ray: Any, parts: dict[int, Part], count: int) -> None:
    for workers, part in parts.items():
        actors = raw_actors(ray, workers)
        show(f"no-op call to {workers} workers", pairs(lambda a=actors: ray.get([one.noop.remote() for one in a]), part.noop, count), "1.05")


def bench_batch(ray: Any, parts: dict[int, Part], count: int) -> None:
    rows = make_rows(list(range(ROWS)))
    for workers, part in parts.items():
        actors = raw_actors(ray, workers)
        shards = [rows[i * ROWS // workers : (i + 1) * ROWS // workers] for i in range(workers)]

        def raw(actors: list[Any] = actors, shards: list[Any] = shards) -> None:
            ray.get([actor.take.remote(shard) for actor, shard in zip(actors, shards, strict=True)])

        show(f"42 MB of rows through slice_dp, {workers} workers", pairs(raw, lambda part=part: part.take(rows), count), "1.05")


def bench_chain(ray: Any, parts: dict[int, Part], count: int) -> None:
    seeds = list(range(ROWS))
    for workers, producer in parts.items():
        consumer = Part(remote_group="two" if workers == 2 else "four")
        makers, takers = raw_actors(ray, workers), raw_actors(ray, workers)
        shares = [seeds[i * ROWS // workers : (i + 1) * ROWS // workers] for i in range(workers)]

        def raw(makers: list[Any] = makers, takers: list[Any] = takers, shares: list[Any] = shares) -> None:
            made = [maker.make.remote(share) for maker, share in zip(makers, shares, strict=True)]
            ray.get([taker.take.remote(shard) for taker, shard in zip(takers, made, strict=True)])

        show(
            f"lazy chain over 42 MB, {workers} to {workers} workers", pairs(raw, lambda a=producer, b=consumer: b.take(a.make(seeds)), count), "1.05"
        )
    consumer = Part(remote_group="four")
    consumer.count().get()
    through_driver = _driver_bytes(lambda: consumer.take(parts[2].make(seeds)))
    taken: Any = consumer.taken_bytes()
    print(f"{'chain, 2 to 4 workers: taken by consumers':44} {sum(taken) / BATCH_BYTES:9.4f} x the batch        aim 1.00")
    print(f"{'chain, 2 to 4 workers: through the driver':44} {through_driver / 1024:9.2f} KiB              aim 64", flush=True)


def _driver_bytes(call: Callable[[], Any]) -> int:
    """Bytes that the driver pickles into arguments or unpickles from answers during `call`."""
    from twinkle_remote import _ray_calls, _ray_sending

    seen = [0]
    heard, sent = _ray_calls.heard, _ray_sending.write

    def size(value: Any) -> int:
        import ray.cloudpickle

        return len(value) if isinstance(value, bytes) else getattr(value, "size_bytes", 0) or len(ray.cloudpickle.dumps(value))

    def hearing(answer: Any) -> Any:
        seen[0] += size(answer)
        return heard(answer)

    def writing(*content: Any) -> Any:
        message = sent(*content)
        seen[0] += size(message)
        return message

    _ray_calls.heard, _ray_sending.write = hearing, writing
    try:
        call()
    finally:
        _ray_calls.heard, _ray_sending.write = heard, sent
    return seen[0]


def bench_nodes() -> None:
    """The chain between two raylets: how much the object manager of the consumers' node receives."""
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 400 << 20})
    cluster.add_node(num_cpus=2, node_ip_address=_SECOND, object_store_memory=400 << 20)
    seeds = list(range(ROWS))
    try:
        for compress in (None, "zstd"):
            groups = [DeviceGroup("here", 2, "cpu"), DeviceGroup("there", 2, "cpu")]
            with tr.initialize("ray", groups=groups, address=cluster.address, compress=compress, cpus_per_rank=1) as runtime:
                assert runtime.plan is not None
                nodes = [runtime.plan.nodes[runtime.plan.workers[name][0].node_index].address for name in ("here", "there")]
                assert len(set(nodes)) == 2
                far = "there" if nodes[1] == _SECOND else "here"
                producer, consumer = Part(remote_group="here" if far == "there" else "there"), Part(remote_group=far)
                consumer.take(producer.make(seeds))
                before = _stored_bytes(_SECOND)
                start = time.perf_counter()
                consumer.take(producer.make(seeds))
                seconds = time.perf_counter() - start
                moved = _stored_bytes(_SECOND) - before
                print(f"{f'chain between two nodes, compress={compress}':44} {moved / BATCH_BYTES:9.4f} x the batch, {seconds:.3f} s", flush=True)
    finally:
        cluster.shutdown()


def _stored_bytes(address: str) -> int:
    """Bytes that a node's store has ever held: what its workers put there and what its object manager has received. The consumers put none."""
    import ray
    from ray._private.internal_api import node_stats

    node = next(node for node in ray.nodes() if node["NodeManagerAddress"] == address)
    return node_stats(address, node["NodeManagerPort"], include_memory_info=False).store_stats.cumulative_created_bytes


class StubHost:
    """As much of a runtime as a call needs."""

    is_open = True
    trace = None
    token = ""

    def __init__(self) -> None:
        from twinkle_remote._ray_gate import Gate

        self.gate = Gate()

    def known_splits(self) -> tuple[int, ...]:
        return (2, 4)

    def compression(self, group_name: str) -> tuple[int | None, frozenset[int]]:
        return None, frozenset()


def bench_plan() -> None:
    """Dispatch to 4,096 workers with a stub in place of Ray's transport, and the collect of 4,096 results."""
    from twinkle_remote import _ray_sending
    from twinkle_remote._collect import flatten
    from twinkle_remote._decorators import remote_methods
    from twinkle_remote._placement_arguments import FailurePolicy
    from twinkle_remote._ray_component import RayComponent
    from twinkle_remote._ray_messages import Limits
    from twinkle_remote._ray_places import Crew

    host: Any = StubHost()
    spec = remote_methods(Part)["make"]
    kept, _ray_sending.ray = _ray_sending.ray, SimpleNamespace(put=lambda value: value)
    actor: Any = SimpleNamespace(call=SimpleNamespace(remote=lambda *objects: objects))
    try:
        for workers in (1024, 2048, 4096):
            mesh = DeviceMesh.from_sizes(dp_size=workers // 8, tp_size=8)
            limits = Limits(start_timeout_s=60, call_timeout_s=60, peer_grace_s=10)
            component = RayComponent(host, "Part", "stub", mesh, limits, FailurePolicy())
            component._set_crew(Crew(actors=(actor,) * workers, hellos=()))
            columns = {name: np.arange(workers * 4, dtype=np.int32).reshape(workers, 4) for name in COLUMNS}

            def dispatch(component: RayComponent = component, columns: dict[str, Any] = columns) -> None:
                component.call(spec, (columns,), {})
                component._calls.clear()

            print(
                f"{f'dispatch to {workers} workers, stub transport':44} {fastest_s(dispatch) * 1e3:9.2f} ms" + " " * 19 + "aim 20 at 4096", flush=True
            )
    finally:
        _ray_sending.ray = kept
    import torch

    for count in (1024, 4096):
        results = [{name: torch.zeros(1) for name in COLUMNS} for _ in range(count)]
        lists = [[row] * 4 for row in range(count)]
        alone_s = fastest_s(lambda results=results: [torch.cat([result[name] for result in results]) for name in COLUMNS])
        collect_s = fastest_s(lambda results=results: flatten(results))
        list_s = fastest_s(lambda lists=lists: flatten(lists))
        print(f"{f'collect of {count} dicts of 5 tensors':44} {alone_s * 1e3:9.2f} ms {collect_s * 1e3:9.2f} ms" + " " * 12 + "aim 20 more at 4096")
        print(f"{f'flatten of {count} lists':44} {list_s * 1e3:9.2f} ms", flush=True)


def fastest_s(call: Callable[[], Any], repeat: int = 7) -> float:
    """The least processor seconds of some calls: what else the machine does is not counted."""
    seconds: list[float] = []
    for _ in range(repeat):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)


def bench_import() -> None:
    code = "import time; s = time.process_time(); import {}; print(time.process_time() - s)"

    def import_s(name: str) -> float:
        return min(
            float(subprocess.run([sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=True).stdout) for _ in range(5)
        )

    numpy_s, ours_s = import_s("numpy"), import_s("twinkle_remote")
    print(f"{'import numpy alone, import twinkle_remote':44} {numpy_s * 1e3:9.2f} ms {ours_s * 1e3:9.2f} ms" + " " * 12 + "aim 200", flush=True)


def soak(ray: Any, part: Part, calls: int) -> None:
    """Many calls of all kinds, and what is left of them: memory and references."""
    import gc

    from ray._private.internal_api import memory_summary

    def once(index: int) -> None:
        if index % 10 == 0:
            part.take(part.make(list(range(8))))
        else:
            part.noop()

    def state() -> tuple[list[float], int]:
        gc.collect()
        summary = memory_summary(ray.get_runtime_context().gcs_address)
        return [rss_bytes(), *part.rss()], summary.count("LOCAL_REFERENCE") + summary.count("PINNED_IN_MEMORY")  # type: ignore[misc]

    for index in range(max(200, calls // 10)):
        once(index)
    before, references_before = state()
    start = time.perf_counter()
    for index in range(calls):
        once(index)
    seconds = time.perf_counter() - start
    after, references_after = state()
    growth = [later / earlier - 1 for earlier, later in zip(before, after, strict=True)]
    print(f"{calls} calls over 4 workers in {seconds:.1f} s")
    print(
        "memory, driver and workers: " + ", ".join(f"{earlier / 2**20:.1f} MiB {change:+.1%}" for earlier, change in zip(before, growth, strict=True))
    )
    print(f"references to stored objects: {references_before} before, {references_after} after", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300, help="pairs of no-op calls; batches are a tenth")
    parser.add_argument("--only", choices=("calls", "batch", "chain", "nodes", "plan", "import"))
    parser.add_argument("--soak", nargs="?", type=int, const=10_000, default=None, metavar="CALLS")
    options = parser.parse_args()

    def wanted(name: str) -> bool:
        return options.soak is None and options.only in (None, name)

    if any(map(wanted, ("calls", "batch", "chain", "plan", "import"))):
        print(f"{'':44} {'raw Ray':>12} {'twinkle':>12} {'ratio':>9}")
    if options.soak is not None or any(map(wanted, ("calls", "batch", "chain"))):
        with tr.initialize("ray", groups=[DeviceGroup("two", 2, "cpu"), DeviceGroup("four", 4, "cpu")], object_store_bytes=1 << 30):
            import ray  # after initialize, which sets its options

            if options.soak is not None:
                soak(ray, Part(remote_group="four"), options.soak)
                return
            parts = {2: Part(remote_group="two"), 4: Part(remote_group="four")}
            for name, bench, count in (("calls", bench_calls, options.calls), ("batch", bench_batch, 20), ("chain", bench_chain, 20)):
                if wanted(name):
                    bench(ray, parts, count)
    for name, bench_alone in (("plan", bench_plan), ("import", bench_import), ("nodes", bench_nodes)):
        if wanted(name):
            bench_alone()


if __name__ == "__main__":
    main()
