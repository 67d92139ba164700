"""What every trainer must do alike: checks that a trainer's own tests call.

Each check takes the trainer, mostly the reference trainer, and **whole** rows. On one rank of several, `share` is the part of the rows
that this rank gets (`mesh.get_slice(len(rows), rank)`), and `main` says whether this rank gets whole tensors from export_weights and
export_gradients (rank 0); every rank makes the same calls. A remote trainer, seen from its driver, needs neither.

A check raises AssertionError that names what differs, the worst tensor and by how much. Both trainers must start from one checkpoint; they leave
with equal weights, and without gradients. Checks set the loss and the optimizer that they need.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle_data import InputFeature

from .._contract import TrainModel
from .._errors import CallOrderError, CheckpointError
from .._loss import LossInput
from .._metrics import AnyMetric, MaxMetric, Metric
from ._compare import FP32, Tolerance, compare_numbers, compare_tensors, largest
from ._features import collected, random_features, rollout_features
from ._reference import ReferenceTrainer

__all__ = [
    "FP32",
    "Tolerance",
    "check_accumulation_equals_one_batch",
    "check_added_metric",
    "check_adjusted_optimizer",
    "check_call_order",
    "check_changed_bytes",
    "check_clipping",
    "check_distributions",
    "check_first_ratio_is_one",
    "check_forward_only_disturbs_nothing",
    "check_learning_rate",
    "check_logprobs",
    "check_loss_and_gradients",
    "check_metrics",
    "check_micro_batching",
    "check_resume",
    "check_save",
    "check_sgd_step",
    "check_three_calls_equal_forward_backward",
    "check_token_budget",
    "run_all",
]

Rows = Sequence[InputFeature]
Tensors = Mapping[str, NDArray[np.floating[Any]]]
ALL = slice(None)


def check_loss_and_gradients(
    trainer: TrainModel,
    reference: TrainModel,
    rows: Rows,
    *,
    share: slice = ALL,
    main: bool = True,
    micro_batch_size: int | None = None,
    loss: str = "cross_entropy",
    loss_options: Mapping[str, Any] | None = None,
    tolerance: Tolerance = FP32,
) -> None:
    """Loss, weight, metrics, gradient norm and every gradient of one forward_backward equal the reference's."""
    for each in (trainer, reference):
        each.set_loss(loss, **dict(loss_options or {}))
        each.zero_grad()
    have = collected(trainer.forward_backward(rows[share], micro_batch_size))
    want = collected(reference.forward_backward(rows))
    assert have.loss is not None
    assert want.loss is not None
    compare_numbers(f"{loss} loss", have.loss, want.loss, tolerance.loss)
    compare_numbers(f"{loss} weight", have.loss_weight, want.loss_weight, 0, 1e-6)
    if have.metrics.keys() != want.metrics.keys():
        raise AssertionError(f"metrics of {loss}: {sorted(have.metrics)}, expected {sorted(want.metrics)}")
    for name, value in want.metrics.items():
        # Of single tokens, and of exponentials of them: the tolerance of a log-probability.
        compare_numbers(f"metric {name!r} of {loss}", have.metrics[name], value, tolerance.logprobs, tolerance.logprobs)
    _compare_gradients(f"gradients of {loss}", trainer.export_gradients(), reference.export_gradients(), main, tolerance)
    have_norm, want_norm = trainer.clip_grad_norm(float("inf")), reference.clip_grad_norm(float("inf"))
    compare_numbers("gradient norm", have_norm, want_norm, 0, tolerance.norm)
    _clear(trainer, reference)


def check_logprobs(
    trainer: TrainModel,
    reference: TrainModel,
    rows: Rows,
    *,
    share: slice = ALL,
    has_outputs: bool = True,
    micro_batch_size: int | None = 2,
    tolerance: Tolerance = FP32,
) -> None:
    """forward_only and forward give the reference's log-probabilities and entropies, row by row, at the rows' temperature.

    has_outputs: whether this rank returns them (it is on the last stage).
    """
    want = collected(reference.forward_only(rows))
    assert want.logprobs is not None
    assert want.entropy is not None
    for method, have in (
        ("forward_only", collected(trainer.forward_only(rows[share], micro_batch_size))),
        ("forward", collected(trainer.forward(rows[share]))),
    ):
        if not has_outputs:
            if have.logprobs is not None:
                raise AssertionError(f"{method} returned log-probabilities on a rank that is said to have none")
            continue
        _compare_rows(f"log-probabilities of {method}", have.logprobs, want.logprobs[share], tolerance.logprobs)
        _compare_rows(f"entropies of {method}", have.entropy, want.entropy[share], tolerance.logprobs)


