"""How long a training checkpoint of MegatronModel blocks training when it is written in the background, against its whole duration."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import numpy as np
from transformers import Qwen3Config, Qwen3ForCausalLM

from twinkle_data import InputFeature
from twinkle_megatron import MegatronModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6, help="of a Qwen3 of hidden size 512 (6: 37 million parameters, 0.45 GB of state)")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="twinkle-bench-"))
    try:
        _measure(folder, arguments.layers, arguments.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(folder: Path, layers: int, repeats: int) -> None:
    config = Qwen3Config(
        vocab_size=16000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder / "model")
    model = MegatronModel(folder / "model")
    model.set_loss("cross_entropy")
    model.set_optimizer("adamw", lr=1e-4)
    rows = [InputFeature(input_ids=np.arange(1, 33)) for _ in range(2)]
    model.forward_backward(rows)
    model.clip_grad_and_step()
    at_once: list[float] = []
    blocked: list[float] = []
    whole: list[float] = []
    # The first of each pays for the plan, which later ones use again, and for memory that was never touched.
    for number in range(repeats + 1):
        start = time.perf_counter()
        model.save_checkpoint(folder / "states" / "now")
        at_once.append(time.perf_counter() - start)
        start = time.perf_counter()
        model.save_checkpoint(folder / "states" / "later", background=True)
        blocked.append(time.perf_counter() - start)
        model.wait_for_checkpoint()
        whole.append(time.perf_counter() - start)
        print(f"save {number}: at once {at_once[-1]:.3f} s; in the background {blocked[-1]:.3f} s of {whole[-1]:.3f} s")
    size_bytes = sum(file.stat().st_size for file in (folder / "states" / "now").iterdir())
    model.close()
    ratios = [block / duration for block, duration in zip(blocked[1:], whole[1:], strict=True)]
    print(f"checkpoint of {size_bytes / 2**20:.0f} MiB: {size_bytes / 2**20 / statistics.median(at_once[1:]):.0f} MiB/s at once")
    print(f"blocked in the background / whole duration: median {statistics.median(ratios):.3f} (at most 0.2 is wanted)")


if __name__ == "__main__":
    main()
