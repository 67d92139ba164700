"""Sequence parallelism: what is kept for backward on each rank beside one process, and the time of a ring of two beside half of one process.

    ./dev bench sp [--repeat 7] [--length 2048]

A Llama of 4 layers (hidden 256, 8 heads, 4 of keys and values, vocabulary 4096), float32, one row of that length, one thread a process; the loss from
sharded log-probabilities. Kept bytes: storages that autograd saves, each once, parameters left out.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch


def make_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1 << 16,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)


def measure(path: str, length: int, sizes: dict[str, Any], repeat: int) -> tuple[int, list[float]]:
    """Runs on every rank: bytes that are kept, and seconds of forward and backward."""
    import torch.distributed as dist

    from twinkle_data import InputFeature
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers._trainer import TransformersTrainer

    torch.set_num_threads(1)
    trainer = TransformersTrainer(path, DeviceMesh.from_sizes(device_type="cpu", **sizes))
    trainer.set_loss("cross_entropy")
    row = InputFeature(input_ids=np.random.default_rng(0).integers(1, 4096, length))
    storages: dict[int, int] = {parameter.untyped_storage().data_ptr(): 0 for parameter in trainer._model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.forward([row])
    kept = sum(storages.values())
    trainer.calculate_loss()
    trainer.backward()
    seconds: list[float] = []
    for _ in range(repeat + 1):
        dist.barrier()
        start = time.perf_counter()
        trainer.forward_backward([row])
        seconds.append(time.perf_counter() - start)
        trainer.zero_grad()
    trainer.close()
    return kept, seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7, help="steps of each, in two rounds that alternate")
    parser.add_argument("--length", type=int, default=2048)
    arguments = parser.parse_args()
    from twinkle_train.testing import RankPool

    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as folder:
        path = Path(folder) / "model"
        make_model(path)
        pools: dict[int, Any] = {}
        for ranks in (1, 2, 4):
            (Path(folder) / str(ranks)).mkdir()
            pools[ranks] = RankPool(ranks, Path(folder) / str(ranks))

        def run(ranks: int, sizes: dict[str, Any], repeat: int) -> list[Any]:
            found = pools[ranks].run(measure, str(path), arguments.length, sizes, repeat, timeout_s=400)
            pools[ranks].stop()  # an idle group's threads cost time
            return found

        times: dict[int, list[float]] = {1: [], 2: []}
        kept: dict[int, int] = {}
        for _ in range(2):
            for ranks, sizes in ((1, {}), (2, {"cp_size": 2})):
                found = run(ranks, sizes, arguments.repeat)
                kept[ranks] = max(each[0] for each in found)
                times[ranks] += [max(seconds) for seconds in zip(*(each[1] for each in found), strict=True)]
        rest = {
            "ulysses_size=2": run(2, {"ulysses_size": 2}, 0),
            "ulysses_size=4": run(4, {"ulysses_size": 4}, 0),
            "cp_size=4": run(4, {"cp_size": 4}, 0),
            "ulysses_size=2, cp_size=2": run(4, {"ulysses_size": 2, "cp_size": 2}, 0),
        }
    one = kept[1]
    print(f"kept for backward in one process: {one / 2**20:.1f} MiB")
    for name, ranks, value in [("cp_size=2", 2, kept[2]), *((name, len(found), max(each[0] for each in found)) for name, found in rest.items())]:
        print(f"{name}: {value / 2**20:.1f} MiB a rank, {value * ranks / one:.3f} of 1/{ranks} (aim 1.2)")
    half, ring = np.median(times[1]) / 2, np.median(times[2])
    print(f"a ring of two: {ring * 1e3:.0f} ms, half of one process {half * 1e3:.0f} ms: {ring / half:.3f} (aim 1.25)")


if __name__ == "__main__":
    main()
