"""A bfloat16 training step of a 1B-parameter Llama on one GPU: MegatronModel beside bare megatron-core, tokens/s and MFU.

    .venv/bin/python tests/gpu/megatron_bench.py [--peak-tflops 989] [--repeat 7]

`--tiny` tries the script itself on any machine, with a small model and whatever device there is. Needs `pip install 'twinkle-megatron[te]'` on a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import numpy as np
import torch
from bare_megatron import BareMegatron, Shape
from paired import pairs
from transformers import LlamaForCausalLM

from twinkle_data import InputFeature
from twinkle_megatron import MegatronModel
from twinkle_mesh import DeviceMesh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bfloat16 of the GPU (H100, H200: 989)")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        raise SystemExit("megatron_bench: there is no GPU here; --tiny tries the script on the CPU")
    if arguments.tiny:
        shape = Shape(num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2, vocab_size=512)
        rows, tokens, micro_batches = 4, 64, 2
    else:
        shape = Shape(num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32, num_query_groups=8, vocab_size=32768)
        rows, tokens, micro_batches = 32, 2048, 8
    draw = np.random.default_rng(0)
    features = [InputFeature(input_ids=draw.integers(0, shape.vocab_size, tokens)) for _ in range(rows)]
    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as folder:
        reference = LlamaForCausalLM(shape.hf_config()).bfloat16()
        num_parameters = sum(parameter.numel() for parameter in reference.parameters())
        reference.save_pretrained(folder)
        del reference
        model = MegatronModel(folder, device_mesh=DeviceMesh.from_sizes(dp_size=1, device_type=device.type), mixed_precision="bf16")
    model.set_loss("cross_entropy")
    model.set_optimizer("adam", lr=1e-4)
    ids = torch.from_numpy(np.stack([feature.input_ids for feature in features])).to(device)
    bare = BareMegatron(shape, ids.chunk(micro_batches), dtype=torch.bfloat16, transformer_engine=device.type == "cuda")

    def ours() -> None:
        model.forward_backward(features, micro_batch_size=rows // micro_batches)
        model.clip_grad_and_step(1.0)
        _finish(device)

    def raw() -> None:
        bare.step()
        _finish(device)

    raw_s, ours_s, ratio = pairs(raw, ours, arguments.repeat, warm_up=2)
    # 6 N a token for the matrices; attention 12 L H T a token, halved since it is causal (arXiv:2204.02311, appendix B).
    flops = rows * tokens * (6 * num_parameters + 6 * shape.num_layers * shape.hidden_size * tokens)
    for name, seconds in (("MegatronModel", ours_s), ("bare megatron-core", raw_s)):
        mfu = flops / seconds / arguments.peak_tflops / 1e12
        print(f"{name}: {seconds:.3f} s a step of {rows} x {tokens} tokens, {rows * tokens / seconds:,.0f} tokens/s, MFU {mfu:.1%}")
    print(f"{num_parameters / 1e9:.2f}B parameters on {device}; ratio {ratio:.3f} (at most 1.03 is wanted)")


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
