"""What the ranks of the transport tests do: rank 0 sends, the others receive. Run by the `run_ranks` fixture, one process a rank."""

import os
import pickle
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from twinkle_remote import initialize
from twinkle_sync import Bucket, Deadline, Message, Route, StateDict, TransferPlan, WeightReceiver, WeightSender

TRANSPORT = "gloo"


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [
        ("embed.weight", torch.randn(50, 16, generator=generator)),
        ("layers.0.q.weight", torch.randn(16, 16, generator=generator).to(torch.bfloat16)),
        ("layers.0.scale", torch.tensor(float(version))),
        ("layers.0.empty", torch.zeros(0, 4)),
        ("head.bias", torch.randn(50, generator=generator)),
        (f"with_a_long_name.{'x' * 5000}", torch.ones(3)),
    ]


class Source(WeightSender):
    version = 0
    fail_after = -1
    seconds_per_tensor = 0.0

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(weights(self.version)):
            if index == self.fail_after:
                raise RuntimeError("the trainer's export failed")
            time.sleep(self.seconds_per_tensor)
            yield item


class Sink(WeightReceiver):
    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.die_at = ""
        self.seconds_per_tensor = 0.0

    def load_weights(self, tensors: Any, version: int) -> None:
        loaded = {}
        for name, tensor in tensors:
            if name == self.die_at:
                os._exit(3)
            time.sleep(self.seconds_per_tensor)
            loaded[name] = tensor
        self.weights = loaded


class Lossy:
    """Forgets to send one bucket, or stops sending altogether; mixed into a transport."""

    drop = -1
    stop_at = -1
    _sequence: int

    def send_message(self, message: Message, deadline: Deadline) -> None:
        if self._sequence == self.drop and isinstance(message, Bucket):
            self._sequence += 1
            return
        if self.stop_at >= 0 and self._sequence >= self.stop_at:
            return
        parent: Any = super()
        parent.send_message(message, deadline)


class Rank:
    def __init__(self, rank: int, world_size: int, address: Any, timeout_s: float = 20.0) -> None:
        os.environ["RANK"] = str(max(0, rank - 1))  # of the trainer's group or of the sampler's
        # A board of Ray is slower to find than a port.
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s * (2 if TRANSPORT == "ray" else 1)
        self.source, self.sink = Source(), Sink()
        if rank == 0:
            opened = self.source.open_weight_channel(TRANSPORT, 20.0)
            for _ in range(world_size - 1):
                address.put(opened)
            self.address = opened
        else:
            self.address = address.get(timeout=60)

    def plan(self, version: int, bucket_size_bytes: int = 512) -> TransferPlan:
        return TransferPlan(
            transport=TRANSPORT,
            routes={0: Route(self.address, self.world_size)},
            places=tuple((0, number) for number in range(1, self.world_size)),
            version=version,
            bucket_size_bytes=bucket_size_bytes,
            timeout_s=self.timeout_s,
            verify=True,
        )

    def lose(self) -> None:
        transport: Any = self.source._send_transport
        transport.__class__ = type("LossyTransport", (Lossy, type(transport)), {})

    def transfer(self, version: int) -> Any:
        if self.rank == 0:
            self.source.version = version
            self.source.send_weights(self.plan(version)).get()
            return None
        return self.sink.receive_weights(self.plan(version)).get()


def _equal(sink: Sink, version: int) -> bool:
    expected = dict(weights(version))
    return list(sink.weights) == list(expected) and all(
        tensor.dtype == expected[name].dtype and torch.equal(tensor.cpu(), expected[name]) for name, tensor in sink.weights.items()
    )


def three_syncs(rank: int, world_size: int, address: Any) -> Any:
    me = Rank(rank, world_size, address)
    results, groups = [], set()
    for version in (1, 2, 3):
        receipt = me.transfer(version)
        results.append((receipt, rank == 0 or _equal(me.sink, version)))
        transport: Any = me.source._send_transport if rank == 0 else me.sink._receive_transport
        groups.add(id(getattr(transport, "_group", transport)))
    return results, len(groups), dist.is_initialized()


