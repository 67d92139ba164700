"""float16 with loss scaling, and losses and gradients that are not finite: skipped and counted, or an error; never in the weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest


def half_on_rank(path: Path, rows: list[Any], sizes: dict[str, Any], options: dict[str, Any], folder: Path) -> None:
    """Gradients near those of float32; overflow that is skipped until the scale fits; a checkpoint that keeps the scale; an adapter with its own."""
    import os

    import torch

    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    share = rows[mesh.get_slice(len(rows), int(os.environ["RANK"]))]
    found: dict[str, Any] = {}
    for precision in ("no", "fp16"):
        trainer = MegatronTrainer(path, mesh, precision, **options)
        trainer.set_loss("cross_entropy")
        trainer.set_optimizer("adamw", lr=1e-3)
        found[precision] = trainer.forward_backward(share, 2).loss, trainer.export_gradients()
        if mesh.pp_size == 1:
            trainer.zero_grad()
            trainer.forward(share)
            trainer.calculate_loss()
            trainer.backward()
            again = trainer.export_gradients()
            for name, gradient in again.items():
                np.testing.assert_allclose(gradient, found[precision][1][name], rtol=0, atol=2e-2 if precision == "fp16" else 1e-5, err_msg=name)
        trainer.close()
    assert found["fp16"][0] == pytest.approx(found["no"][0], abs=5e-3)
    assert found["fp16"][0] != found["no"][0]
    for name, gradient in found["no"][1].items():
        # float16 has 11 bits; the largest entry of a gradient is off by a few of them.
        np.testing.assert_allclose(found["fp16"][1][name], gradient, rtol=0, atol=0.02 * np.abs(gradient).max() + 1e-4, err_msg=name)

    trainer = MegatronTrainer(path, mesh, "fp16", initial_loss_scale=2.0**30, **options)
    trainer.set_loss("cross_entropy")
    trainer.set_optimizer("adamw", lr=1e-3)
    trainer.set_lr_scheduler("linear", warmup_steps=4, total_steps=10)
    start = trainer.export_weights()
    skipped, norms, metrics = 0, list[float](), dict[str, float]()
    while not norms or not np.isfinite(norms[-1]):
        trainer.forward_backward(share, 2)
        norms.append(trainer.clip_grad_and_step(1.0))
        metrics = trainer.calculate_metric()
        if metrics["skipped_steps"]:
            skipped += 1
            assert metrics["loss_scale"] == 2.0 ** (30 - skipped)
            assert "grad_norm" not in metrics
            after = trainer.export_weights()
            assert all(np.array_equal(after[name], start[name]) for name in after), "a skipped step changes nothing"
    assert 3 <= skipped == len(norms) - 1
    assert metrics["skipped_steps"] == 0
    assert metrics["grad_norm"] == norms[-1]
    assert trainer.get_train_configs()["adapters"][""]["step"] == 1
    assert metrics["lr"] == pytest.approx(1e-3 / 4), "the schedule waits for steps that are taken"
    trainer.add_adapter_to_model("a", {"r": 4})
    trainer.set_loss("cross_entropy", adapter_name="a")
    assert trainer.calculate_metric(adapter_name="a")["loss_scale"] == 2.0**30
    trainer.save_checkpoint(folder)
    trainer.forward_backward(share, 2)
    trainer.step()
    want = trainer.export_weights()
    scale = trainer.calculate_metric()["loss_scale"]
    trainer.close()

    trainer = MegatronTrainer(path, mesh, "fp16", **options)
    trainer.set_loss("cross_entropy")
    trainer.add_adapter_to_model("a", {"r": 4})
    trainer.set_loss("cross_entropy", adapter_name="a")
    trainer.resume_from_checkpoint(folder)
    assert trainer.calculate_metric()["loss_scale"] == scale
    assert trainer.calculate_metric(adapter_name="a")["loss_scale"] == 2.0**30
    trainer.forward_backward(share, 2)
    trainer.step()
    have = trainer.export_weights()
    assert all(np.array_equal(have[name], want[name]) for name in have)
    state = trainer.get_state_dict()
    assert all(tensor.dtype is torch.float16 for tensor in state.values())
    trainer.close()


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


def not_finite_on_rank(path: Path, rows: list[Any], on_non_finite: str, precision: str) -> None:
    """A loss that is NaN on one rank once, and one whose gradient alone is: both ranks skip that step, or both raise."""
    import os

    import torch

    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh
    from twinkle_train import CrossEntropyLoss, LossOutput, NonFiniteError

    fault = {"at": ""}

    def loss(loss_input: Any) -> Any:
        output = CrossEntropyLoss()(loss_input)
        if os.environ["RANK"] == "1" and fault["at"] == "loss":
            return LossOutput(output.sum * float("nan"), output.weight, output.metrics)
        if os.environ["RANK"] == "1" and fault["at"] == "gradient":
            zero = (loss_input.logprobs_BT[0, 0] - loss_input.logprobs_BT[0, 0].detach()).abs()
            return LossOutput(output.sum + torch.sqrt(zero), output.weight, output.metrics)
        return output

    mesh = DeviceMesh.from_sizes(device_type="cpu", dp_size=2)
    share = rows[mesh.get_slice(len(rows), int(os.environ["RANK"]))]
    trainer = MegatronTrainer(path, mesh, precision, on_non_finite=on_non_finite)  # pyright: ignore[reportArgumentType]
    try:
        trainer.set_loss(loss)
        trainer.set_optimizer("sgd", lr=0.1)
        start = trainer.export_weights()

        def take_step(clips: bool) -> None:
            trainer.forward_backward(share, 2)
            _ = trainer.clip_grad_and_step(1.0) if clips else trainer.step()

        for fault["at"] in ("loss", "gradient"):
            for clips in (True, False):
                if on_non_finite == "error":
                    with pytest.raises(NonFiniteError):
                        take_step(clips)
                    trainer.zero_grad()
                else:
                    take_step(clips)
                    trainer.zero_grad()
                    metrics = trainer.calculate_metric()
                    assert metrics["skipped_steps"] == 1
                    assert np.isfinite(metrics.get("loss", 0.0))
                after = trainer.export_weights()
                assert all(np.array_equal(after[name], start[name]) for name in after)
        fault["at"] = ""
        assert abs(trainer.forward_backward(share, 2).loss or 0.0) > 0
        assert trainer.clip_grad_and_step(1.0) > 0
        moved = trainer.export_weights()
        assert not moved or any(not np.array_equal(moved[name], start[name]) for name in moved)
        assert trainer.get_train_configs()["adapters"][""]["step"] == 1
        if on_non_finite == "skip":
            assert trainer.calculate_metric()["skipped_steps"] == 0
    finally:
        trainer.close()


@pytest.mark.parametrize("on_non_finite", ["error", "skip"])
def test_a_step_that_is_not_finite_is_an_error_or_skipped_on_all_ranks(on_non_finite: str, two_ranks: Any, checkpoint: Any, features: Any) -> None:
    two_ranks.run(not_finite_on_rank, checkpoint("qwen3"), features, on_non_finite, "no")


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
