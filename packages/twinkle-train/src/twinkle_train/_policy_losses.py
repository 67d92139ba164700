"""Policy-gradient losses besides GRPO: per token, with the sampling policy's log-probabilities, and a choice of mean or sum.

All of them need `old_logprobs` (but REINFORCE) and `advantages`, may be summed instead of averaged (`reduction="sum"`, see `Loss`), and count
tokens as their weight. Metrics over trained tokens (but REINFORCE's): `ratio_max_deviation`, `logprob_gap` and, where something is clipped,
`clip_fraction`, as of GRPOLoss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ._errors import ConfigError
from ._loss import LossInput, LossOutput
from ._loss_parts import Reduction, check_reduction, max_metric, mean_metric, sequence_means, total
from ._metrics import AnyMetric

_NEEDS_ADVANTAGES = "set advantages on the features, for instance by group_advantages"
_NEEDS_OLD = "give features with logprobs, as a sampler or forward_only returns them"


@dataclass(frozen=True, kw_only=True)
class ReinforceLoss:
    """Policy gradient without a ratio (Williams 1992): sum of -A * logprob. With advantages as weights of any sign it is a weighted likelihood."""

    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.reduction)

    def __call__(self, inputs: LossInput, /) -> LossOutput:
        advantages_BT = inputs.require("advantages_BT", _NEEDS_ADVANTAGES).detach()
        # where: the log-probability of a token that does not count may be -inf, and 0 * inf is NaN.
        counted_BT = (inputs.mask_BT > 0) & (advantages_BT != 0)
        losses_BT = -advantages_BT * torch.where(counted_BT, inputs.logprobs_BT, 0.0)
        return LossOutput(total(losses_BT * inputs.mask_BT), total(inputs.mask_BT))


@dataclass(frozen=True, kw_only=True)
class ImportanceSamplingLoss:
    """Off-policy REINFORCE with importance weights: sum of -r * A, with r = exp(logprobs - old_logprobs), unclipped."""

    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.reduction)

    def __call__(self, inputs: LossInput, /) -> LossOutput:
        ratios = _Ratios.of(inputs)
        return ratios.output(-ratios.ratio_BT * ratios.advantages_BT)


@dataclass(frozen=True, kw_only=True)
class CISPOLoss:
    """Clipped importance weights on the likelihood (CISPO, MiniMax-M1, arXiv:2506.13585): sum of -sg(clip(r, low, high)) * A * logprob.

    The clip bounds a weight and cuts no token's gradient off. low, high: of the ratio itself; the paper has no lower bound (0).

    Raises ConfigError unless 0 <= low <= high.
    """

    low: float = 0.0
    high: float = 4.0
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.reduction)
        if not 0 <= self.low <= self.high:
            raise ConfigError(f"the clip range must have 0 <= low <= high, got {self.low} and {self.high}")

    def __call__(self, inputs: LossInput, /) -> LossOutput:
        ratios = _Ratios.of(inputs)
        ratio_BT = ratios.ratio_BT.detach()
        weight_BT = ratio_BT.clamp(self.low, self.high)
        losses_BT = -weight_BT * ratios.advantages_BT * torch.where(ratios.counted_BT, inputs.logprobs_BT, 0.0)
        return ratios.output(losses_BT, clipped_BT=weight_BT != ratio_BT)


@dataclass(frozen=True, kw_only=True)
class DROLoss:
    """Direct reward optimisation (arXiv:2405.19107), per token: sum of -(A * logprob - beta / 2 * (logprob - old_logprob) ** 2).

    Raises ConfigError for a negative beta.
    """

    beta: float = 0.05
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.reduction)
        if not self.beta >= 0:
            raise ConfigError(f"beta must be >= 0, got {self.beta}")

    def __call__(self, inputs: LossInput, /) -> LossOutput:
        ratios = _Ratios.of(inputs)
        logprobs_BT = torch.where(ratios.counted_BT, inputs.logprobs_BT, 0.0)
        return ratios.output(-(ratios.advantages_BT * logprobs_BT - 0.5 * self.beta * ratios.log_ratio_BT.square()))


@dataclass(frozen=True, kw_only=True)
class GSPOLoss:
    """GSPO in its form per token (arXiv:2507.18071, section 4.3): PPO's clipped objective with the ratio of a whole sequence.

    The ratio is exp of the sequence's mean of logprobs - old_logprobs over trained tokens; its gradient at token t is that of token t alone. Each
    trained token adds -min(s * A, clip(s, 1 - epsilon, 1 + epsilon_high) * A).

    Raises ConfigError for a range out of order.
    """

    epsilon: float = 3e-4
    epsilon_high: float = 4e-4
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.reduction)
        if not 0 <= self.epsilon <= 1 or not self.epsilon_high >= 0:
            raise ConfigError(f"the clip range must have 0 <= epsilon <= 1 and epsilon_high >= 0, got {self.epsilon} and {self.epsilon_high}")

    def __call__(self, inputs: LossInput, /) -> LossOutput:
        ratios = _Ratios.of(inputs)
        means, _ = sequence_means(ratios.log_ratio_BT.detach(), ratios.counted_BT.to(inputs.mask_BT.dtype), inputs.sequence_ids_BT)
        _, index = torch.unique(inputs.sequence_ids_BT, return_inverse=True)
        sequence_BT = means.exp().to(inputs.logprobs_BT.dtype)[index]
        logprobs_BT = torch.where(ratios.counted_BT, inputs.logprobs_BT, 0.0)
        ratio_BT = sequence_BT * (logprobs_BT - logprobs_BT.detach()).exp()
        plain_BT = ratio_BT * ratios.advantages_BT
        clipped_BT = ratio_BT.clamp(1 - self.epsilon, 1 + self.epsilon_high) * ratios.advantages_BT
        return ratios.output(-torch.minimum(plain_BT, clipped_BT), clipped_BT=clipped_BT < plain_BT)


@dataclass(frozen=True)
class _Ratios:
    """What these losses begin with. Everything is 0 (the ratio 1) where `counted_BT` is false."""

    mask_BT: Tensor
    counted_BT: Tensor
    log_ratio_BT: Tensor
    ratio_BT: Tensor
    advantages_BT: Tensor

    @classmethod
    def of(cls, inputs: LossInput) -> _Ratios:
        counted_BT = inputs.mask_BT > 0
        old_BT = inputs.require("old_logprobs_BT", _NEEDS_OLD).detach()
        advantages_BT = inputs.require("advantages_BT", _NEEDS_ADVANTAGES).detach()
        # Masked before exp: where nothing is trained the difference may overflow, and its gradient would be NaN.
        log_ratio_BT = torch.where(counted_BT, inputs.logprobs_BT - old_BT, 0.0)
        return cls(inputs.mask_BT, counted_BT, log_ratio_BT, log_ratio_BT.exp(), torch.where(counted_BT, advantages_BT, 0.0))

    def output(self, losses_BT: Tensor, *, clipped_BT: Tensor | None = None) -> LossOutput:
        metrics: dict[str, AnyMetric] = {
            "ratio_max_deviation": max_metric((self.ratio_BT - 1).abs(), self.counted_BT),
            "logprob_gap": max_metric(self.log_ratio_BT.abs(), self.counted_BT),
        }
        if clipped_BT is not None:
            metrics["clip_fraction"] = mean_metric(clipped_BT.to(self.mask_BT.dtype), self.counted_BT)
        losses_BT = torch.where(self.counted_BT, losses_BT, 0.0)
        return LossOutput(total(losses_BT * self.mask_BT), total(self.mask_BT), metrics)


PolicyLossName = Literal["reinforce", "importance_sampling", "cispo", "dro", "gspo"]
"""The names of these losses for `set_loss`."""

POLICY_LOSSES: dict[PolicyLossName, type] = {
    "reinforce": ReinforceLoss,
    "importance_sampling": ImportanceSamplingLoss,
    "cispo": CISPOLoss,
    "dro": DROLoss,
    "gspo": GSPOLoss,
}
