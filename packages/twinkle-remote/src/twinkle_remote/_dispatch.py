"""Share out a call's arguments among the workers. Pure: no runtime, no Ray."""

from dataclasses import dataclass
from typing import Any, cast

from twinkle_mesh import DeviceMesh
from twinkle_remote._errors import DispatchError
from twinkle_remote._lazy import LazyResult, packing
from twinkle_remote._protocol import MethodSpec
from twinkle_remote._sequences import batch_kind, even_slice


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a batch a worker gets: part `index` of `parts`; of `total` items where the driver knows."""

    index: int
    parts: int
    total: int | None

    def bounds(self, n: int) -> slice:
        """The part of `n` items."""
        return even_slice(n, self.parts, self.index)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One worker's arguments. Workers that get the same share the object. part: None where nothing was cut."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    part: Part | None = None


class Sliced:
    """Stands for a LazyResult among a share's arguments, of which the worker takes its part only."""

    __slots__ = ("result",)

    def __init__(self, result: LazyResult) -> None:
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        register = packing.get()
        assert register is not None
        return register(self.result, True)


def share_out(spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], num_workers: int, mesh: DeviceMesh) -> list[Share]:
    """The arguments of each worker. Raises DispatchError for batches that cannot be cut as asked."""
    if callable(spec.dispatch):
        return [_custom(spec, spec.dispatch(num_workers, i, args, kwargs, mesh)) for i in range(num_workers)]
    whole = Share(args, kwargs)
    if spec.dispatch == "all" or num_workers == 1:
        return [whole] * num_workers
    over_data_ranks = spec.dispatch == "slice_dp" and num_workers == mesh.world_size
    parts = mesh.data_world_size if over_data_ranks else num_workers
    batches = _batches(spec, args, kwargs)
    if parts == 1 or not batches:
        return [whole] * num_workers
    total = _common_length(spec, batches)
    if total is not None:
        check_enough(spec.name, ", ".join(batches), total, parts, "data ranks" if over_data_ranks else "workers", spec.allow_empty)
    shares = [_cut(args, kwargs, Part(index, parts, total)) for index in range(parts)]
    return [shares[mesh.data_rank(i)] for i in range(num_workers)] if over_data_ranks else shares


def check_enough(method: str, name: str, total: int, parts: int, of_what: str, allow_empty: bool) -> None:
    """Raises DispatchError if some parts would be empty."""
    if total < parts and not allow_empty:
        raise DispatchError(
            f"{method}: {name} has {total} item(s) for {parts} {of_what}, so some would get none: pass at least {parts}, "
            f"or decorate the method with allow_empty=True"
        )


def _custom(spec: MethodSpec, returned: Any) -> Share:
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2 and isinstance(returned[1], dict)):  # pyright: ignore[reportUnknownArgumentType]
        raise DispatchError(f"{spec.name}: a dispatch function returns (args, kwargs), not {returned!r:.200}")
    args, kwargs = cast("tuple[Any, dict[str, Any]]", returned)
    if not isinstance(args, (tuple, list)):
        raise DispatchError(f"{spec.name}: the args that a dispatch function returns are a tuple, not {args!r:.200}")
    return Share(tuple(cast("tuple[Any, ...]", args)), kwargs)


def _batches(spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are cut, by name."""
    named: dict[str, Any] = {}
    for index, value in enumerate(args):
        named[spec.parameters[index] if index < len(spec.parameters) else f"argument {index + 1}"] = value
    named.update(kwargs)
    return {name: value for name, value in named.items() if isinstance(value, LazyResult) or batch_kind(value)}


def _common_length(spec: MethodSpec, batches: dict[str, Any]) -> int | None:
    lengths = {name: len(value) for name, value in batches.items() if not isinstance(value, LazyResult)}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise DispatchError(
            f"{spec.name}: with dispatch={spec.dispatch!r} all lists, tuples and arrays are cut into the same parts, but {shown}: "
            f"make them equally long, or use dispatch='all' or a dispatch function"
        )
    return next(iter(lengths.values()), None)


def _cut(args: tuple[Any, ...], kwargs: dict[str, Any], part: Part) -> Share:
    return Share(tuple(_part_of(value, part) for value in args), {name: _part_of(value, part) for name, value in kwargs.items()}, part)


def _part_of(value: Any, part: Part) -> Any:
    if isinstance(value, LazyResult):
        return Sliced(value)
    return value[part.bounds(len(value))] if batch_kind(value) else value