def check_distributions(
    trainer: TrainModel,
    reference: TrainModel,
    rows: Rows,
    *,
    share: slice = ALL,
    has_outputs: bool = True,
    top_k: int = 5,
    tolerance: Tolerance = FP32,
) -> None:
    """forward_only gives the reference's likeliest tokens with their log-probabilities, and its logits, when asked for them; else neither."""
    want = collected(reference.forward_only(rows, top_k=top_k, logits=True))
    have = collected(trainer.forward_only(rows[share], 2, top_k=top_k, logits=True))
    plain = collected(trainer.forward_only(rows[share], 2))
    for name in ("top_tokens", "top_logprobs", "logits"):
        if getattr(plain, name) is not None or (not has_outputs and getattr(have, name) is not None):
            raise AssertionError(f"forward_only returned {name}, which nobody asked this rank for")
    if not has_outputs:
        return
    assert want.top_tokens is not None
    assert want.top_logprobs is not None
    assert want.logits is not None
    _compare_rows("log-probabilities of the likeliest tokens", have.top_logprobs, want.top_logprobs[share], tolerance.logprobs)
    _compare_rows("logits", have.logits, want.logits[share], tolerance.logprobs)
    assert have.top_tokens is not None
    for index, (mine, theirs, best) in enumerate(zip(have.top_tokens, want.top_tokens[share], want.top_logprobs[share], strict=True)):
        # Tokens that are as likely but for rounding may change places.
        apart = np.abs(np.diff(best, axis=1)) > 4 * tolerance.logprobs
        sure = np.pad(apart, ((0, 0), (1, 0)), constant_values=True) & np.pad(apart, ((0, 0), (0, 1)), constant_values=False)
        if (mine != theirs)[sure].any():
            raise AssertionError(f"the likeliest tokens of row {index} differ")


def check_token_budget(trainer: TrainModel, rows: Rows, *, share: slice = ALL, main: bool = True, tolerance: Tolerance = FP32) -> None:
    """Micro-batches by a budget of tokens give the loss, gradients and log-probabilities of one batch, rows in their order."""
    mine = list(rows[share])
    _set_up(trainer)
    whole = collected(trainer.forward_backward(mine))
    gradients = trainer.export_gradients()
    trainer.zero_grad()
    budget = max(len(row) for row in rows) + 2
    parts = collected(trainer.forward_backward(mine, micro_batch_tokens=budget))
    assert whole.loss is not None
    assert parts.loss is not None
    compare_numbers("loss by a budget of tokens", parts.loss, whole.loss, tolerance.loss)
    _compare_gradients("gradients by a budget of tokens", trainer.export_gradients(), gradients, main, tolerance)
    if whole.logprobs is not None:
        _compare_rows("log-probabilities by a budget of tokens", parts.logprobs, whole.logprobs, tolerance.logprobs)
        scored = collected(trainer.forward_only(mine, micro_batch_tokens=budget))
        _compare_rows("log-probabilities of forward_only by a budget of tokens", scored.logprobs, whole.logprobs, tolerance.logprobs)
    else:
        trainer.forward_only(mine, micro_batch_tokens=budget)
    _clear(trainer)


