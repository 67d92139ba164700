"""float16 with loss scaling, and losses and gradients that are not finite: skipped and counted, or an error; never in the weights."""

import os
from pathlib import Path
from typing import Any

import pytest


def half_on_rank(path: Path, rows: list[Any], sizes: dict[str, Any], options: dict[str, Any], folder: Path) -> None:
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh
    from twinkle_train.testing.precision import check_half

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    share = rows[mesh.get_slice(len(rows), int(os.environ["RANK"]))]
    check_half(lambda precision, **more: MegatronTrainer(path, mesh, precision, **options, **more), share, folder, has_graph=mesh.pp_size == 1)


def test_float16_trains_like_float32_and_skips_what_overflows(pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    pools(1).run(half_on_rank, checkpoint("qwen3"), features, {"world_size": 1}, {}, tmp_path / "checkpoint", timeout_s=200)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("qwen3", {"tp_size": 2, "sequence_parallel": True}, {}),
        ("qwen3", {"dp_size": 2}, {"use_distributed_optimizer": True}),
        ("qwen3", {"pp_size": 2}, {}),
        ("qwen3_moe", {"ep_size": 2, "world_size": 2}, {}),
    ],
)
def test_float16_does_in_other_layouts(family: str, sizes: Any, options: Any, pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    pools(2).run(half_on_rank, checkpoint(family), features[:6], sizes, options, tmp_path / "checkpoint", timeout_s=200)


def not_finite_on_rank(path: Path, rows: list[Any], on_non_finite: str) -> None:
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh
    from twinkle_train.testing.precision import check_not_finite

    mesh, rank = DeviceMesh.from_sizes(device_type="cpu", dp_size=2), int(os.environ["RANK"])
    share = rows[mesh.get_slice(len(rows), rank)]
    check_not_finite(lambda precision, **more: MegatronTrainer(path, mesh, precision, **more), share, on_non_finite, is_faulty=rank == 1)


@pytest.mark.parametrize("on_non_finite", ["error", "skip"])
def test_a_step_that_is_not_finite_is_an_error_or_skipped_on_all_ranks(on_non_finite: str, two_ranks: Any, checkpoint: Any, features: Any) -> None:
    two_ranks.run(not_finite_on_rank, checkpoint("qwen3"), features, on_non_finite)


def test_settings_of_precision_are_checked(checkpoint: Any) -> None:
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_train import ConfigError

    cases: list[tuple[dict[str, Any], str]] = [
        ({"mixed_precision": "fp8"}, "'no', 'bf16' or 'fp16', not 'fp8'"),
        ({"initial_loss_scale": 0}, "initial_loss_scale must be a positive number"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            MegatronTrainer(checkpoint("qwen3"), **options)
