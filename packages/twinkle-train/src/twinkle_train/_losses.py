"""The losses that come with Twinkle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ._errors import ConfigError
from ._loss import Loss, LossInput, LossOutput
from ._loss_parts import Reduction, check_reduction, max_metric, mean_metric, sequence_means, total
from ._metrics import AnyMetric
from ._policy_losses import POLICY_LOSSES


@dataclass(frozen=True)
class CrossEntropyLoss:
    """Negative log-likelihood of the trained tokens: sum of -mask * logprob, weight: sum of the mask.

    Metrics: `entropy` (mean over trained tokens) when the entropy is there.
    """

    def __call__(self, inputs: LossInput, /) -> LossOutput:
        mask_BT = inputs.mask_BT
        trained_BT = mask_BT > 0
        # where, not a product: a log-probability at an untrained position may be -inf, and 0 * inf is NaN.
        nll_BT = -torch.where(trained_BT, inputs.logprobs_BT, 0.0)
        metrics: dict[str, AnyMetric] = {}
        if inputs.entropy_BT is not None:
            metrics["entropy"] = mean_metric(inputs.entropy_BT, trained_BT)
        return LossOutput(total(nll_BT * mask_BT), total(mask_BT), metrics)


@dataclass(frozen=True)
class GRPOLoss:
    """The clipped policy-gradient objective of PPO (arXiv:1707.06347) with group-relative advantages (GRPO, arXiv:2402.03300).

    Per token: -min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A) + beta * k3, with r = exp(logprobs - old_logprobs) and
    k3 = exp(ref - logprobs) - (ref - logprobs) - 1, an unbiased estimate of KL(policy || reference)
    (http://joschu.net/blog/kl-approx.html). A distinct upper clip is DAPO's clip-higher (arXiv:2503.14476).

    epsilon: lower (and upper) clip range. epsilon_high: upper clip range, by default epsilon. beta: weight of the KL term; above 0 it
    needs ref_logprobs. aggregation: 'token' sums tokens and weighs by tokens (DAPO's token mean); 'sequence' takes each sequence's mean,
    sums those and weighs by sequences (GRPO as published). reduction: 'sum' leaves gradients undivided (see `Loss`).

    Metrics over trained tokens: `ratio_max_deviation` (maximum of |r - 1|), `logprob_gap` (maximum of |logprobs - old_logprobs|),
    `clip_fraction` (share of tokens whose gradient the clip cut off), `kl_ref` (mean of k3) when ref_logprobs are there, also with
    beta 0, and `entropy` (mean) when the entropy is there.

    Raises ConfigError for options out of range, InputError when old_logprobs, advantages or, with beta, ref_logprobs are missing.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    aggregation: Literal["token", "sequence"] = "token"
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.reduction)
        if not 0 <= self.epsilon < 1:
            raise ConfigError(f"epsilon must be in [0, 1), got {self.epsilon}")
        if self.epsilon_high is not None and self.epsilon_high < 0:
            raise ConfigError(f"epsilon_high must be >= 0 or None, got {self.epsilon_high}")
        if self.beta < 0:
            raise ConfigError(f"beta must be >= 0, got {self.beta}")
        if self.aggregation not in ("token", "sequence"):
            raise ConfigError(f"aggregation must be 'token' or 'sequence', got {self.aggregation!r}")

    def __call__(self, inputs: LossInput, /) -> LossOutput:
        mask_BT, trained_BT = inputs.mask_BT, inputs.mask_BT > 0
        old_BT = inputs.require("old_logprobs_BT", "give features with logprobs, as a sampler or forward_only returns them").detach()
        advantages_BT = inputs.require("advantages_BT", "set advantages on the features, for instance by group_advantages").detach()
        # Masked before exp: at untrained positions the difference may overflow, and its gradient would be NaN.
        log_ratio_BT = torch.where(trained_BT, inputs.logprobs_BT - old_BT, 0.0)
        ratio_BT = log_ratio_BT.exp()
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        plain_BT = ratio_BT * advantages_BT
        clipped_BT = ratio_BT.clamp(1 - self.epsilon, 1 + high) * advantages_BT
        losses_BT = -torch.minimum(plain_BT, clipped_BT)
        metrics: dict[str, AnyMetric] = {
            "ratio_max_deviation": max_metric((ratio_BT - 1).abs(), trained_BT),
            "logprob_gap": max_metric(log_ratio_BT.abs(), trained_BT),
            "clip_fraction": mean_metric((clipped_BT < plain_BT).to(mask_BT.dtype), trained_BT),
        }
        kl_BT = self._kl(inputs, trained_BT)
        if kl_BT is not None:
            metrics["kl_ref"] = mean_metric(kl_BT, trained_BT)
            if self.beta > 0:
                losses_BT = losses_BT + self.beta * kl_BT
        if inputs.entropy_BT is not None:
            metrics["entropy"] = mean_metric(inputs.entropy_BT, trained_BT)
        losses_BT = torch.where(trained_BT, losses_BT, 0.0)
        if self.aggregation == "token":
            return LossOutput(total(losses_BT * mask_BT), total(mask_BT), metrics)
        means, counted = sequence_means(losses_BT, mask_BT, inputs.sequence_ids_BT)
        return LossOutput(means.sum(), total(counted), metrics)

    def _kl(self, inputs: LossInput, trained_BT: Tensor) -> Tensor | None:
        if self.beta > 0:
            ref_BT = inputs.require("ref_logprobs_BT", "beta > 0; set ref_logprobs on the features, from the reference's forward_only")
        elif inputs.ref_logprobs_BT is None:
            return None
        else:
            ref_BT = inputs.ref_logprobs_BT
        difference_BT = torch.where(trained_BT, ref_BT.detach() - inputs.logprobs_BT, 0.0)
        # expm1: near equality exp(d) - d - 1 is about d * d / 2, which exp(d) - 1 would round away.
        return torch.expm1(difference_BT) - difference_BT


_LOSSES: dict[str, type] = {"cross_entropy": CrossEntropyLoss, "grpo": GRPOLoss, **POLICY_LOSSES}


def resolve_loss(loss: str | type | Callable[[LossInput], LossOutput], **kwargs: object) -> Loss:
    """A loss from its name, its class, or itself.

    Names: 'cross_entropy', 'grpo', 'reinforce', 'importance_sampling', 'cispo', 'dro', 'gspo', and those of their classes.

    The keywords go to the constructor. An instance (or a function) takes none.

    Raises ConfigError for an unknown name, keywords that the class does not take, or keywords beside an instance.
    """
    if isinstance(loss, str):
        return _make(_named(loss), kwargs)
    if isinstance(loss, type):
        return _make(loss, kwargs)
    if not callable(loss):
        raise ConfigError(f"a loss is a name, a class or a callable, got {type(loss).__name__}")
    if kwargs:
        raise ConfigError(f"options {sorted(kwargs)} given beside a ready loss; set them where it is made")
    return cast(Loss, loss)


def _named(name: str) -> type:
    named = _LOSSES.get(name) or {cls.__name__: cls for cls in _LOSSES.values()}.get(name)
    if named is None:
        raise ConfigError(f"unknown loss {name!r}; known are {', '.join(sorted(_LOSSES))}. For your own, give the class or an instance")
    return named


def _make(cls: type, kwargs: dict[str, object]) -> Loss:
    try:
        made: Any = cls(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{cls.__name__} cannot be made from {kwargs}: {error}") from error
    if not isinstance(made, Loss):
        raise ConfigError(f"{cls.__name__} is not a loss: it has no __call__(inputs: LossInput) -> LossOutput")
    return made