def check_sgd_step(
    trainer: TrainModel,
    reference: TrainModel,
    rows: Rows,
    *,
    share: slice = ALL,
    main: bool = True,
    learning_rate: float = 0.1,
    momentum: float = 0.0,
    steps: int = 1,
    max_grad_norm: float = float("inf"),
    tolerance: Tolerance = FP32,
) -> None:
    """Weights after SGD steps equal the reference's, and moved. SGD, since Adam amplifies the rounding of gradients near zero."""
    before = reference.export_weights()
    _set_up(trainer, reference)
    for each in (trainer, reference):
        each.set_optimizer("sgd", lr=learning_rate, momentum=momentum)
    moved = 0.0
    for _ in range(steps):
        trainer.forward_backward(rows[share], 2)
        reference.forward_backward(rows)
        trainer.clip_grad_and_step(max_grad_norm)
        moved += learning_rate * reference.clip_grad_and_step(max_grad_norm)
    have, want = trainer.export_weights(), reference.export_weights()
    if not main:
        return
    if max(float(np.abs(want[name] - before[name]).max()) for name in want) < 1e-3 * learning_rate:
        raise AssertionError("the reference's weights hardly moved: these rows prove nothing")
    # An update is the learning rate times a gradient; adding it to a weight rounds once more.
    rounding = 2.0**-22 * largest(want)
    compare_tensors("weights after SGD", have, want, rtol=0, atol=tolerance.everything * moved + rounding)


def check_accumulation_equals_one_batch(
    trainer: TrainModel, rows: Rows, *, share: slice = ALL, main: bool = True, tolerance: Tolerance = FP32
) -> None:
    """Gradients of two unequal calls equal those of one call with all rows: sums accumulate, the division comes last.

    Needs two rows in the share; a remote trainer needs three a data rank.
    """
    mine = list(rows[share])
    _set_up(trainer)
    trainer.forward_backward(mine)
    whole, whole_norm = trainer.export_gradients(), trainer.clip_grad_norm(float("inf"))
    trainer.zero_grad()
    for part in _parts(mine):
        trainer.forward_backward(part)
    compare_numbers("gradient norm of two calls", trainer.clip_grad_norm(float("inf")), whole_norm, 0, tolerance.norm)
    _compare_gradients("gradients of two calls and of one", trainer.export_gradients(), whole, main, tolerance)
    _clear(trainer)


def check_micro_batching(
    trainer: TrainModel,
    rows: Rows,
    *,
    share: slice = ALL,
    main: bool = True,
    sizes: Sequence[int] = (1, 2),
    loss: str = "cross_entropy",
    loss_options: Mapping[str, Any] | None = None,
    tolerance: Tolerance = FP32,
) -> None:
    """Loss, metrics and gradients do not depend on the micro-batch size."""
    trainer.set_loss(loss, **dict(loss_options or {}))
    trainer.zero_grad()
    want = collected(trainer.forward_backward(rows[share]))
    gradients = trainer.export_gradients()
    assert want.loss is not None
    for size in sizes:
        trainer.zero_grad()
        have = collected(trainer.forward_backward(rows[share], size))
        assert have.loss is not None
        compare_numbers(f"loss in micro-batches of {size}", have.loss, want.loss, tolerance.loss)
        for name, value in want.metrics.items():
            compare_numbers(f"metric {name!r} in micro-batches of {size}", have.metrics[name], value, tolerance.logprobs, tolerance.logprobs)
        _compare_gradients(f"gradients in micro-batches of {size}", trainer.export_gradients(), gradients, main, tolerance)
    _clear(trainer)


def check_three_calls_equal_forward_backward(
    trainer: TrainModel, rows: Rows, *, share: slice = ALL, main: bool = True, has_graph: bool = True, tolerance: Tolerance = FP32
) -> None:
    """forward, calculate_loss and backward give loss and gradients of forward_backward; without a graph (a pipeline) backward is refused."""
    _set_up(trainer)
    want = collected(trainer.forward_backward(rows[share]))
    gradients = trainer.export_gradients()
    trainer.zero_grad()
    trainer.forward(rows[share])
    assert want.loss is not None
    compare_numbers("calculate_loss after forward", trainer.calculate_loss(), want.loss, tolerance.loss)
    if has_graph:
        trainer.backward()
        _compare_gradients("gradients of backward", trainer.export_gradients(), gradients, main, tolerance)
        expect_call_order_error("a second backward", trainer.backward, naming="forward")
    else:
        expect_call_order_error("backward on a pipeline", trainer.backward, naming="forward_backward")
    _clear(trainer)


