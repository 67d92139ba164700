"""The conformance suite: the reference passes it, and each way to be wrong fails it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from twinkle_data import InputFeature, InputProcessor, Message, Template, Trajectory
from twinkle_train import (
    CallOrderError,
    ConfigError,
    CrossEntropyLoss,
    InputError,
    LossOutput,
    Metric,
    NonFiniteError,
    TokenOutputs,
    UnknownAdapterError,
)
from twinkle_train.testing import ReferenceTrainer, conformance, random_features, rollout_features, tiny_llama, tiny_qwen2, tiny_qwen3


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_qwen2, tiny_llama])
def test_the_reference_conforms_to_itself_in_double_precision(make, tmp_path):
    # Against float64 the stated fp32 tolerances show their room: nothing but rounding differs.
    model = make(tmp_path / "model")
    conformance.run_all(ReferenceTrainer(model), ReferenceTrainer(model, dtype=torch.float64), tmp_path / "saved")


class LeftPadded(ReferenceTrainer):
    def __init__(self, path):
        super().__init__(path)
        self.set_processor(InputProcessor(pad_token_id=0, padding_side="left", alignment=8))


def test_a_trainer_that_pads_on_the_left_and_to_a_multiple_conforms(checkpoint, tmp_path):
    conformance.run_all(LeftPadded(checkpoint), ReferenceTrainer(checkpoint), tmp_path / "saved")


class ScaledGradient(ReferenceTrainer):
    """One matrix's gradient is off by a thousandth."""

    def _reduce_gradients(self, adapter_name):
        self._model.model.layers[0].mlp.up_proj.weight.grad.mul_(1.001)


class ForgottenNorm(ReferenceTrainer):
    """A small weight gets no gradient."""

    def _reduce_gradients(self, adapter_name):
        self._model.model.layers[1].self_attn.q_norm.weight.grad.zero_()


class IgnoresMask(ReferenceTrainer):
    """Prompts are trained on too."""

    def _collate(self, rows):
        batch = super()._collate(rows)
        return replace(batch, loss_mask=batch.valid.astype(np.float32))


class IgnoresWeights(ReferenceTrainer):
    """Loss weights are dropped."""

    def _collate(self, rows):
        batch = super()._collate(rows)
        return replace(batch, loss_mask=(batch.loss_mask > 0).astype(np.float32))


class IgnoresTemperature(ReferenceTrainer):
    def _forward(self, adapter_name, batch):
        return super()._forward(adapter_name, replace(batch, temperature=np.ones_like(batch.temperature)))


class AveragesMicroBatches(ReferenceTrainer):
    """Each micro-batch's mean counts the same, whatever its number of tokens."""

    def _run(self, adapter_name, batches, compute_loss):
        if compute_loss is None:
            return super()._run(adapter_name, batches, None)

        def mean(index, outputs):
            output = compute_loss(index, outputs)
            return LossOutput(output.sum / output.weight * 10, output.weight, output.metrics)

        return super()._run(adapter_name, batches, mean)


class OverwritesGradients(ReferenceTrainer):
    """Accumulated calls overwrite one another's gradients."""

    def _run(self, adapter_name, batches, compute_loss):
        if compute_loss is not None:
            self._model.zero_grad()
        return super()._run(adapter_name, batches, compute_loss)


class KeepsGradients(ReferenceTrainer):
    """zero_grad does not."""

    def _zero_gradients(self, adapter_name):
        pass


class WrongNorm(ReferenceTrainer):
    """The norm of half of the model."""

    def _gradient_norm(self, adapter_name):
        return float(np.sqrt(sum(float(p.grad.square().sum()) for p in self._model.model.layers.parameters())))


class IgnoresClipping(ReferenceTrainer):
    def clip_grad_norm(self, max_grad_norm=1.0, *, adapter_name=""):
        return super().clip_grad_norm(float("inf"), adapter_name=adapter_name)


