"""How the methods of the contract travel to workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from twinkle_remote import remote_function

from ._collect import collect_model_output
from ._contract import TrainModel

TrainerT = TypeVar("TrainerT", bound=type[TrainModel])

# Each worker gets its data rank's rows; the outputs come back in the order of the data. True: lazily.
_BATCH_METHODS = {"forward": False, "forward_only": True, "forward_backward": False}
# Every worker takes part, and has the same result.
_COLLECTIVE_METHODS = (
    "add_adapter_to_model",
    "add_metric",
    "adjust_optimizer",
    "backward",
    "calculate_loss",
    "calculate_metric",
    "clip_grad_and_step",
    "clip_grad_norm",
    "export_gradients",
    "export_weights",
    "get_state_dict",
    "get_train_configs",
    "load",
    "lr_step",
    "remove_adapter",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "set_loss",
    "set_lr_scheduler",
    "set_optimizer",
    "set_processor",
    "set_template",
    "step",
    "wait_for_checkpoint",
    "zero_grad",
)


def remote_train_methods(cls: TrainerT) -> TrainerT:
    """Class decorator, below `remote_class`: makes every method of the trainer contract a remote method of this class.

    Methods that take a batch are dispatched by data rank and collected by `collect_model_output`; all others run on every worker and
    return the first one's result. They return values, so that an error belongs to the line that caused it. Only `forward_only`, on which
    no later call depends, returns a LazyResult: a policy and its reference can score one batch at the same time.
    """
    for name, lazy in _BATCH_METHODS.items():
        _make_remote(cls, name, remote_function(dispatch="slice_dp", collect=collect_model_output, lazy_collect=lazy))
    for name in _COLLECTIVE_METHODS:
        _make_remote(cls, name, remote_function(dispatch="all", collect="first", lazy_collect=False))
    return cls


def _make_remote(cls: type[TrainModel], name: str, decorate: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(cls, name, decorate(getattr(cls, name)))
