"""A training step beside bare megatron-core, packed against padded rows, weight export, and how long a checkpoint blocks.

Each sub-bench runs in a new process: `step`, `packed`, `export`, and `checkpoint` (megatron_checkpoint.py). Without names, all of them.

    ./dev bench megatron [step] [packed] [export] [checkpoint] [--repeat 11] [--layers 4] ...
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from bare_megatron import BareMegatron, Shape
from paired import pairs

from twinkle_data import InputFeature, PackingDataset
from twinkle_mesh import DeviceGroup, DeviceMesh

HERE = Path(__file__).resolve()
VOCAB, ROWS, TOKENS, MICRO_BATCHES = 8192, 16, 256, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=["step", "packed", "export", "checkpoint", []], help="which; all of them without")
    parser.add_argument("--repeat", type=int, default=11, help="pairs of measurements")
    parser.add_argument("--layers", type=int, default=4, help="of the model that steps are measured with")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    benches = {"step": bench_step, "packed": bench_packed, "export": bench_export}
    if arguments.in_process:
        with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as folder:
            benches[arguments.names[0]](Path(folder), arguments)
        return
    for name in arguments.names or [*benches, "checkpoint"]:
        print(f"== {name}", flush=True)
        own = [str(HERE), name, "--in-process", "--repeat", str(arguments.repeat), "--layers", str(arguments.layers)]
        subprocess.run([sys.executable, "-P", *(own if name in benches else [str(HERE.with_name("megatron_checkpoint.py"))])], check=True)


def save_model(folder: Path, config: Any) -> str:
    """A random model as a Hugging Face checkpoint."""
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(config).float().save_pretrained(folder)
    return str(folder)


def shape(num_layers: int) -> Shape:
    """Of the model that steps are measured with."""
    return Shape(num_layers=num_layers, hidden_size=256, ffn_hidden_size=768, num_attention_heads=8, num_query_groups=4, vocab_size=VOCAB)


# A training step.


class BareRank:
    """One rank of megatron-core's own training loop, as an actor."""

    def __init__(self, rank: int, world_size: int, store: str, num_layers: int) -> None:
        import torch
        import torch.distributed as dist

        from twinkle_megatron import cpu

        cpu.enable()
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
        model_parallel_cuda_manual_seed(0)
        tokens = torch.from_numpy(np.stack([row.input_ids for row in make_rows()]))
        self._bare = BareMegatron(shape(num_layers), tokens.chunk(MICRO_BATCHES), dtype=torch.float32, tp_size=world_size)

    def step(self) -> float:
        """One step; returns the loss."""
        return self._bare.step()


def make_rows() -> list[InputFeature]:
    """The same batch for both sides."""
    draw = np.random.default_rng(0)
    return [InputFeature(input_ids=draw.integers(0, VOCAB, TOKENS)) for _ in range(ROWS)]


def bench_step(folder: Path, arguments: argparse.Namespace) -> None:
    """MegatronModel over Ray beside actors that run megatron-core's own loop on data that they have already."""
    import ray

    import twinkle_remote as tr
    from twinkle_megatron import MegatronModel

    path = save_model(folder / "model", shape(arguments.layers).hf_config())
    rows = make_rows()
    for size in (1, 2):
        with tr.initialize("ray", groups=[DeviceGroup(name="trainer", ranks=size, device_type="cpu")], threads_per_worker=1):
            mesh = DeviceMesh.from_sizes(world_size=size, tp_size=size, device_type="cpu")
            model = MegatronModel(path, device_mesh=mesh, remote_group="trainer")
            model.set_loss("cross_entropy")
            model.set_optimizer("adam", lr=1e-4)
            environment = {"env_vars": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}}
            actor: Any = ray.remote(num_cpus=0, runtime_env=environment)(BareRank)
            bare = [actor.remote(rank, size, str(folder / f"store-{size}"), arguments.layers) for rank in range(size)]

            def ours(model: Any = model) -> None:
                model.forward_backward(rows, micro_batch_size=ROWS // MICRO_BATCHES)
                model.clip_grad_and_step(1.0)

            def raw(bare: list[Any] = bare) -> None:
                ray.get([rank.step.remote() for rank in bare])

            other, mine, ratio = pairs(raw, ours, arguments.repeat, warm_up=2)
            print(
                f"tp {size}: {ROWS} rows of {TOKENS} tokens in {MICRO_BATCHES} micro-batches, {arguments.layers} layers of 256: MegatronModel "
                f"{mine:.3f} s, bare megatron-core {other:.3f} s, ratio {ratio:.3f} (at most 1.03 is wanted)",
                flush=True,
            )


# Packed against padded rows.


def bench_packed(folder: Path, arguments: argparse.Namespace) -> None:
    """Steps over lognormal lengths: padded to the longest of each micro-batch, and packed into rows of 1,024 tokens."""
    from twinkle_megatron import MegatronModel

    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(5.0, 0.8, 48).astype(int), 8, 1024)
    rows = [InputFeature(input_ids=draw.integers(0, VOCAB, length)) for length in lengths]
    packs = PackingDataset(dataset=rows, max_length=1024)
    packed = [packs[index] for index in range(len(packs))]
    model = MegatronModel(save_model(folder / "model", shape(arguments.layers).hf_config()))
    model.set_loss("cross_entropy")
    model.set_optimizer("adam", lr=1e-4)

    def step(inputs: list[Any], micro_batch_size: int) -> None:
        model.forward_backward(inputs, micro_batch_size=micro_batch_size)
        model.clip_grad_and_step(1.0)

    padded_tokens = sum(int(lengths[first : first + 8].max()) * len(lengths[first : first + 8]) for first in range(0, len(rows), 8))
    fewer = padded_tokens / int(lengths.sum())
    fast, slow, ratio = pairs(lambda: step(packed, 1), lambda: step(rows, 8), arguments.repeat, warm_up=1)
    print(
        f"{len(rows)} rows of {lengths.sum()} tokens, padded to {padded_tokens} in batches of 8: padded {slow:.3f} s, packed {fast:.3f} s, "
        f"{ratio:.2f} x; tokens {fewer:.2f} x; of what the tokens give {ratio / fewer:.2f} (at least 0.9 is wanted)"
    )
    model.close()


# Export.


def bench_export(folder: Path, arguments: argparse.Namespace) -> None:
    """All weights of a 135M model, whole: at TP 1 beside copying them once, at TP 2 beside one all-gather of the same bytes."""
    # SmolLM2-135M's shape, with 8 and 4 heads instead of 9 and 3, so that they divide by two.
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=72,
        tie_word_embeddings=True,
    )
    path = save_model(folder / "model", config)
    for size in (1, 2):
        store = str(folder / f"store-{size}")
        ranks = [
            subprocess.Popen(
                [sys.executable, "-P", str(HERE.with_name("_megatron_export.py")), str(rank), str(size), store, path, str(arguments.repeat)]
            )
            for rank in range(size)
        ]
        try:
            for rank in ranks:
                if rank.wait(timeout=600):
                    raise SystemExit("a rank failed; its error is above")
        finally:
            for rank in ranks:
                rank.kill()


if __name__ == "__main__":
    main()