def check_forward_only_disturbs_nothing(
    trainer: TrainModel, rows: Rows, *, share: slice = ALL, main: bool = True, tolerance: Tolerance = FP32
) -> None:
    """forward_only, of other rows, between forward and calculate_loss and between accumulated calls changes neither loss nor gradients."""
    others, _ = _parts(rows[share])  # their loss differs from that of all rows
    _set_up(trainer)
    trainer.forward(rows[share])
    want = trainer.calculate_loss()
    trainer.forward(rows[share])
    trainer.forward_only(others, 1)
    compare_numbers("calculate_loss after forward and forward_only", trainer.calculate_loss(), want, tolerance.loss)
    trainer.forward_backward(rows[share])
    gradients = trainer.export_gradients()
    trainer.zero_grad()
    trainer.calculate_metric()
    trainer.forward_backward(rows[share])
    trainer.forward_only(others, 1)
    compare_numbers("calculate_metric after forward_only", trainer.calculate_metric()["loss"], want, tolerance.loss)
    _compare_gradients("gradients after forward_only", trainer.export_gradients(), gradients, main, tolerance)
    _clear(trainer)


def check_clipping(trainer: TrainModel, rows: Rows, *, share: slice = ALL, main: bool = True, tolerance: Tolerance = FP32) -> None:
    """clip_grad_norm honours its argument, returns the norm before clipping, and leaves gradients of at most that norm."""
    _set_up(trainer)
    trainer.forward_backward(rows[share])
    norm = trainer.clip_grad_norm(float("inf"))
    gradients = trainer.export_gradients()
    if main:
        compare_numbers("norm and gradients", norm, _norm(gradients), 0, tolerance.norm)
    trainer.zero_grad()
    trainer.forward_backward(rows[share])
    compare_numbers("norm before clipping", trainer.clip_grad_norm(norm / 3), norm, 0, tolerance.norm)
    # 1e-6: what clipping adds to the norm that it divides by.
    compare_numbers("norm after clipping to a third", trainer.clip_grad_norm(float("inf")), norm / 3, 1e-6, tolerance.norm)
    if main:
        third = {name: gradient / 3 for name, gradient in gradients.items()}
        _compare_gradients("clipped gradients", trainer.export_gradients(), third, main, tolerance)
    else:
        trainer.export_gradients()
    _clear(trainer)


def check_first_ratio_is_one(trainer: TrainModel, rows: Rows, *, share: slice = ALL, has_outputs: bool = True, atol: float = 1e-5) -> None:
    """With old log-probabilities from the trainer's own forward_only, GRPO's first ratio is 1, its KL to itself 0.

    has_outputs: as in check_logprobs; where it is False this rank's rows must be given log-probabilities by the caller.
    """
    mine = rollout_features(trainer, rows[share], drift=0.0) if has_outputs else rows[share]
    if not has_outputs:
        trainer.forward_only(rows[share])
    trainer.set_loss("grpo")
    trainer.zero_grad()
    metrics = collected(trainer.forward_backward(mine, 1)).metrics
    compare_numbers("deviation of the first ratio from 1", metrics["ratio_max_deviation"], 0, atol)
    compare_numbers("gap of log-probabilities", metrics["logprob_gap"], 0, atol)
    compare_numbers("KL to the same policy", metrics["kl_ref"], 0, atol)
    _clear(trainer)


def check_metrics(trainer: TrainModel, rows: Rows, *, share: slice = ALL, tolerance: Tolerance = FP32) -> None:
    """calculate_metric is the weighted mean over the calls since the last one, and then forgets. Needs rows as above."""
    mine = list(rows[share])
    _set_up(trainer)
    trainer.set_optimizer("sgd", lr=0.0)
    trainer.calculate_metric()
    outputs = [collected(trainer.forward_backward(part)) for part in _parts(mine)]
    norm = trainer.clip_grad_and_step(0.5)
    metrics = trainer.calculate_metric()
    weight = sum(output.loss_weight for output in outputs)
    want = sum((output.loss or 0.0) * output.loss_weight for output in outputs) / weight
    compare_numbers("metric 'loss'", metrics["loss"], want, tolerance.loss)
    compare_numbers("metric 'grad_norm'", metrics["grad_norm"], norm, 0, tolerance.norm)
    compare_numbers("metric 'lr'", metrics["lr"], 0.0, 0)
    left = trainer.calculate_metric()
    if {"loss", "grad_norm"} & left.keys():
        raise AssertionError(f"calculate_metric did not forget: {left}")
    _clear(trainer)


