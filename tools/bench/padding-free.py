"""A padding-free step beside a padded one, and an FSDP2 step through TransformersModel beside bare FSDP2.

    ./dev bench padding-free [--repeat 9]

A Llama of 4 layers (hidden 256, vocabulary 4096), float32, one thread a process. Lengths are lognormal; the bare step is torch's fully_shard on two
ranks over the same layers, transformers' loss, torch's clip_grad_norm_ and AdamW, on rows of equal length; its time is that of the processor.
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
from paired import pairs

VOCAB = 4096


def make_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)


def padding(path: str, repeat: int) -> None:
    """Runs in one process."""
    from twinkle_data import InputFeature, InputProcessor
    from twinkle_transformers import TransformersModel

    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(4.2, 0.8, 24).astype(int) + 2, 512)
    rows = [InputFeature(input_ids=draw.integers(1, VOCAB, length)) for length in lengths]
    model = TransformersModel(path)
    model.set_loss("cross_entropy")
    model.set_optimizer("adamw", lr=1e-5)
    losses: dict[bool, float] = {}

    def step(free: bool) -> None:
        model.set_processor(InputProcessor(padding_free=free))
        losses[free] = model.forward_backward(rows).loss or 0.0
        model.clip_grad_and_step(1.0)

    padded_s, free_s, ratio = pairs(lambda: step(False), lambda: step(True), repeat, warm_up=2)
    model.close()
    share = len(lengths) * lengths.max() / lengths.sum()
    print(
        f"padded {padded_s * 1e3:.0f} ms, padding-free {free_s * 1e3:.0f} ms: {1 / ratio:.2f} x faster, padded / real tokens {share:.2f}: "
        f"{1 / ratio / share:.2f} of it (aim 0.9)"
    )


def sharded(path: str, repeat: int) -> tuple[float, float, float, float]:
    """Runs on two ranks: median seconds of the processor that bare FSDP2 and ours take, their ratio, and the gap between both losses."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from twinkle_data import InputFeature
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers._trainer import TransformersTrainer

    torch.set_num_threads(1)
    ids = np.random.default_rng(dist.get_rank()).integers(1, VOCAB, (8, 256))
    bare: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    mesh = init_device_mesh("cpu", (2,))
    for layer in bare.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(bare, mesh=mesh)
    for module in bare.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no average
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-5)
    tensor = torch.as_tensor(ids)
    losses: dict[str, float] = {}

    def bare_step() -> None:
        loss = bare(input_ids=tensor, labels=tensor, use_cache=False).loss / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses["bare"] = total.item()

    trainer = TransformersTrainer(path, DeviceMesh.from_sizes(fsdp_size=2, device_type="cpu"))
    trainer.set_loss("cross_entropy")
    trainer.set_optimizer("adamw", lr=1e-5, weight_decay=0.01)
    rows = [InputFeature(input_ids=row) for row in ids]

    def our_step() -> None:
        losses["ours"] = trainer.forward_backward(rows).loss or 0.0
        trainer.clip_grad_and_step(1.0)

    times = pairs(bare_step, our_step, repeat, warm_up=2, clock=time.process_time)
    trainer.close()
    return *times, abs(losses["ours"] - losses["bare"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9, help="pairs of measurements")
    arguments = parser.parse_args()
    from twinkle_train.testing import RankPool

    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as folder:
        path = Path(folder) / "model"
        make_model(path)
        pool = RankPool(2, folder)
        found = pool.run(sharded, str(path), arguments.repeat, timeout_s=500)
        pool.stop()
        bare_s, ours_s, ratio, gap = found[0]
        assert gap < 1e-3, f"the steps are not the same: the losses differ by {gap}"
        print(f"FSDP2, two ranks, 8 rows of 256 tokens each: ours {ours_s * 1e3:.0f} ms, bare {bare_s * 1e3:.0f} ms: {ratio:.3f} (aim 1.03)")
        padding(str(path), arguments.repeat)


if __name__ == "__main__":
    main()
