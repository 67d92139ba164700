"""vLLM on a GPU against a trainer's log-probabilities after every update, sleep and wake, and weight transfer over nccl and CUDA IPC.

    .venv/bin/python tests/gpu/sampler_check.py [--updates 5] [--dtype bfloat16]

One GPU: MegatronModel and vLLMSampler in one process (memory), then a sender and a receiver in two processes over cuda_ipc and gloo. Two or more
GPUs: also nccl. It prints one line a check and ends with status 1 when one fails. `--tiny` tries the script itself on a machine without a GPU (the
transports of GPUs are left out). Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import numpy as np
import torch

from twinkle_data import InputFeature
from twinkle_megatron import MegatronModel
from twinkle_mesh import DeviceMesh
from twinkle_remote import remote_class
from twinkle_sync import CheckpointEngineManager, Route, TransferPlan, WeightReceiver, WeightSender, WeightsUnavailable
from twinkle_train.testing import random_features, tiny_qwen3
from twinkle_vllm import vLLMSampler

VOCAB = 512
# Largest difference of log-probabilities over the sampled tokens. float32: kernels add up in other orders (TF32 is off); bfloat16: both sides round.
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.2}


class Report:
    """Prints checks, and knows whether all held."""

    failed = False

    def check(self, name: str, value: float, aim: float, *, above: bool = False) -> None:
        holds = value > aim if above else value <= aim
        self.failed = self.failed or not holds
        print(f"{'ok    ' if holds else 'FAILED'} {name:64} {value:.3e}   {'above' if above else 'at most'} {aim:.1e}", flush=True)


def check_updates(report: Report, folder: Path, device: str, dtype: str, updates: int) -> None:
    model = tiny_qwen3(folder, vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    precision: Any = "no" if dtype == "float32" else "bf16"
    # The sampler first: vLLM measures what memory is free when it starts.
    args: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 32, "dtype": dtype, "kv_cache_memory_bytes": 256 << 20}
    if device == "cuda":
        args["enable_sleep_mode"] = True
    mesh = DeviceMesh.from_sizes(dp_size=1, device_type=device)
    sampler = vLLMSampler(model, args, device_mesh=mesh)
    actor = MegatronModel(model, device_mesh=mesh, mixed_precision=precision)
    actor.set_loss("cross_entropy")
    actor.set_optimizer("adam", lr=1e-3)
    manager = CheckpointEngineManager(model=actor, sampler=sampler)
    for step in range(updates):
        actor.forward_backward(random_features((40, 60, 80), vocab_size=VOCAB, seed=step, weighted=False))
        actor.clip_grad_and_step(1.0)
        stale = distance(actor, sampler) if step else 1.0
        start = time.perf_counter()
        manager.sync_weights()
        seconds = time.perf_counter() - start
        report.check(f"{dtype}, update {step + 1}: sampler against trainer ({seconds:.3f} s a sync)", distance(actor, sampler), TOLERANCE[dtype])
        if dtype == "float32":
            report.check(f"{dtype}, update {step + 1}: before the sync (control)", stale, TOLERANCE[dtype], above=True)
    for level in (1, 2):
        before = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
        sampler.sleep(1 if level == 1 else 2)
        freed = torch.cuda.mem_get_info()[0] - before if device == "cuda" else 1
        report.check(f"{dtype}, sleep(level={level}): bytes of GPU memory that it frees", freed, 0.0, above=True)
        sampler.wake()
        if level == 2:
            try:
                sampler.sample([[5, 6, 7]])
                report.check("after sleep(level=2) sampling is refused until a sync", 1.0, 0.0)
            except WeightsUnavailable:
                report.check("after sleep(level=2) sampling is refused until a sync", 0.0, 0.0)
            manager.sync_weights()
        report.check(f"{dtype}, after sleep(level={level}): sampler against trainer", distance(actor, sampler), TOLERANCE[dtype])


def distance(actor: Any, sampler: Any) -> float:
    """Largest difference of the log-probabilities of sampled tokens."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, VOCAB, size).tolist() for size in (5, 30, 90)]
    responses = [response.raise_for_error() for response in sampler.sample(prompts, {"max_tokens": 32, "temperature": 0.7}, num_samples=2)]
    features: list[InputFeature] = [sequence.new_input_feature for response in responses for sequence in response.sequences]
    worst = 0.0
    for feature, own in zip(features, actor.forward_only(features).logprobs, strict=True):
        assert feature.logprobs is not None
        worst = max(worst, float(np.abs(own - feature.logprobs)[feature.completion_mask].max()))
    return worst


@remote_class()
class Source(WeightSender):
    """64 MiB of random bf16 tensors, and a large one."""

    def __init__(self, device: str) -> None:
        self.weights = numbers(device)

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()


@remote_class()
class Sink(WeightReceiver):
    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, tensors: Any, version: int) -> None:
        self.weights = dict(tensors)


def numbers(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {f"layer.{index}": (1024, 1024) for index in range(16)} | {"head": (4096, 4096), "scale": ()}
    return {name: torch.randn(size, generator=generator).bfloat16().to(device) for name, size in sizes.items()}


def take_part(transport: str, rank: int, address: Any, result: Any) -> None:
    """One of the two processes of a transfer: three transfers, the last one timed."""
    device = "cpu" if not torch.cuda.is_available() else f"cuda:{rank if transport == 'nccl' else 0}"
    if device != "cpu":
        torch.cuda.set_device(device)
    source, sink = Source(device), Sink()
    if rank == 0:
        address.put(source.open_weight_channel(transport, 60.0))
    place = address.get(timeout=60)
    if rank == 0:
        address.put(place)
    seconds = 0.0
    for version in (1, 2, 3):
        plan = TransferPlan(
            transport=transport,
            routes={0: Route(place, 2)},
            places=((0, 1),),
            version=version,
            bucket_size_bytes=16 << 20,
            timeout_s=60.0,
            verify=version < 3,
        )
        start = time.perf_counter()
        (source.send_weights(plan) if rank == 0 else sink.receive_weights(plan)).get()
        seconds = time.perf_counter() - start
    if rank == 1:
        expected = numbers("cpu")
        wrong = [name for name in expected if not torch.equal(sink.weights[name].cpu(), expected[name])]
        result.put((wrong, sink.weights["head"].device.type, seconds))


def check_transport(report: Report, transport: str) -> None:
    context = multiprocessing.get_context("spawn")
    address, result = context.Queue(), context.Queue()
    ranks = [context.Process(target=take_part, args=(transport, rank, address, result)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    try:
        wrong, device, seconds = result.get(timeout=180)
        report.check(f"{transport}: tensors that differ ({device}; {seconds:.3f} s for 64 MiB without checksums)", len(wrong), 0.0)
    except Exception as error:  # whatever ended a rank; its own traceback is above
        report.check(f"{transport}: {type(error).__name__} {error}", 1.0, 0.0)
    for rank in ranks:
        rank.join(30)
        rank.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.tiny:
        raise SystemExit("sampler_check: there is no GPU here; --tiny tries the script on the CPU")
    report = Report()
    transports = ["gloo"] if device == "cpu" else ["cuda_ipc", "gloo", *(["nccl"] if torch.cuda.device_count() > 1 else [])]
    for transport in transports:
        check_transport(report, transport)
    with tempfile.TemporaryDirectory() as folder:
        check_updates(report, Path(folder), device, arguments.dtype, arguments.updates)
    sys.stdout.flush()
    os._exit(1 if report.failed else 0)  # vLLM's engine lives as long as its process


if __name__ == "__main__":
    main()