class IgnoresSchedule(ReferenceTrainer):
    def _optimizer_step(self, adapter_name, learning_rate):
        super()._optimizer_step(adapter_name, self._state(adapter_name).require_optimizer("step").lr)


class ScalesStep(ReferenceTrainer):
    """The optimizer scales gradients once more."""

    def _optimizer_step(self, adapter_name, learning_rate):
        self._scale_gradients(adapter_name, 0.999)
        super()._optimizer_step(adapter_name, learning_rate)


class ForwardOnlyDisturbs(ReferenceTrainer):
    """forward_only replaces the pending forward."""

    def forward_only(self, inputs, micro_batch_size=None, adapter_name="", **options):
        return super().forward(inputs, adapter_name=adapter_name)


class NoisyForwardOnly(ReferenceTrainer):
    """forward_only computes with other weights than training does, as a stale copy would."""

    def _run(self, adapter_name, batches, compute_loss):
        outputs = super()._run(adapter_name, batches, compute_loss)
        return outputs if compute_loss else [TokenOutputs(each.logprobs_BT + 1e-3, each.entropy_BT) for each in outputs]


class SkipsReduction(ReferenceTrainer):
    """Reports the local loss of the first rows only."""

    def forward_backward(self, inputs, micro_batch_size=None, adapter_name="", **options):
        output = super().forward_backward(inputs, micro_batch_size, adapter_name, **options)
        return replace(output, loss=(output.loss or 0.0) * 1.00001)


class ForgetsMetrics(ReferenceTrainer):
    """calculate_metric speaks of the last call only."""

    def forward_backward(self, inputs, micro_batch_size=None, adapter_name="", **options):
        self.calculate_metric()
        return super().forward_backward(inputs, micro_batch_size, adapter_name, **options)


class SavesOldWeights(ReferenceTrainer):
    def save(self, path, **options):
        ReferenceTrainer(self._folder).save(path, **options)


class AllowsAnyOrder(ReferenceTrainer):
    def step(self, *, adapter_name=""):
        if self._state(adapter_name).num_accumulated:
            super().step(adapter_name=adapter_name)


class ForgetsMoments(ReferenceTrainer):
    """Resumes with the weights, and with an optimizer that starts anew."""

    def _read_checkpoint(self, path, info):
        super()._read_checkpoint(path, info)
        optimizer = info.adapters[""].optimizer
        assert optimizer is not None
        self._make_optimizer("", optimizer)


class ForgetsWeights(ReferenceTrainer):
    def _read_checkpoint(self, path, info):
        before = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        super()._read_checkpoint(path, info)
        self._model.load_state_dict(before)


class ForgetsSchedule(ReferenceTrainer):
    def resume_from_checkpoint(self, path, **options):
        user_state = super().resume_from_checkpoint(path, **options)
        self.set_lr_scheduler("constant")
        return user_state


class ForgetsUserState(ReferenceTrainer):
    def resume_from_checkpoint(self, path, **options):
        super().resume_from_checkpoint(path, **options)
        return {}


def _resume(trainer, reference, rows, path):
    conformance.check_resume(trainer, path / type(trainer).__name__, rows)


def _grpo(trainer, reference, rows, path):
    conformance.check_first_ratio_is_one(trainer, rows)


def _save(trainer, reference, rows, path):
    conformance.check_sgd_step(trainer, reference, rows)
    conformance.check_save(trainer, path)


def _alone(check):
    return lambda trainer, reference, rows, path: check(trainer, rows)


def _beside(check, **options):
    return lambda trainer, reference, rows, path: check(trainer, reference, rows, **options)


_gradients = _beside(conformance.check_loss_and_gradients, micro_batch_size=2)


class ForgetsMomentsWhenAdjusted(ReferenceTrainer):
    def _adjust_optimizer(self, adapter_name, config):
        self._make_optimizer(adapter_name, config)


class IgnoresAdjustedBetas(ReferenceTrainer):
    def _adjust_optimizer(self, adapter_name, config):
        super()._adjust_optimizer(adapter_name, replace(config, betas=(0.9, 0.99)))


