"""Weights on their way to a sampler: how much memory that takes beside the model, and which ranks have to take part."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
BUCKET = 8 * MIB
# 10 layers of 3.5 MiB and two tables of 4 MiB: over five buckets, of which each holds several weights.
DENSE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 10, "vocab_size": 4096, "head_dim": 64}
EXPERTS: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 320, "num_hidden_layers": 8, "vocab_size": 4096, "head_dim": 64}


def peak_bytes(run: Callable[[], object]) -> int:
    """How far torch's allocator goes above what it holds at the start, by every allocation and release that it reports."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        noticed = torch.empty(64)
        run()
    inner: Any = profiler.profiler  # None before the block only
    changes = [(event.start_ns(), event.nbytes()) for event in inner.kineto_results.events() if event.name() == "[memory]"]
    assert changes, "torch reported no allocation"
    held = peak = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        held += change
        peak = max(peak, held)
    del noticed
    return peak


def measure_on_rank(path: Path, sizes: dict[str, Any], bucket: int = BUCKET) -> dict[str, float]:
    """In buckets' sizes: all weights; the peak beside the model when they are sent bucket by bucket, and when all buckets are kept."""
    import torch.distributed as dist

    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh
    from twinkle_sync import Ledger, pack

    trainer = MegatronTrainer(path, DeviceMesh.from_sizes(device_type="cpu", **sizes))
    try:
        ledgers = [Ledger(), Ledger()]

        def send() -> None:
            for each in pack(trainer.iter_weights(), bucket, ledgers[0]):
                del each

        sent = peak_bytes(send)
        dist.barrier()
        kept = peak_bytes(lambda: list(pack(trainer.iter_weights(), bucket, ledgers[1])))
        receipts = [ledger.receipt(1) for ledger in ledgers]
        assert receipts[0] == receipts[1]
        return {"all": receipts[0].size_bytes / bucket, "sent": sent / bucket, "kept": kept / bucket}
    finally:
        trainer.close()


LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "single": ("qwen3", DENSE, {}),
    "TP2": ("qwen3", DENSE, {"tp_size": 2}),
    "PP2": ("qwen3", DENSE, {"pp_size": 2}),
    "EP2": ("qwen3_moe", EXPERTS, {"dp_size": 2, "ep_size": 2}),
    "TP2+PP2": ("qwen3", DENSE, {"tp_size": 2, "pp_size": 2}),
    "EP2+TP2 ETP2": ("qwen3_moe", EXPERTS, {"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2, "sequence_parallel": True}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "TP2" else (pytest.mark.full,)) for n in LAYOUTS])
def test_sending_needs_the_memory_of_two_buckets_at_most(name: str, pools: Any, checkpoint: Any, record_property: Any) -> None:
    from twinkle_mesh import DeviceMesh

    family, model, sizes = LAYOUTS[name]
    size = DeviceMesh.from_sizes(device_type="cpu", **sizes).world_size
    first, *others = pools(size).run(measure_on_rank, checkpoint(family, **model), sizes)
    record_property("buckets", [first, *others])
    print(name, first, others)
    assert first["all"] > 4, first
    assert 1 <= first["sent"] <= 2, first
    # The negative control: who keeps all buckets is found out.
    assert first["kept"] > first["all"], first
    for other in others:
        assert other["all"] == 0, "whole weights are on rank 0 only"
        assert other["sent"] < 0.1, others


def take_part_on_rank(path: Path, sizes: dict[str, Any], idle: tuple[int, ...]) -> tuple[bool, int]:
    """Exports, while some ranks do not even look: whether rank 0 got the checkpoint, and how many weights this rank got."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh

    trainer = MegatronTrainer(path, DeviceMesh.from_sizes(device_type="cpu", **sizes))
    try:
        rank = int(os.environ["RANK"])
        have = {} if rank in idle else {name: tensor.clone() for name, tensor in trainer.iter_weights()}
        dist.barrier()
        want = load_file(path / "model.safetensors")
        return have.keys() == want.keys() and all(have[name].equal(want[name]) for name in want), len(have)
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("family", "sizes", "idle"),
    [
        ("qwen3", {"dp_size": 2}, (1,)),
        pytest.param("qwen3", {"dp_size": 2, "tp_size": 2}, (2, 3), marks=pytest.mark.full),
        pytest.param("qwen3", {"cp_size": 2, "pp_size": 2}, (1, 3), marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"dp_size": 4, "ep_size": 2}, (2, 3), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_only_ranks_that_have_a_part_take_part(family: str, sizes: dict[str, Any], idle: tuple[int, ...], pools: Any, checkpoint: Any) -> None:
    from twinkle_mesh import DeviceMesh

    size = DeviceMesh.from_sizes(device_type="cpu", **sizes).world_size
    path = checkpoint(family, tie_word_embeddings=False)
    (whole, _), *others = pools(size).run(take_part_on_rank, path, sizes, idle)
    assert whole
    assert [number for _, number in others] == [0] * (size - 1)