def beside_a_default_group(rank: int, world_size: int, address: Any, store_file: str) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=world_size)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    me = Rank(rank, world_size, address)
    me.transfer(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item(), rank == 0 or _equal(me.sink, 1)


def source_raises_then_recovers(rank: int, world_size: int, address: Any) -> Any:
    me = Rank(rank, world_size, address)
    me.source.fail_after = 3
    refused = False
    try:
        me.transfer(1)
    except Exception as error:
        first = f"{type(error).__name__}: {error}"
        try:
            me.sink.require_weights()
        except Exception:
            refused = True
    else:
        first = "no error"
    me.source.fail_after = -1
    if rank == 0:
        me.address = me.source.open_weight_channel(TRANSPORT, me.timeout_s)
        for _ in range(world_size - 1):
            address.put(me.address)
    else:
        me.address = address.get(timeout=20)
    me.transfer(2)
    me.sink.require_weights()
    return first, refused, rank == 0 or _equal(me.sink, 2)


def lost_bucket(rank: int, world_size: int, address: Any) -> Any:
    me = Rank(rank, world_size, address, timeout_s=5.0)
    if rank == 0:
        Lossy.drop = 2
        me.lose()
    return me.transfer(1)


def lost_end(rank: int, world_size: int, address: Any) -> Any:
    me = Rank(rank, world_size, address, timeout_s=3.0)
    if rank == 0:
        Lossy.stop_at = 4
        me.lose()
        me.transfer(1)
        time.sleep(me.timeout_s + 2.0)  # the board of Ray ends with this process
        return None
    return me.transfer(1)


def parts_of_a_tensor(rank: int, world_size: int, address: Any, store_file: str) -> Any:
    """A weight of which each rank has a part, as a source; what rank 0 would send."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(24.0).view(6, 4)
    source = StateDict({"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.ones(2)})
    sent = dict(source.iter_weights())
    specs = [(spec.name, spec.shape) for spec in source.weight_specs()]
    dist.destroy_process_group()
    return specs, torch.equal(sent["w"], whole), type(sent["w"]).__name__


class LargeSource(Source):
    tensor = torch.ones(0)
    count = 8

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not len(self.tensor):
            yield from super().iter_weights()
            return
        for index in range(self.count):
            yield f"layers.{index}.weight", self.tensor


class CopyingSink(Sink):
    tensor = torch.ones(0)

    def load_weights(self, tensors: Any, version: int) -> None:
        for _, tensor in tensors:
            if len(self.tensor):
                self.tensor.copy_(tensor)


def peak_memory(rank: int, world_size: int, address: Any, bucket_size_bytes: int) -> float:
    """The most memory during a transfer above that before it, in buckets."""
    me = Rank(rank, world_size, address)
    me.source, me.sink = LargeSource(), CopyingSink()
    if rank == 0:
        me.address = me.source.open_weight_channel(TRANSPORT, 20.0)
        address.put(me.address)
    else:
        me.address = address.get(timeout=60)
    me.transfer(1)  # opens the connection
    me.source.tensor = me.sink.tensor = torch.ones(bucket_size_bytes // 4)
    me.source._sent_specs = None  # or it would be held to the tensors of the first transfer

    def memory(name: str) -> int:
        with open("/proc/self/status") as stream:
            return next(int(line.split()[1]) * 1024 for line in stream if line.startswith(name))

    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")  # the peak counts from here on
    before = memory("VmRSS")
    if rank == 0:
        me.source.send_weights(me.plan(2, bucket_size_bytes)).get()
    else:
        me.sink.receive_weights(me.plan(2, bucket_size_bytes)).get()
    return (memory("VmHWM") - before) / bucket_size_bytes


def receiver_dies(rank: int, world_size: int, address: Any) -> Any:
    me = Rank(rank, world_size, address, timeout_s=5.0)
    me.source.seconds_per_tensor = 0.05
    if rank == world_size - 1:
        me.sink.die_at = "embed.weight"  # more messages than may be ahead of it are still to come
    return me.transfer(1)


def sender_dies(rank: int, world_size: int, address: Any) -> Any:
    me = Rank(rank, world_size, address, timeout_s=5.0)
    if rank == 0:
        real = me.source.iter_weights

        def die() -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(real())[:3]
            os._exit(3)

        me.source.iter_weights = die
    return me.transfer(1)


def one_never_comes(rank: int, world_size: int, address: Any) -> Any:
    me = Rank(rank, world_size, address, timeout_s=3.0)
    if rank == world_size - 1:
        return None
    return me.transfer(1)


def sender_is_slow(rank: int, world_size: int, address: Any) -> Any:
    me = Rank(rank, world_size, address, timeout_s=2.0)
    me.source.seconds_per_tensor = 1.0
    return me.transfer(1)


def receiver_is_slow(rank: int, world_size: int, address: Any) -> Any:
    me = Rank(rank, world_size, address, timeout_s=2.0)
    if rank == world_size - 1:
        me.sink.seconds_per_tensor = 1.0
    return me.transfer(1)


if __name__ == "gloo_rank":
    torch.set_num_threads(1)
    name, _rank, _world_size, _address, _pipe, _arguments = globals()["CALL"]
    TRANSPORT = _arguments.pop("transport", TRANSPORT)
    if _cluster := _arguments.pop("cluster", None):
        os.environ.update(_cluster["environment"])
        initialize("ray", address=_cluster["address"])
    if TRANSPORT == "nccl":
        torch.cuda.set_device(_rank)
    _started = time.monotonic()
    try:
        _outcome: dict[str, Any] = {"value": globals()[name](_rank, _world_size, _address, **_arguments)}
    except Exception as _error:
        _outcome = {"error": _error, "traceback": traceback.format_exc()}
    _pipe.send_bytes(pickle.dumps(_outcome | {"seconds": time.monotonic() - _started}))
    _pipe.close()