class ForgetsOrder(ReferenceTrainer):
    """Rows of micro-batches by tokens come back in the micro-batches' order."""

    def _micro_batches(self, features, micro_batch_size, micro_batch_tokens):
        batches, order = super()._micro_batches(features, micro_batch_size, micro_batch_tokens)
        return batches, range(len(order))


class DropsLongRows(ReferenceTrainer):
    """Micro-batches by tokens leave the longest row untrained."""

    def _micro_batches(self, features, micro_batch_size, micro_batch_tokens):
        batches, order = super()._micro_batches(features, micro_batch_size, micro_batch_tokens)
        if micro_batch_tokens is not None:
            batches[0] = replace(batches[0], loss_mask=batches[0].loss_mask * 0)
        return batches, order


class ChangesDistributions(ReferenceTrainer):
    """What is asked for beside log-probabilities is changed."""

    change: Any

    def _forward(self, adapter_name, batch):
        outputs = super()._forward(adapter_name, batch)
        return outputs if outputs.logits_BTV is None else replace(outputs, **type(self).change(outputs))


class DropsTemperatureOfTop(ChangesDistributions):
    change = staticmethod(lambda outputs: {"top_logprobs_BTK": outputs.logits_BTV.log_softmax(-1).topk(5)[0]})


class ShiftsTop(ChangesDistributions):
    change = staticmethod(lambda outputs: {"top_tokens_BTK": outputs.top_tokens_BTK.roll(1, 1)})


class ShiftsLogits(ChangesDistributions):
    change = staticmethod(lambda outputs: {"logits_BTV": outputs.logits_BTV.roll(1, 1)})


class MeasuresFirstMicroBatch(ReferenceTrainer):
    """Metrics that were added see the first micro-batch only."""

    def add_metric(self, metric: Any, *, adapter_name="", **options):
        measure = metric(**options)
        seen = []

        def first_only(inputs):
            seen.append(inputs)
            return measure(inputs) | ({} if len(seen) == 1 else {"surprise": Metric(0.0, 0.0)})

        super().add_metric(first_only, adapter_name=adapter_name)


class DecaysNorms(ReferenceTrainer):
    def _adjust_optimizer(self, adapter_name, config):
        super()._adjust_optimizer(adapter_name, config)
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            group["weight_decay"] = config.weight_decay


