"""Weight transfer between two processes on Ray beside one raw gloo broadcast of the same bytes; the bytes of a delta.

The raw side broadcasts one flat tensor over a group of its own and copies its parts into the receiver's tensors, which is what the
receiver of the transfer does with the tensors that it gets. Both alternate in one run. `--mebibytes` sets the size.
"""

import argparse
import importlib
import os
import time
from datetime import timedelta
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from paired import pairs

from twinkle_mesh import DeviceGroup
from twinkle_remote import held_port, initialize, remote_class, remote_function
from twinkle_sync import CheckpointEngineManager, WeightReceiver, WeightSender

dist: Any = importlib.import_module("torch.distributed")


def make_weights(mebibytes: int) -> dict[str, torch.Tensor]:
    """Layers of one large and two small bf16 tensors."""
    layers = max(1, mebibytes // 8)
    generator = torch.Generator().manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        made[f"layers.{layer}.weight"] = torch.randn(2048, 2000, generator=generator).bfloat16()
        made[f"layers.{layer}.bias"] = torch.randn(2000, generator=generator).bfloat16()
        made[f"layers.{layer}.norm"] = torch.randn(48, 2000, generator=generator).bfloat16()
    return made


class Raw:
    """One end of a raw broadcast."""

    group: Any = None
    store: Any = None
    weights: dict[str, torch.Tensor]

    def join(self, address: str, rank: int) -> None:
        host, _, port = address.rpartition(":")
        if self.store is None:
            self.store = dist.TCPStore(host, int(port), wait_for_workers=False)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=120)
        self.group = dist.ProcessGroupGloo(self.store, rank, 2, options)
        self.flat = torch.empty(sum(tensor.nbytes for tensor in self.weights.values()), dtype=torch.uint8)


@remote_class()
class Trainer(WeightSender, Raw):
    """Sends its tensors, or broadcasts one copy of them."""

    def __init__(self, mebibytes: int) -> None:
        self.weights = make_weights(mebibytes)

    def iter_weights(self) -> Any:
        yield from self.weights.items()

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def raw_listen(self) -> str:
        port = held_port()
        self.store = dist.TCPStore(port.host, port.port, is_master=True, wait_for_workers=False, master_listen_fd=port.listen_fd)
        return f"{port.host}:{port.port}"

    @remote_function(dispatch="all", collect="first")
    def raw_join(self, address: str) -> None:
        self.join(address, 0)

    @remote_function(dispatch="all", collect="first")
    def raw_send(self) -> None:
        offset = 0
        for tensor in self.weights.values():
            self.flat[offset : offset + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
            offset += tensor.nbytes
        self.group.broadcast([self.flat], dist.BroadcastOptions()).wait()

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def change(self, density: float, seed: int) -> int:
        """Change that share of all elements; returns the bytes of all tensors."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.weights.values():
            flat = tensor.view(-1)
            chosen = torch.randint(flat.numel(), (int(flat.numel() * density),), generator=generator)
            flat[chosen] += 1.0
        return sum(tensor.nbytes for tensor in self.weights.values())


@remote_class()
class Sampler(WeightReceiver, Raw):
    """Copies what it gets into its own tensors."""

    def __init__(self, mebibytes: int) -> None:
        self.weights = {name: torch.zeros_like(tensor) for name, tensor in make_weights(mebibytes).items()}

    def load_weights(self, tensors: Any, version: int) -> None:
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)

    @remote_function(dispatch="all", collect="first")
    def raw_join(self, address: str) -> None:
        self.join(address, 1)

    @remote_function(dispatch="all", collect="first")
    def raw_receive(self) -> None:
        self.group.broadcast([self.flat], dist.BroadcastOptions()).wait()
        offset = 0
        for tensor in self.weights.values():
            tensor.copy_(self.flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            offset += tensor.nbytes

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def peak_extra_bytes(self, reset: bool = False) -> int:
        """The most memory that this process has held above what it held at the last reset."""
        if reset:
            with open("/proc/self/clear_refs", "w") as stream:
                stream.write("5")
            self.base = _status("VmRSS")
            return 0
        return _status("VmHWM") - self.base


def _status(name: str) -> int:
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) * 1024 for line in stream if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--bucket-mebibytes", type=int, default=16)
    arguments = parser.parse_args()
    trainer_class: Any = Trainer
    sampler_class: Any = Sampler
    with initialize("ray", groups=[DeviceGroup(name, 1, "cpu") for name in ("trainer", "sampler")], threads_per_worker=1, start_timeout_s=400):
        trainer, sampler = (cls(arguments.mebibytes, remote_group=name) for cls, name in ((trainer_class, "trainer"), (sampler_class, "sampler")))
        address = trainer.raw_listen()
        joined = trainer.raw_join(address), sampler.raw_join(address)
        for one in joined:
            one.get()

        def raw() -> None:
            received, sent = sampler.raw_receive(), trainer.raw_send()
            received.get()
            sent.get()

        for transport, verify in (("gloo", False), ("gloo", True), ("folder", True)):
            manager = CheckpointEngineManager(
                model=trainer, sampler=sampler, bucket_size_bytes=arguments.bucket_mebibytes << 20, transport=transport, verify=verify
            )
            manager.sync_weights()
            sampler.peak_extra_bytes(reset=True)
            manager.sync_weights()
            extra = sampler.peak_extra_bytes() / (arguments.bucket_mebibytes << 20)
            raw_s, ours_s, ratio = pairs(raw, manager.sync_weights, arguments.rounds, warm_up=2)
            name = f"{arguments.mebibytes} MiB, {transport}, {'with' if verify else 'without'} checksums"
            print(f"{name:44} {raw_s * 1e3:9.2f} ms {ours_s * 1e3:9.2f} ms {ratio:7.3f} x   aim 1.25   {extra:5.2f} buckets of memory", flush=True)
        manager = CheckpointEngineManager(model=trainer, sampler=sampler, bucket_size_bytes=arguments.bucket_mebibytes << 20)
        manager.sync_weights("delta")
        for density in (0.02, 0.2):
            total = trainer.change(density, 1)
            start = time.perf_counter()
            report = manager.sync_weights("delta")
            seconds = time.perf_counter() - start
            print(
                f"{f'delta, {density:.0%} of bf16 elements':44} {report.size_bytes / total:9.4f} x the bytes, {seconds:.3f} s   aim 0.08 at 2%",
                flush=True,
            )


if __name__ == "__main__":
    main()
