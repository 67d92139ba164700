"""TransformersModel passes the conformance suite that every trainer runs, in one process and on two ranks."""

import os
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from twinkle_train.testing import tiny_qwen3

    return tiny_qwen3(tmp_path_factory.mktemp("conformance"))


def test_one_process_passes_the_conformance_suite(qwen3: Path, tmp_path: Path) -> None:
    from twinkle_train.testing import ReferenceTrainer, conformance
    from twinkle_transformers import TransformersModel

    model = TransformersModel(qwen3)
    try:
        conformance.run_all(model, ReferenceTrainer(qwen3), tmp_path / "saved")
    finally:
        model.close()


def conform_on_rank(path: Path, sizes: dict[str, Any], saved: Path, **options: Any) -> None:
    from twinkle_mesh import DeviceMesh
    from twinkle_train.testing import ReferenceTrainer, conformance
    from twinkle_transformers._trainer import TransformersTrainer

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    rank = int(os.environ["RANK"])
    trainer = TransformersTrainer(path, mesh, **options)

    def share_of(number: int) -> slice:
        return mesh.get_slice(number, rank)

    try:
        conformance.run_all(trainer, ReferenceTrainer(path), saved, share_of=share_of, main=rank == 0)
    finally:
        trainer.close()


# name: sizes of the mesh, options, whether it runs by default.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "dp2": ({"dp_size": 2}, {}, False),
    "fsdp2 recomputed": ({"fsdp_size": 2}, {"activation_checkpointing": True}, True),
    "ulysses2": ({"ulysses_size": 2}, {}, False),
    "ring2": ({"cp_size": 2}, {}, False),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if row[2] else (pytest.mark.full,), id=n) for n, row in LAYOUTS.items()])
def test_two_ranks_pass_the_conformance_suite(name: str, two_ranks: Any, qwen3: Path, tmp_path: Path) -> None:
    sizes, options, _ = LAYOUTS[name]
    two_ranks.run(conform_on_rank, qwen3, sizes, tmp_path / "saved", timeout_s=120, **options)
