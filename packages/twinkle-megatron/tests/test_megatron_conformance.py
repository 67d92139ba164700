"""MegatronModel passes the conformance suite that every trainer runs, in one process and on two ranks."""

import os
from pathlib import Path
from typing import Any

import pytest


def test_one_process_passes_the_conformance_suite(checkpoint: Any, tmp_path: Path) -> None:
    from twinkle_megatron import MegatronModel
    from twinkle_train.testing import ReferenceTrainer, conformance

    path = checkpoint("qwen3")
    model = MegatronModel(path)
    try:
        conformance.run_all(model, ReferenceTrainer(path), tmp_path / "saved")
    finally:
        model.close()


def conform_on_rank(path: Path, sizes: dict[str, Any], saved: Path, **options: Any) -> None:
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh
    from twinkle_train.testing import ReferenceTrainer, conformance

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    rank = int(os.environ["RANK"])
    trainer = MegatronTrainer(path, mesh, **options)
    try:
        conformance.run_all(
            trainer,
            ReferenceTrainer(path),
            saved,
            share_of=lambda number: mesh.get_slice(number, rank),
            main=rank == 0,
            has_outputs=mesh.is_last_stage(rank),
            has_graph=mesh.pp_size == 1,
        )
    finally:
        trainer.close()


LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tp2 sp": ("qwen3", {}, {"tp_size": 2, "sequence_parallel": True}, {}),
    "pp2 vpp2": ("llama", {"num_hidden_layers": 4}, {"pp_size": 2, "vpp_size": 2}, {}),
    # Overlap: the suite accumulates over several calls, steps in between, and runs the three calls one by one.
    "dp2 overlap": ("qwen2", {}, {"dp_size": 2}, {"overlap_communication": True}),
    "cp2": ("qwen3", {}, {"cp_size": 2}, {}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_pass_the_conformance_suite(name: str, two_ranks: Any, checkpoint: Any, tmp_path: Path) -> None:
    family, model_sizes, sizes, options = LAYOUTS[name]
    two_ranks.run(conform_on_rank, checkpoint(family, **model_sizes), sizes, tmp_path / "saved", timeout_s=120, **options)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 2, "pp_size": 2, "sequence_parallel": True},
        {"dp_size": 2, "tp_size": 2},
        {"dp_size": 2, "pp_size": 2},
        {"cp_size": 2, "pp_size": 2},
        {"cp_size": 2, "dp_size": 2},
    ],
)
def test_four_ranks_pass_the_conformance_suite(sizes: dict[str, Any], four_ranks: Any, checkpoint: Any, tmp_path: Path) -> None:
    four_ranks.run(conform_on_rank, checkpoint("qwen3"), sizes, tmp_path / "saved", timeout_s=200)
