"""What a trainer keeps for each adapter, and the order in which its methods may be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from twinkle_data import InputProcessor, Template

from ._errors import CallOrderError, InputError, NonFiniteError, UnknownAdapterError
from ._lora import LoraConfig
from ._loss import Loss, LossInput
from ._metrics import AnyMetric, Metric
from ._optimizer import OptimizerConfig
from ._schedules import LRSchedule
from ._totals import Totals

PendingT = TypeVar("PendingT")


class Gradients(Enum):
    """What the gradients of an adapter hold."""

    NONE = "none"
    SUMS = "sums"  # sums over tokens or sequences, of this rank
    MEANS = "means"  # summed over ranks and divided by the global weight
    USED = "used"  # a step was taken with them
    BROKEN = "broken"  # a backward failed half-way, or they are not finite


@dataclass
class TrainState(Generic[PendingT]):
    """Loss, optimizer settings, accumulated weight, counters and metrics of one adapter ('' is the base model).

    Engine-independent: tensors and optimizers stay with the engine. `pending` is what `forward` left for `calculate_loss` and
    `backward`; nothing else writes it, so a `forward_only` between them changes nothing.

    metrics: what is measured beside the loss.
    lora: how the adapter is configured; None: the base model. processor, template: None: those of the base model.
    num_accumulated: calls that have added gradients since the last step. accumulated_weight: their global weight; 1 when the loss wants its
    gradients undivided (`reduction = "sum"`), as `undivided` tells.
    step: optimizer steps taken. learning_rate: the one that the next step uses.
    non_finite: the next step is to be skipped, since a loss or gradient is NaN or infinite.
    norm_is_known: the gradients' norm was measured, and is finite. num_skipped: steps skipped since metrics were taken.
    """

    adapter_name: str = ""
    lora: LoraConfig | None = None
    processor: InputProcessor | None = None
    template: Template | None = None
    loss: Loss | None = None
    metrics: list[Callable[[LossInput], Mapping[str, AnyMetric]]] = field(default_factory=list[Callable[[LossInput], Mapping[str, AnyMetric]]])
    optimizer: OptimizerConfig | None = None
    schedule: LRSchedule = field(default_factory=LRSchedule)
    gradients: Gradients = Gradients.NONE
    accumulated_weight: float = 0.0
    num_accumulated: int = 0
    undivided: bool = False
    step: int = 0
    learning_rate: float = 0.0
    pending: PendingT | None = None
    totals: Totals = field(default_factory=Totals)
    non_finite: bool = False
    norm_is_known: bool = False
    num_skipped: int = 0
    grad_norm: Metric = field(default_factory=lambda: Metric(0.0, 0.0))
    used_learning_rate: float | None = None

    def require_loss(self, method: str) -> Loss:
        """The loss; CallOrderError when none was set."""
        if self.loss is None:
            raise CallOrderError(f"{method} needs a loss: call set_loss('cross_entropy') or another first")
        return self.loss

    def require_optimizer(self, method: str) -> OptimizerConfig:
        """The optimizer's configuration; CallOrderError when none was set."""
        if self.optimizer is None:
            raise CallOrderError(f"{method} needs an optimizer: call set_optimizer('adamw', lr=...) first")
        return self.optimizer

    def require_pending(self, method: str) -> PendingT:
        """What `forward` left; CallOrderError when there is nothing."""
        if self.pending is None:
            raise CallOrderError(f"{method} needs a forward: call forward(inputs) first (a backward uses it up)")
        return self.pending

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Takes the configuration of a fresh optimizer: step counter 0, constant learning rate."""
        self.optimizer = config
        self.schedule, self.step, self.used_learning_rate = LRSchedule(), 0, None
        self.update_learning_rate()

    def adjust_optimizer(self, config: OptimizerConfig) -> None:
        """Takes other settings of the optimizer that is there; counters and schedule stay."""
        self.optimizer = config
        self.update_learning_rate()

    def set_schedule(self, schedule: LRSchedule) -> None:
        """Takes the schedule; CallOrderError without an optimizer."""
        self.require_optimizer("set_lr_scheduler")
        self.schedule = schedule
        self.update_learning_rate()

    def update_learning_rate(self) -> float:
        """Sets the learning rate to the schedule's at `step`, a pure function of it: calling it twice is harmless."""
        self.learning_rate = self.require_optimizer("lr_step").lr * self.schedule.factor(self.step)
        return self.learning_rate

    def check_can_accumulate(self, method: str) -> None:
        """CallOrderError when the gradients that are there cannot be added to."""
        self._check_not_broken(method)
        if self.gradients is Gradients.USED:
            raise CallOrderError(f"{method} after step: call zero_grad() first, or the old gradients would be added to the new")
        if self.gradients is Gradients.MEANS:
            raise CallOrderError(f"{method} after clip_grad_norm: the gradients are means already; call step() and zero_grad() first")
        if self.num_accumulated and self.undivided != self._wants_sum:
            raise CallOrderError(f"{method}: gradients of a loss with reduction 'sum' and of one without cannot be added: take the step between them")

    @property
    def _wants_sum(self) -> bool:
        return getattr(self.loss, "reduction", "mean") == "sum"

    def add_gradients(self, totals: Totals) -> None:
        """Counts one backward whose global totals these are."""
        self.check_can_accumulate("backward")
        self.gradients = Gradients.SUMS
        self.undivided = self._wants_sum
        self.accumulated_weight = 1.0 if self.undivided else self.accumulated_weight + totals.weight
        self.num_accumulated += 1

    def add_non_finite(self) -> None:
        """Counts one backward whose loss is not finite: the step that it belongs to is skipped."""
        self.check_can_accumulate("backward")
        self.gradients = Gradients.SUMS
        self.num_accumulated += 1
        self.non_finite = True

    def skip_step(self) -> None:
        """Counts a step that is not taken; counter, schedule and learning rate stay."""
        self.gradients = Gradients.USED
        self.num_skipped += 1

    def mark_broken(self) -> None:
        """Notes that the gradients are unusable; only clear_gradients ends that."""
        self.gradients = Gradients.BROKEN

    def _check_not_broken(self, method: str) -> None:
        if self.gradients is Gradients.BROKEN:
            raise CallOrderError(f"{method} after an error: the gradients are unusable; call zero_grad() first")

    def divisor(self, method: str) -> float | None:
        """What the gradients must be divided by now to become means, None when they are means already. Call `mark_means` after it.

        Raises CallOrderError without gradients, InputError when the global weight is zero.
        """
        self._check_not_broken(method)
        if self.gradients is Gradients.MEANS:
            return None
        if self.gradients is Gradients.NONE:
            raise CallOrderError(f"{method} without gradients: call forward_backward(inputs), or forward, calculate_loss and backward, first")
        if self.gradients is Gradients.USED:
            raise CallOrderError(f"{method} after step: its gradients were used; call zero_grad() and forward_backward(inputs) first")
        if self.accumulated_weight <= 0:
            raise InputError(f"{method}: the accumulated weight is {self.accumulated_weight}: no token of any rank is trained on (check labels)")
        return self.accumulated_weight

    def mark_means(self) -> None:
        """Notes that the engine has summed the gradients over ranks and divided them."""
        self.gradients = Gradients.MEANS

    def finish_step(self) -> None:
        """Counts an optimizer step with the gradients that are there. A pending forward is forgotten: its graph is of the weights before."""
        self.gradients = Gradients.USED
        self.pending = None
        self.used_learning_rate = self.learning_rate
        self.step += 1

    def clear_gradients(self) -> None:
        """Forgets gradients and their weight; a pending forward stays."""
        self.gradients = Gradients.NONE
        self.accumulated_weight = 0.0
        self.undivided = False
        self.num_accumulated = 0
        self.non_finite = self.norm_is_known = False

    def record(self, totals: Totals) -> None:
        """Adds a call's global totals to the metrics."""
        self.totals = self.totals.combine(totals)

    def check_grad_norm(self, norm: float) -> None:
        """Raises NonFiniteError when the gradients' norm is not finite."""
        if not abs(norm) < float("inf"):
            self.mark_broken()
            raise NonFiniteError(
                f"the gradient norm is {norm}; the weights were not changed. Look for overflow in the loss or a learning rate too high"
            )
        self.norm_is_known = True

    def record_grad_norm(self, norm: float) -> None:
        """Adds a step's gradient norm to the metrics; NonFiniteError when it is not finite."""
        self.check_grad_norm(norm)
        self.grad_norm = self.grad_norm.combine(Metric(norm, 1.0))

    def take_metrics(self) -> dict[str, float]:
        """The metrics since the last call, as floats: `loss`, `grad_norm` (mean over steps), `lr`, and the loss's own."""
        metrics = self.totals.metric_values()
        if self.totals.weight:
            metrics["loss"] = self.totals.loss
        if self.grad_norm.weight:
            metrics["grad_norm"] = self.grad_norm.compute()
        if self.optimizer is not None:
            metrics["lr"] = self.learning_rate if self.used_learning_rate is None else self.used_learning_rate
        self.totals, self.grad_norm, self.used_learning_rate, self.num_skipped = Totals(), Metric(0.0, 0.0), None, 0
        return metrics


def is_finite(totals: Totals) -> bool:
    """Whether neither the sum nor the weight of a loss is NaN or infinite."""
    return abs(totals.loss_sum) < float("inf") and abs(totals.weight) < float("inf")


def check_finite(totals: Totals) -> None:
    """Raises NonFiniteError when the sum or the weight of a loss is NaN or infinite."""
    for name, value in (("loss", totals.loss_sum), ("loss weight", totals.weight)):
        if not abs(value) < float("inf"):
            raise NonFiniteError(f"the {name} is {value}; its gradients are unusable: call zero_grad() and look at the inputs")


StateT = TypeVar("StateT")


def state_of(states: dict[str, StateT], adapter_name: str) -> StateT:
    """The state of exactly that adapter; UnknownAdapterError naming those that exist."""
    state = states.get(adapter_name)
    if state is None:
        raise UnknownAdapterError(f"no adapter {adapter_name!r}; there are {sorted(states)} ('' is the base model)")
    return state
