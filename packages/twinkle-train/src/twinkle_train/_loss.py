"""What a loss gets and what it returns.

Shape suffixes: B rows of a micro-batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol, runtime_checkable

from torch import Tensor

from ._errors import InputError
from ._metrics import AnyMetric


@dataclass(frozen=True, kw_only=True)
class LossInput:
    """Everything that a loss may look at, for one micro-batch, in no particular layout.

    Position t speaks of the token that is predicted from positions 0..t, that is of input token t + 1: `logprobs_BT[b, t]` is
    log p(input_ids[b, t + 1] | input_ids[b, :t + 1]) at the sampling temperature. Whole rows are here whatever the
    layout (tensor, context and sequence parallel shares are gathered before), and all sequences are whole.

    logprobs_BT: float, with a graph when training.
    mask_BT: float >= 0, the weight of each position; 0 at prompts, at padding, and at the last position of a sequence, where the
        other tensors hold nothing of meaning.
    sequence_ids_BT: int, which sequence a position belongs to, -1 on padding; a sequence is in one row, a row may hold many.
    entropy_BT: entropy of the distribution that predicts the token, in nats.
    old_logprobs_BT: under the policy that sampled. ref_logprobs_BT: under the frozen reference policy.
    advantages_BT: float. temperature_BT: float > 0, which `logprobs_BT` already has in it.

    Raises InputError when shapes disagree.
    """

    logprobs_BT: Tensor
    mask_BT: Tensor
    sequence_ids_BT: Tensor
    entropy_BT: Tensor | None = None
    old_logprobs_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    advantages_BT: Tensor | None = None
    temperature_BT: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.logprobs_BT.shape
        if len(shape) != 2:
            raise InputError(f"logprobs_BT must have two axes (rows, tokens), got shape {tuple(shape)}")
        for each in fields(self):
            tensor: Tensor | None = getattr(self, each.name)
            if tensor is not None and tensor.shape != shape:
                raise InputError(f"{each.name} has shape {tuple(tensor.shape)}, logprobs_BT has {tuple(shape)}")

    def require(self, name: str, why: str) -> Tensor:
        """The tensor of that field; InputError saying `why` it is needed when it is None."""
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise InputError(f"this loss needs {name}: {why}")
        return tensor


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch as a sum and its weight: the loss is sum / weight over all micro-batches and ranks.

    sum: 0-d tensor with a graph. weight: 0-d tensor, how much was summed (tokens or sequences). metrics: by name.

    Raises InputError when sum or weight is not 0-d, or when the weight carries a graph (the division by it happens later, outside).
    """

    sum: Tensor
    weight: Tensor
    metrics: Mapping[str, AnyMetric] = field(default_factory=dict[str, AnyMetric])

    def __post_init__(self) -> None:
        for name, tensor in (("sum", self.sum), ("weight", self.weight)):
            if tensor.dim() != 0:
                raise InputError(f"LossOutput.{name} must be a 0-d tensor, got shape {tuple(tensor.shape)}")
        if self.weight.requires_grad:
            raise InputError("LossOutput.weight carries a graph: detach it")


@runtime_checkable
class Loss(Protocol):
    """A loss: any callable from LossInput to LossOutput. It is called once a micro-batch, and knows nothing of layouts.

    To give the same result for every layout, micro-batching and accumulation, it must return a plain sum over its positions or
    sequences, never a mean, and the names of its metrics must depend on its options and on which inputs are present only.

    Gradients are divided by the weight of all calls before a step. A loss with an attribute `reduction = "sum"` leaves its gradients
    undivided, as services that define a loss as a sum over tokens have it; `ModelOutput.loss` is the mean all the same.
    """

    def __call__(self, inputs: LossInput, /) -> LossOutput:
        """The sum, weight and metrics of one micro-batch."""
        ...
