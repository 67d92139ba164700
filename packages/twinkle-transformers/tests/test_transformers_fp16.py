"""float16 with loss scaling, and losses and gradients that are not finite: skipped and counted, or an error; never in the weights."""

import os
from pathlib import Path
from typing import Any

import pytest

# The first test starts the ranks.
pytestmark = pytest.mark.timeout(300)


def half_on_rank(path: Path, rows: list[Any], sizes: dict[str, Any], options: dict[str, Any], folder: Path) -> None:
    from twinkle_mesh import DeviceMesh
    from twinkle_train.testing.precision import check_half
    from twinkle_transformers._trainer import TransformersTrainer

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    share = rows[mesh.get_slice(len(rows), int(os.environ["RANK"]))]
    check_half(lambda precision, **more: TransformersTrainer(path, mesh, precision, **options, **more), share, folder)


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("qwen3", {"fsdp_size": 2}, {}),
        pytest.param("qwen3", {"ulysses_size": 2}, {"activation_checkpointing": True}, marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"dp_size": 2, "ep_size": 2}, {"router_z_loss_coef": 1e-3}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_float16_trains_like_float32_and_skips_what_overflows(
    family: str, sizes: Any, options: Any, two_ranks: Any, checkpoint: Any, features: Any, tmp_path: Path
) -> None:
    two_ranks.run(half_on_rank, checkpoint(family), features[:6], sizes, options, tmp_path / "checkpoint", timeout_s=200)


def not_finite_on_rank(path: Path, rows: list[Any], on_non_finite: str) -> None:
    from twinkle_mesh import DeviceMesh
    from twinkle_train.testing.precision import check_not_finite
    from twinkle_transformers._trainer import TransformersTrainer

    mesh, rank = DeviceMesh.from_sizes(device_type="cpu", dp_size=2), int(os.environ["RANK"])
    share = rows[mesh.get_slice(len(rows), rank)]
    check_not_finite(lambda precision, **more: TransformersTrainer(path, mesh, precision, **more), share, on_non_finite, is_faulty=rank == 1)


@pytest.mark.parametrize("on_non_finite", ["skip", pytest.param("error", marks=pytest.mark.full)])
def test_a_step_that_is_not_finite_is_an_error_or_skipped_on_all_ranks(on_non_finite: str, two_ranks: Any, checkpoint: Any, features: Any) -> None:
    two_ranks.run(not_finite_on_rank, checkpoint("qwen3"), features, on_non_finite)


def test_settings_of_precision_are_checked(checkpoint: Any) -> None:
    from twinkle_train import ConfigError
    from twinkle_transformers._trainer import TransformersTrainer

    cases: list[tuple[dict[str, Any], str]] = [
        ({"mixed_precision": "fp8"}, "'no', 'bf16' or 'fp16', not 'fp8'"),
        ({"initial_loss_scale": 0}, "initial_loss_scale must be a positive number"),
        ({"on_non_finite": "ignore"}, "on_non_finite is 'error' or 'skip', not 'ignore'"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            TransformersTrainer(checkpoint("qwen3"), **options)
