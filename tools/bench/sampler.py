"""vLLMSampler beside the bare engine: throughput, one request, the first token after a weight update, replicas.

Both sides use the same engine and alternate in one run. `--only NAME` (batch, single, update, replicas) runs one of them; replicas needs Ray
and compares one replica with two, each pinned to a core.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from paired import pairs
from pinning import pin
from small_qwen3 import save_small_qwen3

from twinkle_mesh import DeviceGroup
from twinkle_remote import initialize
from twinkle_sync import CheckpointEngineManager, CheckpointFolder
from twinkle_vllm import vLLMSampler

PROMPTS, TOKENS = 64, 64
OPTIONS = {"max_tokens": TOKENS, "temperature": 1.0}
ENGINE_ARGS = {"max_model_len": 256, "max_num_seqs": 64, "kv_cache_memory_bytes": 256 << 20}


def prompts(count: int = PROMPTS) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, 512, size=int(size)).tolist() for size in generator.integers(8, 48, size=count)]


def show(name: str, measured: tuple[float, float, float], aim: str) -> None:
    raw_s, ours_s, ratio = measured
    print(f"{name:64} {raw_s * 1e3:9.2f} ms {ours_s * 1e3:9.2f} ms   {1 / ratio:6.3f} x the throughput   aim {aim}", flush=True)


def bare(sampler: vLLMSampler, inputs: list[list[int]], count: int) -> Callable[[], Any]:
    from vllm import SamplingParams as EngineParams

    params = EngineParams(max_tokens=count, temperature=1.0, logprobs=0, flat_logprobs=True, detokenize=False)
    wrapped: Any = [{"prompt_token_ids": tokens} for tokens in inputs]
    return lambda: sampler._engine.generate(wrapped, params, use_tqdm=False)


def bench_batch(sampler: vLLMSampler, rounds: int) -> None:
    inputs = prompts()
    ours = pairs(bare(sampler, inputs, TOKENS), lambda: list(sampler.sample(inputs, OPTIONS)), rounds, warm_up=1)
    show(f"{PROMPTS} prompts x {TOKENS} tokens (bare engine, ours)", ours, "0.97")


def bench_single(sampler: vLLMSampler, rounds: int) -> None:
    inputs = prompts()[:1]
    ours = pairs(bare(sampler, inputs, TOKENS), lambda: list(sampler.sample(inputs, OPTIONS)), rounds, warm_up=1)
    show(f"one prompt x {TOKENS} tokens (bare engine, ours)", ours, "0.97")


def bench_update(sampler: vLLMSampler, folder: Path, rounds: int) -> None:
    source: Any = CheckpointFolder
    manager = CheckpointEngineManager(model=source(folder), sampler=sampler)
    inputs, times = prompts()[:1], {False: [], True: []}
    for index in range(2 * rounds + 2):
        updated = bool(index % 2)
        if updated:
            manager.sync_weights()
        start = time.perf_counter()
        list(sampler.sample(inputs, {"max_tokens": 1}))
        if index > 1:
            times[updated].append(time.perf_counter() - start)
    without, after = (statistics.median(times[key]) for key in (False, True))
    print(
        f"{'first token: without, right after an update':64} {without * 1e3:9.2f} ms {after * 1e3:9.2f} ms   {after - without:6.3f} s later, aim 0.3"
    )


def bench_replicas(folder: Path, rounds: int) -> None:
    placed: Any = vLLMSampler
    groups = [DeviceGroup("one", 1, "cpu"), DeviceGroup("two", 2, "cpu")]
    with initialize("ray", groups=groups, threads_per_worker=1, start_timeout_s=300):
        one, two = (placed(str(folder), ENGINE_ARGS, remote_group=name) for name in ("one", "two"))
        pin(one)
        pin(two)

        def sampling(sampler: Any, count: int) -> Callable[[], Any]:
            return lambda: list(sampler.sample(prompts(count), OPTIONS))

        half = pairs(sampling(one, PROMPTS), sampling(one, PROMPTS // 2), rounds, warm_up=1)
        show(f"{PROMPTS} prompts, {PROMPTS // 2} prompts on one replica: what halving a batch gives", half, "none")
        for count in (PROMPTS, 4 * PROMPTS):
            name = f"{count} prompts on one replica, on two (each on one core)"
            show(name, pairs(sampling(one, count), sampling(two, count), rounds, warm_up=1), "1.6")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["batch", "single", "update", "replicas"])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    wanted = [arguments.only] if arguments.only else ["batch", "single", "update", "replicas"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_small_qwen3(folder)
        if set(wanted) - {"replicas"}:
            sampler = vLLMSampler(folder, ENGINE_ARGS)
            if "batch" in wanted:
                bench_batch(sampler, arguments.rounds)
            if "single" in wanted:
                bench_single(sampler, arguments.rounds)
            if "update" in wanted:
                bench_update(sampler, folder, arguments.rounds)
        if "replicas" in wanted:
            bench_replicas(folder, arguments.rounds)


if __name__ == "__main__":
    main()