def check_added_metric(
    trainer: TrainModel, reference: TrainModel, rows: Rows, *, share: slice = ALL, micro_batch_size: int | None = 2, tolerance: Tolerance = FP32
) -> None:
    """What is measured beside the loss equals the reference's, over all ranks and micro-batches, and changes no gradient."""
    _set_up(trainer, reference)
    trainer.forward_backward(rows[share], micro_batch_size)
    norm = trainer.clip_grad_norm(float("inf"))
    trainer.zero_grad()
    for each in (trainer, reference):
        each.add_metric(_Surprise, power=2)
        each.calculate_metric()
    have = collected(trainer.forward_backward(rows[share], micro_batch_size)).metrics
    want = collected(reference.forward_backward(rows)).metrics
    totals = trainer.calculate_metric()
    for name in ("surprise", "worst"):
        if name not in have or name not in totals:
            raise AssertionError(f"the metric {name!r} was not measured")
        compare_numbers(f"added metric {name!r}", have[name], want[name], tolerance.logprobs, tolerance.logprobs)
        compare_numbers(f"added metric {name!r} of calculate_metric", totals[name], want[name], tolerance.logprobs, tolerance.logprobs)
    compare_numbers("gradient norm beside an added metric", trainer.clip_grad_norm(float("inf")), norm, 0, tolerance.norm)
    _clear(trainer, reference)


class _Surprise:
    def __init__(self, power: int) -> None:
        self._power = power

    def __call__(self, inputs: LossInput) -> dict[str, AnyMetric]:
        trained = inputs.mask_BT > 0
        values = inputs.logprobs_BT[trained].abs() ** self._power
        return {"surprise": Metric(values.double().sum(), trained.sum()), "worst": MaxMetric(values.max() if len(values) else 0.0)}


def check_learning_rate(trainer: TrainModel, rows: Rows, *, share: slice = ALL, main: bool = True, tolerance: Tolerance = FP32) -> None:
    """Each step moves the weights by the schedule's learning rate times the gradient: with warm-up 1/2 and 1, then half-way down."""
    _set_up(trainer)
    trainer.set_optimizer("sgd", lr=0.02)
    trainer.set_lr_scheduler("linear", warmup_steps=2, total_steps=4)
    for expected in (0.01, 0.02, 0.02, 0.01):
        before = trainer.export_weights()
        trainer.forward_backward(rows[share])
        gradients = trainer.export_gradients()
        trainer.step()
        trainer.zero_grad()
        after = trainer.export_weights()
        compare_numbers("metric 'lr'", trainer.calculate_metric()["lr"], expected, 1e-12)
        trainer.lr_step()
        if main:
            want = {name: before[name] - np.float32(expected) * gradients[name] for name in before if name in gradients}
            # tolerance.everything of the largest update, and the rounding of the subtraction.
            atol = tolerance.everything * expected * largest(gradients) + 2.0**-22 * largest(before)
            compare_tensors(f"weights after a step of learning rate {expected}", {name: after[name] for name in want}, want, rtol=0, atol=atol)
    _clear(trainer)


def check_adjusted_optimizer(trainer: TrainModel, rows: Rows, *, share: slice = ALL, main: bool = True, tolerance: Tolerance = FP32) -> None:
    """adjust_optimizer changes AdamW's rate, betas, eps and decay, and keeps its moments: the step after it is the formula's."""
    _set_up(trainer)
    trainer.set_optimizer("adamw", lr=0.0, betas=(0.9, 0.99), eps=1.0)
    trainer.forward_backward(rows[share])
    gradients = trainer.export_gradients()
    trainer.step()  # of rate 0: the moments are there, and the next gradient is the same
    trainer.zero_grad()
    trainer.adjust_optimizer(lr=0.01, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.1)
    before = trainer.export_weights()
    trainer.forward_backward(rows[share])
    trainer.step()
    trainer.zero_grad()
    after = trainer.export_weights()
    compare_numbers("metric 'lr' of an adjusted optimizer", trainer.calculate_metric()["lr"], 0.01, 1e-12)
    if main:
        want = {name: _second_adamw_step(before[name], gradients[name]) for name in before if name in gradients}
        # A change of the gradient moves the update by at most rate / eps times as much.
        atol = tolerance.everything * 0.01 / 1e-3 * largest(gradients) + 2.0**-22 * largest(before)
        compare_tensors("weights after adjust_optimizer and a step", {name: after[name] for name in want}, want, rtol=0, atol=atol)
    trainer.set_optimizer("sgd", lr=0.0)
    _clear(trainer)


