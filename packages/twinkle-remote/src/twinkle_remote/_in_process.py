"""Calls of a component that lives in this process."""

import time
from collections.abc import Callable
from typing import Any, cast

from twinkle_mesh import DeviceMesh
from twinkle_remote import _event_loop, _state
from twinkle_remote._collect import unweighted
from twinkle_remote._dispatch import batch_lengths, common_length
from twinkle_remote._lazy import LazyResult, ValueSource, resolve
from twinkle_remote._local import reduce_over_data_ranks
from twinkle_remote._protocol import EAGER_METHODS, MethodSpec


def call_in_process(
    target: Any, mesh: DeviceMesh, spec: MethodSpec, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a remote method of an object of this process.

    Arguments pass as they are (the data loader has sliced), LazyResults in them as their values. `mean` and `sum` reduce over the data
    ranks; other collects give this rank's value. A call that a component makes on itself is a plain call.
    """
    active = _state.active.get()
    if id(target) in active:
        return method(target, *args, **kwargs)
    args = tuple(resolve(arg) for arg in args)
    kwargs = {name: resolve(value) for name, value in kwargs.items()}
    start_s = time.time()
    failed = True
    try:
        with _state.running(target):
            value = _event_loop.finish(method(target, *args, **kwargs))
        failed = False
    finally:
        _state.current_runtime().record(type(target).__name__, spec.name, start_s, time.time(), failed=failed)
    if spec.opens_iterator:
        return value if value is target else _state.RunningIterator(target, iter(value))
    if spec.name in EAGER_METHODS:
        return value
    value, weight = unweighted(value)
    if not callable(spec.collect) and spec.collect in ("mean", "sum"):
        value = reduce_over_data_ranks(value, spec.collect, mesh, _num_items(spec, args, kwargs) if weight is None else weight)
    if isinstance(value, LazyResult):
        lazy = cast("LazyResult[Any]", value)
        return lazy.get() if spec.returns_value else lazy
    return value if spec.returns_value else LazyResult[Any](ValueSource(value))


def _num_items(spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """How many items this rank was given of what would be cut on Ray; None where nothing would."""
    if spec.dispatch not in ("slice", "slice_dp"):
        return None
    return common_length(spec, batch_lengths(spec, args, kwargs))
