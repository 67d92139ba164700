"""What every trainer must do alike in float16 and with what is not finite, each on a rank: trainers' own tests call these.

A maker gives a new trainer of a mixed precision, with options. Every rank makes the same calls. What differs raises AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._errors import NonFiniteError
from .._loss import LossOutput
from .._losses import CrossEntropyLoss

__all__ = ["check_half", "check_not_finite"]


def check_half(make: Callable[..., Any], share: Sequence[Any], folder: Path, *, has_graph: bool = True) -> None:
    """Gradients near those of float32; overflow that is skipped until the scale fits; a checkpoint that keeps the scale; an adapter with its own.

    share: this rank's rows. folder: for a checkpoint. has_graph: whether `backward` works after `forward`.
    """
    found: dict[str, Any] = {}
    for precision in ("no", "fp16"):
        trainer = make(precision)
        trainer.set_loss("cross_entropy")
        trainer.set_optimizer("adamw", lr=1e-3)
        found[precision] = trainer.forward_backward(share, 2).loss, trainer.export_gradients()
        if has_graph:
            trainer.zero_grad()
            trainer.forward(share)
            trainer.calculate_loss()
            trainer.backward()
            again = trainer.export_gradients()
            for name, gradient in again.items():
                np.testing.assert_allclose(gradient, found[precision][1][name], rtol=0, atol=2e-2 if precision == "fp16" else 1e-5, err_msg=name)
        trainer.close()
    assert abs(found["fp16"][0] - found["no"][0]) < 5e-3
    assert found["fp16"][0] != found["no"][0]
    for name, gradient in found["no"][1].items():
        # float16 has 11 bits; the largest entry of a gradient is off by a few of them.
        np.testing.assert_allclose(found["fp16"][1][name], gradient, rtol=0, atol=0.02 * np.abs(gradient).max() + 1e-4, err_msg=name)

    trainer = make("fp16", initial_loss_scale=2.0**30)
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
    assert abs(metrics["lr"] - 1e-3 / 4) < 1e-9, "the schedule waits for steps that are taken"
    trainer.add_adapter_to_model("a", {"r": 4})
    trainer.set_loss("cross_entropy", adapter_name="a")
    assert trainer.calculate_metric(adapter_name="a")["loss_scale"] == 2.0**30
    trainer.save_checkpoint(folder)
    trainer.forward_backward(share, 2)
    trainer.step()
    want = trainer.export_weights()
    scale = trainer.calculate_metric()["loss_scale"]
    trainer.close()

    trainer = make("fp16")
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
    assert {tensor.dtype for _, tensor in trainer.iter_weights()} == {torch.float16}
    trainer.close()


def check_not_finite(make: Callable[..., Any], share: Sequence[Any], on_non_finite: str, *, is_faulty: bool) -> None:
    """A loss that is NaN on one rank once, and one whose gradient alone is: all ranks skip that step, or all raise.

    share: this rank's rows. on_non_finite: 'error' or 'skip'. is_faulty: whether this rank is the one.
    """
    fault = {"at": ""}

    def loss(loss_input: Any) -> Any:
        output = CrossEntropyLoss()(loss_input)
        if is_faulty and fault["at"] == "loss":
            return LossOutput(output.sum * float("nan"), output.weight, output.metrics)
        if is_faulty and fault["at"] == "gradient":
            zero = (loss_input.logprobs_BT[0, 0] - loss_input.logprobs_BT[0, 0].detach()).abs()
            return LossOutput(output.sum + torch.sqrt(zero), output.weight, output.metrics)
        return output

    trainer = make("no", on_non_finite=on_non_finite)
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
                    try:
                        take_step(clips)
                    except NonFiniteError:
                        pass
                    else:
                        raise AssertionError(f"a {fault['at']} that is not finite was trained on")
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
