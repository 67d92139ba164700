"""The records that travel between datasets, samplers and trainers: plain numpy, no torch.

Every record is a frozen, keyword-only dataclass that checks itself when it is made; change one with `dataclasses.replace`.
Shape suffix: T tokens of a sequence.
"""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._checks import is_number
from ._errors import FormatError
from ._messages import check_user_data

IGNORE_INDEX = -100
"""The label of a token that is not trained on."""

StopReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True, eq=False)
class InputFeature:
    """One tokenised sequence. Every array is numpy, `[T]`, and aligned with `input_ids`: entry t speaks of token t.

    Nobody but `InputProcessor` shifts. Lists are converted; arrays are stored with the dtype given below.

    Args:
        input_ids: int64 `[T]`, T >= 1, none negative.
        labels: int64 `[T]`: `input_ids[t]` where token t is trained on and -100 elsewhere. None: `completion_mask` decides, and
            without one every token is trained on.
        targets: int64 `[T]`: the token whose log-probability is asked for at t, given `input_ids[:t]`, where it is not `input_ids[t]` itself
            (distillation, scores of alternatives). None: the tokens themselves. `logprobs`, `advantages` and what trainers return speak of it.
        position_ids: int64 `[T]`, or `[A, T]` for A axes (multimodal rotary embeddings, arXiv 2409.12191). None: 0, 1, 2, ...
        completion_mask: bool `[T]`: the token was written by the assistant (sampled, in a feature that a sampler returned).
        loss_weights: float32 `[T]`: a factor for each token's loss.
        logprobs: float32 `[T]`: natural log p(input_ids[t] | input_ids[:t]) at `temperature` under the policy that sampled;
            0 where the token was not sampled, and at index 0.
        ref_logprobs: float32 `[T]`: the same under a reference policy.
        advantages: a number for the whole completion, or float32 `[T]`.
        temperature: the temperature of `logprobs`, by which trainers divide logits. Above zero.
        weight_version: the version of the weights that sampled; the oldest where several did.
        weight_versions: int64 `[T]`: the version that sampled each token, -1 where the token was not sampled.
        user_data: travels along untouched.

    Raises:
        FormatError: lengths that differ, labels that are shifted, values that are not finite, and the like.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64] | None = None
    targets: NDArray[np.int64] | None = None
    position_ids: NDArray[np.int64] | None = None
    completion_mask: NDArray[np.bool_] | None = None
    loss_weights: NDArray[np.float32] | None = None
    logprobs: NDArray[np.float32] | None = None
    ref_logprobs: NDArray[np.float32] | None = None
    advantages: float | NDArray[np.float32] | None = None
    temperature: float = 1.0
    weight_version: int | None = None
    weight_versions: NDArray[np.int64] | None = None
    user_data: dict[str, Any] = field(default_factory=dict)

    if TYPE_CHECKING:  # what may be given; the fields tell what is kept

        def __init__(
            self,
            *,
            input_ids: ArrayLike,
            labels: ArrayLike | None = None,
            targets: ArrayLike | None = None,
            position_ids: ArrayLike | None = None,
            completion_mask: ArrayLike | None = None,
            loss_weights: ArrayLike | None = None,
            logprobs: ArrayLike | None = None,
            ref_logprobs: ArrayLike | None = None,
            advantages: ArrayLike | None = None,
            temperature: float = 1.0,
            weight_version: int | None = None,
            weight_versions: ArrayLike | None = None,
            user_data: dict[str, Any] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        input_ids = _integers("input_ids", self.input_ids)
        if input_ids.ndim != 1:
            raise FormatError(f"InputFeature.input_ids has shape {input_ids.shape}; one sequence is a flat list of tokens, (T,)")
        if input_ids.size == 0:
            raise FormatError("InputFeature.input_ids is empty; a sequence needs at least one token")
        if input_ids.min() < 0:
            raise FormatError(f"InputFeature.input_ids[{int(input_ids.argmin())}] is negative; padding is added by InputProcessor")
        length = len(input_ids)
        converted: dict[str, Any] = {"input_ids": input_ids}
        for name in ("labels", "targets", "position_ids", "weight_versions"):
            if (value := getattr(self, name)) is not None:
                converted[name] = _same_length(name, _integers(name, value), length, axes=name == "position_ids")
        if self.completion_mask is not None:
            converted["completion_mask"] = _same_length("completion_mask", _booleans("completion_mask", self.completion_mask), length)
        for name in ("loss_weights", "logprobs", "ref_logprobs"):
            if (value := getattr(self, name)) is not None:
                converted[name] = _same_length(name, _floats(name, value), length)
        if self.advantages is not None:
            advantages = _floats("advantages", self.advantages, scalar=True)
            converted["advantages"] = float(advantages) if advantages.ndim == 0 else _same_length("advantages", advantages, length)
        for name, value in converted.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        if self.labels is not None:
            wrong = (self.labels != IGNORE_INDEX) & (self.labels != self.input_ids)
            if wrong.any():
                t = int(wrong.argmax())
                raise FormatError(
                    f"InputFeature.labels[{t}] is {self.labels[t]}, input_ids[{t}] is {self.input_ids[t]}: a label is the token itself "
                    f"or {IGNORE_INDEX}. Labels are not shifted here; InputProcessor does that"
                )
        if self.targets is not None and self.targets.min() < 0:
            raise FormatError(
                f"InputFeature.targets[{int(self.targets.argmin())}] is negative; what is not trained on is told by labels or loss_weights"
            )
        if self.position_ids is not None and self.position_ids.min() < 0:
            raise FormatError("InputFeature.position_ids holds a negative position")
        for name in ("logprobs", "ref_logprobs"):
            value = getattr(self, name)
            if value is not None and value[0] != 0:
                raise FormatError(
                    f"InputFeature.{name}[0] is {value[0]}, but nothing precedes token 0: {name}[t] belongs to input_ids[t], index 0 is 0"
                )
        if not is_number(self.temperature) or self.temperature <= 0:
            raise FormatError(f"InputFeature.temperature must be a finite number above 0, not {self.temperature!r}")
        object.__setattr__(self, "temperature", float(self.temperature))
        check_user_data("InputFeature", self.user_data)

    def __len__(self) -> int:
        """The number of tokens T."""
        return len(self.input_ids)

    def __repr__(self) -> str:
        trained = "" if self.labels is None else f", {np.count_nonzero(self.labels != IGNORE_INDEX)} trained on"
        others = [f.name for f in fields(self) if f.name not in ("input_ids", "labels") and f.default is None and getattr(self, f.name) is not None]
        return f"<InputFeature of {len(self)} tokens{trained}{''.join(f', {name}' for name in others)}>"

    def __eq__(self, other: object) -> bool:
        """Equal when every field is: arrays element by element."""
        if not isinstance(other, InputFeature):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _integers(name: str, value: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(value)
    if array.size and array.dtype.kind not in "iu":
        raise FormatError(f"InputFeature.{name} must hold integers, not {array.dtype}")
    return array.astype(np.int64, copy=False)


def _booleans(name: str, value: ArrayLike) -> NDArray[np.bool_]:
    array = np.asarray(value)
    if array.dtype != np.bool_ and not np.isin(array, (0, 1)).all():
        raise FormatError(f"InputFeature.{name} must hold booleans (or 0 and 1)")
    return array.astype(np.bool_, copy=False)


def _floats(name: str, value: ArrayLike, *, scalar: bool = False) -> NDArray[np.float32]:
    array = np.asarray(value)
    if not (np.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
        raise FormatError(f"InputFeature.{name} must hold numbers, not {array.dtype}")
    if not np.isfinite(array).all():
        raise FormatError(f"InputFeature.{name} holds a value that is not finite")
    # A scalar keeps double precision: it is stored as a Python float.
    return array if scalar and array.ndim == 0 else array.astype(np.float32, copy=False)


def _same_length(name: str, array: NDArray[Any], length: int, *, axes: bool = False) -> NDArray[Any]:
    if array.shape[-1:] != (length,) or array.ndim > 1 + axes:
        raise FormatError(f"InputFeature.{name} has shape {array.shape}, input_ids has ({length},): they are aligned token by token")
    return array


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)
    return bool(a == b)