def _second_adamw_step(weight: NDArray[np.floating[Any]], gradient: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    g = gradient.astype(np.float64)
    mean = (0.5 * (1 - 0.9) + (1 - 0.5)) * g / (1 - 0.5**2)
    square = (0.9 * (1 - 0.99) + (1 - 0.9)) * g * g / (1 - 0.9**2)
    decay = 0.1 if weight.ndim >= 2 else 0.0
    return weight * (1 - 0.01 * decay) - 0.01 * mean / (np.sqrt(square) + 1e-3)


def check_call_order(trainer: TrainModel, rows: Rows, *, share: slice = ALL) -> None:
    """Calls in a wrong order are errors that name the missing call, and leave the trainer usable."""
    _set_up(trainer)
    expect_call_order_error("clip_grad_norm without gradients", trainer.clip_grad_norm, naming="forward_backward")
    trainer.set_optimizer("sgd", lr=0.0)
    expect_call_order_error("step without gradients", trainer.step, naming="forward_backward")
    trainer.forward(rows[share])
    expect_call_order_error("backward before calculate_loss", trainer.backward, naming="calculate_loss|forward_backward")
    trainer.forward_backward(rows[share])
    trainer.step()
    expect_call_order_error("backward of a forward before the step", trainer.backward, naming="needs a forward")
    expect_call_order_error("a second step", trainer.step, naming="zero_grad")
    expect_call_order_error("forward_backward after step", lambda: trainer.forward_backward(rows[share]), naming="zero_grad")
    trainer.zero_grad()
    trainer.forward_backward(rows[share])
    trainer.clip_grad_norm(1.0)
    expect_call_order_error("forward_backward after clip_grad_norm", lambda: trainer.forward_backward(rows[share]), naming="zero_grad")
    trainer.clip_grad_and_step(1.0)
    trainer.forward_backward(rows[share])
    _clear(trainer)


def check_save(trainer: TrainModel, path: str | os.PathLike[str], *, main: bool = True) -> None:
    """The saved folder is a Hugging Face checkpoint with exactly the trainer's weights, and loads into it."""
    trainer.save(path)
    weights = trainer.export_weights()
    if main:
        loaded = ReferenceTrainer(path).export_weights()
        compare_tensors("weights of the saved checkpoint", weights, loaded, rtol=0, atol=0)
    trainer.load(path)
    again = trainer.export_weights()
    if main:
        compare_tensors("weights after save and load", again, weights, rtol=0, atol=0)


def check_resume(trainer: TrainModel, path: str | os.PathLike[str], rows: Rows, *, share: slice = ALL, main: bool = True) -> None:
    """Steps after resume_from_checkpoint are bit for bit those that followed save_checkpoint, whatever was trained in between.

    path: a folder that does not exist, the same on all ranks.
    """
    _set_up(trainer)
    trainer.set_optimizer("adamw", lr=0.01, weight_decay=0.1)
    trainer.set_lr_scheduler("linear", warmup_steps=3, total_steps=20)
    start, later = os.path.join(path, "start"), os.path.join(path, "later")
    trainer.save_checkpoint(start)
    position = {"epoch": 1, "rows": [3, 4], "version": 7}

    def step() -> tuple[float | None, float, float]:
        loss = collected(trainer.forward_backward(rows[share], 2)).loss
        norm = trainer.clip_grad_and_step(0.5)
        return loss, norm, trainer.calculate_metric()["lr"]

    step()
    trainer.save_checkpoint(later, user_state=position, background=True)
    want = [step() for _ in range(3)]
    weights = trainer.export_weights()
    trainer.wait_for_checkpoint()
    trainer.set_optimizer("sgd", lr=1.0)
    without = [step() for _ in range(3)]
    if without == want:
        raise AssertionError("another optimizer from other weights made the same steps: these rows prove nothing")
    trainer.forward_backward(rows[share])  # gradients that are left behind
    if (have := trainer.resume_from_checkpoint(later)) != position:
        raise AssertionError(f"resume_from_checkpoint returned {have}, the checkpoint was saved with {position}")
    have = [step() for _ in range(3)]
    if have != want:
        raise AssertionError(f"(loss, gradient norm, learning rate) of the steps after resuming: {have}; of those after saving: {want}")
    again = trainer.export_weights()
    if main:
        compare_tensors("weights after resuming and as many steps", again, weights, rtol=0, atol=0)
    if trainer.resume_from_checkpoint(start):
        raise AssertionError("a checkpoint without user_state gave some")
    _clear(trainer)


def check_changed_bytes(trainer: TrainModel, path: str | os.PathLike[str]) -> None:
    """A training checkpoint in which one bit of a weight has changed is refused, and changes nothing. For trainers of one rank.

    path: a folder that does not exist.
    """
    trainer.save_checkpoint(path)
    before = trainer.export_weights()
    file, at = _place_of_a_weight(Path(path), before)
    written = file.read_bytes()
    file.write_bytes(written[:at] + bytes([written[at] ^ 0x40]) + written[at + 1 :])
    try:
        trainer.resume_from_checkpoint(path)
    except CheckpointError as error:
        if file.name not in str(error):
            raise AssertionError(f"the error names another file than {file.name}: {error}") from error
    else:
        raise AssertionError("a checkpoint of which a bit has changed was read without an error")
    compare_tensors("weights after a checkpoint that was refused", trainer.export_weights(), before, rtol=0, atol=0)
    info = Path(path) / "checkpoint.json"
    text = info.read_text(encoding="utf-8")
    info.write_text(json.dumps(json.loads(text) | {"checksums": {}}), encoding="utf-8")  # as earlier versions wrote it
    trainer.resume_from_checkpoint(path)
    if all(np.array_equal(weight, before[name]) for name, weight in trainer.export_weights().items()):
        raise AssertionError("the changed bit is in no weight: this check proves nothing")
    info.write_text(text, encoding="utf-8")
    file.write_bytes(written)
    trainer.resume_from_checkpoint(path)
    compare_tensors("weights of the checkpoint as it was written", trainer.export_weights(), before, rtol=0, atol=0)


def _place_of_a_weight(folder: Path, weights: Mapping[str, NDArray[np.float32]]) -> tuple[Path, int]:
    """A file, and where in it the highest byte of some weight's third number is."""
    for file in sorted(folder.glob("*.distcp")):
        content = file.read_bytes()
        for weight in weights.values():
            if weight.size >= 16 and (at := content.find(weight.tobytes()[:64])) >= 0:
                return file, at + 11
    raise AssertionError(f"no weight is written as it is in {folder}")


def run_all(
    trainer: TrainModel,
    reference: TrainModel,
    path: str | os.PathLike[str],
    *,
    share_of: Callable[[int], slice] | None = None,
    main: bool = True,
    has_outputs: bool = True,
    has_graph: bool = True,
    tolerance: Tolerance = FP32,
) -> None:
    """Every check, on rows of different lengths, weights and temperatures.

    path: an empty folder for check_save, the same on all ranks. share_of: this rank's slice of so many rows (`mesh.get_slice`); every data
    rank needs two rows of six. main, has_outputs, has_graph: see the checks.
    """
    rows = random_features(vocab_size=_vocab_size(reference))
    warm = random_features(vocab_size=_vocab_size(reference), seed=1, temperature=0.7)
    rollouts = rollout_features(reference, warm)
    share = ALL if share_of is None else share_of(len(rows))
    grpo: dict[str, Any] = {"loss": "grpo", "loss_options": {"epsilon_high": 0.28, "beta": 0.1}}
    sequences: dict[str, Any] = {"loss": "grpo", "loss_options": {"aggregation": "sequence"}}
    check_logprobs(trainer, reference, rows, share=share, has_outputs=has_outputs, tolerance=tolerance)
    check_logprobs(trainer, reference, warm, share=share, has_outputs=has_outputs, tolerance=tolerance)
    check_distributions(trainer, reference, warm, share=share, has_outputs=has_outputs, tolerance=tolerance)
    check_loss_and_gradients(trainer, reference, rows, share=share, main=main, tolerance=tolerance)
    check_loss_and_gradients(trainer, reference, rollouts, share=share, main=main, micro_batch_size=1, tolerance=tolerance, **grpo)
    check_loss_and_gradients(trainer, reference, rollouts, share=share, main=main, micro_batch_size=2, tolerance=tolerance, **sequences)
    check_micro_batching(trainer, rows, share=share, main=main, tolerance=tolerance)
    check_micro_batching(trainer, rollouts, share=share, main=main, tolerance=tolerance, **sequences)
    check_token_budget(trainer, rows, share=share, main=main, tolerance=tolerance)
    check_accumulation_equals_one_batch(trainer, rows, share=share, main=main, tolerance=tolerance)
    check_three_calls_equal_forward_backward(trainer, rows, share=share, main=main, has_graph=has_graph, tolerance=tolerance)
    check_forward_only_disturbs_nothing(trainer, rows, share=share, main=main, tolerance=tolerance)
    check_clipping(trainer, rows, share=share, main=main, tolerance=tolerance)
    own = rows if has_outputs else rollout_features(reference, rows, drift=0.0)
    check_first_ratio_is_one(trainer, own, share=share, has_outputs=has_outputs)
    check_metrics(trainer, rows, share=share, tolerance=tolerance)
    check_added_metric(trainer, reference, rows, share=share, tolerance=tolerance)
    check_call_order(trainer, rows, share=share)
    check_sgd_step(trainer, reference, rows, share=share, main=main, tolerance=tolerance)
    check_sgd_step(trainer, reference, warm, share=share, main=main, momentum=0.9, steps=3, max_grad_norm=1.0, tolerance=tolerance)
    check_save(trainer, path, main=main)
    check_resume(trainer, f"{os.fspath(path)}-training", rows, share=share, main=main)
    check_learning_rate(trainer, rows, share=share, main=main, tolerance=tolerance)
    check_adjusted_optimizer(trainer, rows, share=share, main=main, tolerance=tolerance)


def expect_call_order_error(what: str, call: Callable[[], object], *, naming: str) -> None:
    """Raises AssertionError unless the call raises CallOrderError whose message has one of the names (separated by '|') in it."""
    try:
        call()
    except CallOrderError as error:
        if not any(name in str(error) for name in naming.split("|")):
            raise AssertionError(f"{what}: the error does not name {naming}: {error}") from error
        return
    raise AssertionError(f"{what} was accepted; it must be a CallOrderError that names {naming}")


def _parts(rows: Rows) -> tuple[list[InputFeature], list[InputFeature]]:
    """Two parts of unequal size and weight: a third (at least one row), and the rest."""
    first = max(1, len(rows) // 3)
    return list(rows[:first]), list(rows[first:])


def _set_up(*trainers: TrainModel) -> None:
    for trainer in trainers:
        trainer.set_loss("cross_entropy")
        trainer.zero_grad()


def _clear(*trainers: TrainModel) -> None:
    for trainer in trainers:
        trainer.zero_grad()
        trainer.calculate_metric()


def _compare_gradients(what: str, have: Tensors, want: Tensors, main: bool, tolerance: Tolerance) -> None:
    if main:
        compare_tensors(what, have, want, rtol=tolerance.tensor, atol=tolerance.everything * largest(want))


def _compare_rows(what: str, have: list[NDArray[np.float32]] | None, want: list[NDArray[np.float32]], atol: float) -> None:
    if have is None:
        raise AssertionError(f"{what}: none were returned")
    named = [{f"row {index}": row for index, row in enumerate(rows)} for rows in (have, want)]
    compare_tensors(what, named[0], named[1], rtol=0, atol=atol)


def _norm(tensors: Tensors) -> float:
    # A head that is tied to the embedding is one weight; it is exported under both names or one.
    tied = "lm_head.weight" in tensors and np.array_equal(tensors["lm_head.weight"], tensors.get("model.embed_tokens.weight", np.empty(0)))
    return float(np.sqrt(sum(float(np.square(t.astype(np.float64)).sum()) for name, t in tensors.items() if not (tied and name == "lm_head.weight"))))


def _vocab_size(reference: TrainModel) -> int:
    weights = reference.export_weights()
    return len(weights["model.embed_tokens.weight"])
