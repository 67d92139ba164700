"""What a type checker makes of decorated methods. test_remote_types.py has pyright check this file; it is not run."""

# pyright: strict

from collections.abc import Sequence
from typing import Any, assert_type

import twinkle_remote as tr
from twinkle_mesh import DeviceMesh


def pick_longest(all_results: list[Any], device_mesh: DeviceMesh) -> str:
    return max(map(str, all_results), key=len)


@tr.remote_class()
class Model:
    def __init__(self, scale: float, device_mesh: DeviceMesh | None = None, remote_group: str | None = None) -> None:
        self.scale = scale

    @tr.remote_function(dispatch="slice_dp", collect="flatten")
    def forward(self, inputs: Sequence[int], *, times: int = 1) -> list[float]:
        return [self.scale * value for value in inputs] * times

    @tr.remote_function(dispatch="slice_dp", collect="mean", lazy_collect=False)
    def loss(self, outputs: list[float]) -> dict[str, float]:
        return {"loss": sum(outputs)}

    @tr.remote_function("slice_dp", collect="mean", sync=True, timeout_s=10)
    def weighted_loss(self, outputs: Sequence[float]) -> tr.Weighted[float]:
        return tr.Weighted(sum(outputs), len(outputs))

    @tr.remote_function(dispatch="all", collect="mean")
    def lazy_weighted(self) -> tr.Weighted[dict[str, float]]:
        return tr.Weighted({}, 1)

    @tr.remote_function(collect=pick_longest)
    def longest(self, value: int) -> int:
        return value

    @tr.remote_function(collect=pick_longest, lazy_collect=False)
    def longest_now(self, value: int) -> int:
        return value

    @tr.remote_function()
    def each(self, value: int) -> int:
        return value

    @tr.remote_function(dispatch="all", collect="first", lazy_collect=False)
    def __len__(self) -> int:
        return 3


def uses(model: Model, flag: bool) -> None:
    result = model.forward([1, 2], times=2)
    assert_type(result, tr.LazyResult[list[float]])
    assert_type(result.get(timeout_s=1), list[float])
    assert_type(result[0], float)
    assert_type(result[1:], tr.LazyResult[list[float]])
    assert_type(result + result, tr.LazyResult[list[float]])
    assert_type(result.map(int), tr.LazyResult[list[int]])
    assert_type([value for value in result], list[float])  # noqa: C416
    assert_type(model.loss([1.0]), dict[str, float])
    assert_type(model.weighted_loss([1.0]), float)
    assert_type(model.lazy_weighted(), tr.LazyResult[dict[str, float]])
    assert_type(model.longest(1), tr.LazyResult[str])
    assert_type(model.longest_now(1), str)
    assert_type(model.each(1), tr.LazyResult[Any])
    assert_type(len(model), int)
    # A result goes where a sequence goes; elsewhere `passed` says what it stands for.
    model.forward(result.map(int))
    model.loss(result.passed)
    decorated = tr.remote_function(collect="flatten", lazy_collect=flag)
    del decorated


async def awaits(model: Model) -> None:
    assert_type(await model.forward([1]), list[float])
