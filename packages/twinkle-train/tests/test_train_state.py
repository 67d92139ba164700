"""The state of an adapter, without an engine."""

import math

import pytest

from twinkle_train import (
    CallOrderError,
    Gradients,
    InputError,
    LRSchedule,
    MaxMetric,
    Metric,
    NonFiniteError,
    OptimizerConfig,
    Totals,
    TrainState,
    UnknownAdapterError,
    combine_metrics,
    state_of,
)


def test_adapter_names_are_compared_exactly():
    states = {name: TrainState(name) for name in ("", "slot1", "slot10", "slot19")}
    assert state_of(states, "slot1").adapter_name == "slot1"
    for name in ("slot", "slot2", "Slot1"):
        with pytest.raises(UnknownAdapterError, match=f"no adapter '{name}'; there are"):
            state_of(states, name)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_every_step_takes_exactly_the_accumulated_calls(accumulate):
    state = TrainState(optimizer=OptimizerConfig())
    for step in range(4):
        for call in range(accumulate):
            state.add_gradients(Totals(loss_sum=1.0, weight=2.0))
            assert state.num_accumulated == call + 1
        assert state.divisor("step") == 2.0 * accumulate
        state.mark_means()
        assert state.divisor("step") is None, "gradients would be divided twice"
        state.finish_step()
        state.clear_gradients()
        assert (state.step, state.num_accumulated, state.accumulated_weight) == (step + 1, 0, 0.0)


def test_gradients_of_different_weight_share_one_divisor():
    state = TrainState()
    state.add_gradients(Totals(weight=3.0))
    state.add_gradients(Totals(weight=5.0))
    assert state.divisor("step") == 8.0


def test_no_trained_token_is_an_error_at_the_division():
    state = TrainState()
    state.add_gradients(Totals())
    with pytest.raises(InputError, match="no token of any rank is trained on"):
        state.divisor("clip_grad_norm")


def test_broken_gradients_can_only_be_dropped():
    state = TrainState()
    state.add_gradients(Totals(weight=1.0))
    state.mark_means()
    with pytest.raises(NonFiniteError, match="weights were not changed"):
        state.record_grad_norm(math.nan)
    for call in (lambda: state.divisor("step"), lambda: state.check_can_accumulate("forward_backward")):
        with pytest.raises(CallOrderError, match="zero_grad"):
            call()
    state.clear_gradients()
    assert state.gradients is Gradients.NONE
    state.check_can_accumulate("forward_backward")


def test_learning_rate_follows_the_steps_however_often_it_is_updated():
    state = TrainState()
    with pytest.raises(CallOrderError, match="set_optimizer"):
        state.set_schedule(LRSchedule())
    state.set_optimizer(OptimizerConfig(lr=0.1))
    state.set_schedule(LRSchedule("linear", warmup_steps=1, total_steps=3))
    rates = []
    for _ in range(4):
        rates.append(state.learning_rate)
        state.finish_step()
        state.update_learning_rate()
        state.update_learning_rate()
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.0])
    state.set_optimizer(OptimizerConfig(lr=0.2))
    assert (state.step, state.learning_rate) == (0, 0.2), "a fresh optimizer starts afresh"


def test_metrics_are_weighted_over_calls_and_then_forgotten():
    state = TrainState(optimizer=OptimizerConfig(lr=0.5))
    state.record(Totals(6.0, 2.0, {"entropy": Metric(4.0, 2.0), "gap": MaxMetric(0.1)}))
    state.record(Totals(0.0, 4.0, {"entropy": Metric(2.0, 4.0), "gap": MaxMetric(0.3)}))
    state.record_grad_norm(3.0)
    state.record_grad_norm(5.0)
    assert state.take_metrics() == {"loss": 1.0, "entropy": 1.0, "gap": 0.3, "grad_norm": 4.0, "lr": 0.0}
    assert state.take_metrics() == {"lr": 0.0}


def test_metrics_combine_by_kind_and_show_nan():
    both = combine_metrics({"a": Metric(1.0, 1.0)}, {"a": Metric(3.0, 1.0), "b": MaxMetric(2.0)})
    assert (both["a"].compute(), both["b"].compute()) == (2.0, 2.0)
    assert math.isnan(MaxMetric(math.nan).combine(MaxMetric(1.0)).compute())
    assert math.isnan(MaxMetric(1.0).combine(MaxMetric(math.nan)).compute())
    assert math.isnan(Metric(0.0, 0.0).compute())
    with pytest.raises(TypeError, match="'a' is a Metric here and a MaxMetric there"):
        combine_metrics({"a": Metric(1.0, 1.0)}, {"a": MaxMetric(1.0)})