@pytest.mark.parametrize(
    ("broken", "check", "message"),
    [
        (ScaledGradient, _gradients, "up_proj"),
        (ForgottenNorm, _gradients, "q_norm"),
        (IgnoresMask, _gradients, "loss"),
        (IgnoresWeights, _gradients, "loss"),
        (IgnoresTemperature, _gradients, "loss"),
        (SkipsReduction, _gradients, "loss"),
        (AveragesMicroBatches, _gradients, "gradients"),
        (WrongNorm, _gradients, "norm"),
        (IgnoresTemperature, _beside(conformance.check_logprobs), "log-probabilities"),
        (NoisyForwardOnly, _beside(conformance.check_logprobs), "log-probabilities"),
        (NoisyForwardOnly, _grpo, "ratio"),
        (AveragesMicroBatches, _alone(conformance.check_micro_batching), "gradients in micro-batches of 1"),
        (AveragesMicroBatches, _alone(conformance.check_three_calls_equal_forward_backward), "gradients of backward"),
        (OverwritesGradients, _alone(conformance.check_accumulation_equals_one_batch), "two calls"),
        (KeepsGradients, _alone(conformance.check_accumulation_equals_one_batch), "two calls"),
        (WrongNorm, _alone(conformance.check_clipping), "norm and gradients"),
        (IgnoresClipping, _alone(conformance.check_clipping), "norm after clipping"),
        (ForwardOnlyDisturbs, _alone(conformance.check_forward_only_disturbs_nothing), "calculate_loss after forward and forward_only"),
        (IgnoresSchedule, _alone(conformance.check_learning_rate), "learning rate 0.01"),
        (ScalesStep, _beside(conformance.check_sgd_step), "weights after SGD"),
        (ScalesStep, _alone(conformance.check_learning_rate), "learning rate"),
        (ForgetsMetrics, _alone(conformance.check_metrics), "metric 'loss'"),
        (SavesOldWeights, _save, "saved checkpoint"),
        (ForgetsMoments, _resume, "steps after resuming"),
        (ForgetsWeights, _resume, "steps after resuming"),
        (ForgetsSchedule, _resume, "steps after resuming"),
        (ForgetsUserState, _resume, "resume_from_checkpoint returned"),
        (ForgetsMomentsWhenAdjusted, _alone(conformance.check_adjusted_optimizer), "weights after adjust_optimizer"),
        (IgnoresAdjustedBetas, _alone(conformance.check_adjusted_optimizer), "weights after adjust_optimizer"),
        (DecaysNorms, _alone(conformance.check_adjusted_optimizer), "weights after adjust_optimizer"),
        (ForgetsOrder, _alone(conformance.check_token_budget), "log-probabilities by a budget"),
        (DropsLongRows, _alone(conformance.check_token_budget), "loss by a budget"),
        (DropsTemperatureOfTop, _beside(conformance.check_distributions), "log-probabilities of the likeliest"),
        (ShiftsTop, _beside(conformance.check_distributions), "likeliest tokens of row"),
        (ShiftsLogits, _beside(conformance.check_distributions), "logits"),
        (MeasuresFirstMicroBatch, _beside(conformance.check_added_metric), "added metric 'surprise'"),
        (AllowsAnyOrder, _alone(conformance.check_call_order), "step without gradients"),
    ],
)
def test_a_broken_trainer_fails_its_check(broken, check, message, checkpoint, tmp_path):
    rows = random_features(temperature=0.8)
    reference = ReferenceTrainer(checkpoint)
    with pytest.raises(AssertionError, match=message):
        check(broken(checkpoint), reference, rows, tmp_path / "saved")
    # The same check passes on a trainer that is not broken.
    check(ReferenceTrainer(checkpoint), ReferenceTrainer(checkpoint), rows, tmp_path / "saved")


def test_equal_arguments_give_equal_checkpoints(tmp_path):
    one, two, other = tiny_qwen3(tmp_path / "a"), tiny_qwen3(tmp_path / "b"), tiny_qwen3(tmp_path / "c", seed=1)
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert (one / "tokenizer.json").read_bytes() == (two / "tokenizer.json").read_bytes()


def test_checkpoint_sizes_are_fields_of_the_configuration(tmp_path):
    model = ReferenceTrainer(tiny_llama(tmp_path, num_hidden_layers=3, hidden_size=64, vocab_size=320))
    weights = model.export_weights()
    assert weights["model.embed_tokens.weight"].shape == (320, 64)
    assert "model.layers.2.mlp.up_proj.weight" in weights
    with pytest.raises(TypeError, match="num_layers"):
        tiny_llama(tmp_path / "other", num_layers=3)


@pytest.fixture
def trainer(checkpoint) -> Any:
    made = ReferenceTrainer(checkpoint)
    made.set_loss("cross_entropy")
    made.set_optimizer("sgd", lr=0.1)
    return made


def test_the_loss_is_that_of_the_hugging_face_model(trainer):
    row: Any = random_features([9], weighted=False)[0]
    output = trainer.forward_backward([row])
    labels = torch.as_tensor(row.labels)[None]
    with torch.no_grad():
        want = trainer._model(input_ids=torch.as_tensor(row.input_ids)[None], labels=labels, use_cache=False).loss
    assert output.loss == pytest.approx(float(want), abs=1e-6)
    assert output.loss_weight == (row.labels[1:] != -100).sum()


def test_metrics_that_were_added_are_an_adapters_own_and_have_names_of_their_own(trainer):
    rows = [InputFeature(input_ids=np.array([3, 4, 5, 6]))]
    trainer.add_metric(lambda inputs: {"tokens": Metric(inputs.mask_BT.sum(), 1.0)})
    trainer.set_loss("cross_entropy")
    assert trainer.forward_backward(rows).metrics["tokens"] == 3.0
    trainer.zero_grad()
    trainer.forward(rows)
    trainer.calculate_loss()
    assert trainer.calculate_metric()["tokens"] == 3.0
    trainer.add_metric(lambda inputs: {"tokens": Metric(1.0, 1.0)})
    with pytest.raises(ConfigError, match="tokens is measured twice"):
        trainer.forward_backward(rows)
    with pytest.raises(ConfigError, match="a metric is a class"):
        trainer.add_metric("accuracy")
    with pytest.raises(UnknownAdapterError):
        trainer.add_metric(lambda inputs: {}, adapter_name="other")


def test_what_ctrl_c_interrupts_is_not_added_to(trainer, monkeypatch):
    rows = random_features()
    trainer.forward_backward(rows, 2)
    want = trainer.export_gradients()
    trainer.zero_grad()
    calls = []

    def interrupted(inputs):
        calls.append(inputs)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return CrossEntropyLoss()(inputs)

    trainer.set_loss(interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.forward_backward(rows, 2)
    with pytest.raises(CallOrderError, match="after an error: the gradients are unusable; call zero_grad"):
        trainer.forward_backward(rows, 2)
    with pytest.raises(CallOrderError, match="after an error"):
        trainer.step()
    trainer.zero_grad()
    trainer.forward_backward(rows, 2)
    have = trainer.export_gradients()
    assert all(np.array_equal(have[name], gradient) for name, gradient in want.items())
    # Gradients of which some are summed or scaled, and some are not.
    for method, call in (("_reduce_gradients", trainer.step), ("_scale_gradients", trainer.step), ("_scale_gradients", trainer.clip_grad_and_step)):
        trainer.zero_grad()
        trainer.forward_backward(rows, 2)
        with monkeypatch.context() as patch:
            patch.setattr(trainer, method, lambda *args: interrupted(None))
            calls[:] = calls[:1]
            with pytest.raises(KeyboardInterrupt):
                call()
        with pytest.raises(CallOrderError, match="after an error"):
            trainer.step()
    trainer.zero_grad()
    trainer.forward_backward(rows, 2)
    trainer.clip_grad_norm(float("inf"))
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_scale_gradients", lambda *args: interrupted(None))
        calls[:] = calls[:1]
        with pytest.raises(KeyboardInterrupt):
            trainer.clip_grad_norm(1e-6)
    with pytest.raises(CallOrderError, match="after an error"):
        trainer.step()
    trainer.zero_grad()
    trainer.forward_backward(rows, 2)
    with monkeypatch.context() as patch:
        patch.setattr(trainer._optimizer, "step", lambda: interrupted(None))
        calls[:] = calls[:1]
        with pytest.raises(KeyboardInterrupt):
            trainer.step()
    with pytest.raises(CallOrderError, match="after an error"):
        trainer.step()
    trainer.zero_grad()
    with pytest.raises(CallOrderError, match="the last step was interrupted"):
        trainer.forward_backward(rows, 2)


def test_a_new_loss_begins_with_no_metrics(trainer):
    rows = [InputFeature(input_ids=np.array([3, 4, 5, 6]))]
    trainer.set_loss("cross_entropy")
    trainer.forward_backward(rows)
    trainer.set_loss("cross_entropy")
    assert "loss" not in trainer.calculate_metric()


def test_packed_documents_do_not_see_each_other(trainer):
    first, second = random_features([6, 8])
    packed = replace(
        first,
        input_ids=np.concatenate([first.input_ids, second.input_ids]),
        labels=None,
        completion_mask=None,
        loss_weights=None,
        position_ids=np.concatenate([np.arange(6), np.arange(8)]),
    )
    alone = trainer.forward_only([second]).logprobs[0]
    together = trainer.forward_only([packed]).logprobs[0]
    np.testing.assert_allclose(together[7:], alone[1:], atol=1e-5)
    leaking = trainer.forward_only([replace(packed, position_ids=None)]).logprobs[0]
    assert np.abs(leaking[7:] - alone[1:]).max() > 1e-2


def test_trajectories_are_encoded_by_the_template(trainer, checkpoint):
    chat = Trajectory(messages=[Message(role="user", content="1 + 1 ="), Message(role="assistant", content=" 2")])
    with pytest.raises(CallOrderError, match="set_template"):
        trainer.forward_only([chat])
    trainer.set_template(str(checkpoint))
    want = trainer.forward_backward([Template(str(checkpoint)).encode(chat)]).loss
    trainer.zero_grad()
    assert trainer.forward_backward([chat]).loss == want
    with pytest.raises(InputError, match="got str"):
        trainer.forward_only(["1 + 1"])


def test_an_unknown_adapter_is_refused_by_every_method(trainer):
    rows = random_features([5])
    for call in (
        lambda: trainer.forward_backward(rows, adapter_name="a"),
        lambda: trainer.forward_only(rows, adapter_name="a"),
        lambda: trainer.set_loss("grpo", adapter_name="a"),
        lambda: trainer.step(adapter_name="a"),
        lambda: trainer.export_weights(adapter_name="a"),
    ):
        with pytest.raises(UnknownAdapterError, match="no adapter 'a'"):
            call()


def test_missing_loss_and_optimizer_are_named(checkpoint):
    trainer = ReferenceTrainer(checkpoint)
    rows = random_features([5])
    with pytest.raises(CallOrderError, match="set_loss"):
        trainer.forward_backward(rows)
    trainer.set_loss("cross_entropy")
    trainer.forward_backward(rows)
    with pytest.raises(CallOrderError, match="set_optimizer"):
        trainer.clip_grad_and_step()
    assert trainer.clip_grad_norm() > 0, "clipping needs no optimizer"
    with pytest.raises(CallOrderError, match="set_optimizer"):
        trainer.lr_step()


@pytest.mark.parametrize("max_grad_norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_would_erase_gradients_is_refused(trainer, max_grad_norm):
    trainer.forward_backward(random_features([5]))
    with pytest.raises(ConfigError, match="max_grad_norm"):
        trainer.clip_grad_norm(max_grad_norm)


def test_a_failing_loss_leaves_no_half_gradients(trainer):
    rows = random_features([5, 6])
    calls = []

    def failing(inputs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("second micro-batch")
        return CrossEntropyLoss()(inputs)

    trainer.set_loss(failing)
    with pytest.raises(RuntimeError, match="second micro-batch"):
        trainer.forward_backward(rows, 1)
    with pytest.raises(CallOrderError, match="zero_grad"):
        trainer.step()
    trainer.zero_grad()
    trainer.forward_backward(rows, 1)
    assert np.isfinite(trainer.clip_grad_norm())


def test_a_loss_that_is_not_finite_never_reaches_the_weights(trainer):
    before = trainer.export_weights()
    trainer.set_loss(lambda inputs: LossOutput((inputs.logprobs_BT * float("nan")).sum(), inputs.mask_BT.sum()))
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        trainer.forward_backward(random_features([5]))
    with pytest.raises(CallOrderError, match="zero_grad"):
        trainer.step()
    after = trainer.export_weights()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_loss_must_return_a_loss_output(trainer):
    trainer.set_loss(lambda inputs: inputs.logprobs_BT.mean())
    with pytest.raises(InputError, match="returned a Tensor"):
        trainer.forward_backward(random_features([5]))


def test_rows_without_any_trained_token_are_refused_at_the_step(trainer):
    (row,) = random_features([5])
    trainer.forward_backward([replace(row, labels=np.full(5, -100))])
    with pytest.raises(InputError, match="no token"):
        trainer.clip_grad_and_step()


def test_configs_are_plain(trainer):
    trainer.set_lr_scheduler("cosine", total_steps=10)
    configs = trainer.get_train_configs()
    adapter = configs["adapters"][""]
    assert (adapter["loss"], adapter["optimizer"]["lr"], adapter["lr_scheduler"]["name"], adapter["step"]) == ("CrossEntropyLoss()", 0.1, "cosine", 0)
    assert configs["trainer"] == "ReferenceTrainer"


def test_rollout_rows_reach_the_clip_and_have_a_reference(trainer):
    rows = rollout_features(trainer, random_features())
    trainer.set_loss("grpo")
    metrics = trainer.forward_backward(rows).metrics
    assert 0 < metrics["clip_fraction"] < 1
    assert metrics["kl_ref"] > 0


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ReferenceTrainer(tmp_path)


class SumLoss(CrossEntropyLoss):
    reduction = "sum"


def test_a_loss_may_leave_its_gradients_undivided_through_accumulation_clipping_and_step(checkpoint):
    rows = random_features()
    mean, total = ReferenceTrainer(checkpoint), ReferenceTrainer(checkpoint)
    for trainer, loss in ((mean, CrossEntropyLoss()), (total, SumLoss())):
        trainer.set_loss(loss)
        trainer.set_optimizer("sgd", lr=1e-3)
    whole = mean.forward_backward(rows)
    parts = [total.forward_backward(rows[:2]), total.forward_backward(rows[2:])]
    sums = [(part.loss or 0.0) * part.loss_weight for part in (whole, *parts)]
    assert sum(sums[1:]) == pytest.approx(sums[0])
    norm = mean.clip_grad_norm(float("inf"))
    assert total.clip_grad_norm(float("inf")) == pytest.approx(norm * whole.loss_weight, rel=1e-5)
    for name, gradient in total.export_gradients().items():
        np.testing.assert_allclose(gradient, mean.export_gradients()[name] * whole.loss_weight, rtol=1e-3, atol=1e-5 * norm * whole.loss_weight)
    before = total.export_weights()
    gradients = total.export_gradients()
    total.step()
    for name, weight in total.export_weights().items():
        np.testing.assert_allclose(weight, before[name] - 1e-3 * gradients[name], rtol=0, atol=1e-6)


def test_sums_and_means_are_not_added_and_a_sum_over_nothing_is_a_step(checkpoint):
    trainer = ReferenceTrainer(checkpoint)
    trainer.set_optimizer("sgd", lr=1e-3)
    trainer.set_loss(SumLoss())
    trainer.forward_backward(random_features())
    trainer.set_loss("cross_entropy")
    with pytest.raises(CallOrderError, match="cannot be added"):
        trainer.forward_backward(random_features())
    trainer.zero_grad()
    trainer.forward_backward(random_features())


def test_log_probabilities_may_be_asked_of_other_tokens_than_those_that_follow(checkpoint):
    tokens, others = [5, 6, 7, 8, 9], [0, 11, 12, 8, 14]
    (have,) = ReferenceTrainer(checkpoint).forward_only([InputFeature(input_ids=tokens, targets=others)]).logprobs or []
    for t in range(1, 5):
        (want,) = ReferenceTrainer(checkpoint).forward_only([InputFeature(input_ids=[*tokens[:t], others[t]])]).logprobs or []
        assert have[t] == pytest.approx(want[t], abs=1e-5)
    beyond = InputFeature(input_ids=tokens, targets=[0, 10**6, 0, 0, 0])
    with pytest.raises(InputError, match="targets has the token 1000000"):
        Vocabulary(checkpoint).forward_only([beyond])


class Vocabulary(ReferenceTrainer):
    """Knows the size of its vocabulary, as engines do."""

    def __init__(self, path):
        super().__init__(path)
        self._vocab_size = int(self._model.get_input_embeddings().weight.shape[0])
