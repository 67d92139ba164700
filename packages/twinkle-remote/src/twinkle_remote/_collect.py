"""Put what the workers returned together, as one process would have returned it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, Literal, TypeVar, cast

from twinkle_mesh import DeviceMesh
from twinkle_remote._errors import CollectError
from twinkle_remote._protocol import Collect
from twinkle_remote._sequences import are_batches, batch_kind, is_array, is_tensor, join, narrowed, widened

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Weighted(Generic[T]):
    """What a method with `collect='mean'` returns to say how much its result counts: the number of tokens behind a loss, say.

    value: the result, as without it. weight: at least 0, in any unit. Without `Weighted` a result counts as many items as its worker was
    given. Other collects take the value.

    Raises CollectError (a ValueError) for a weight that is not a finite number of at least 0.
    """

    value: T
    weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.weight < float("inf"):
            raise CollectError(f"Weighted(weight={self.weight!r}): a weight is a finite number of at least 0")


def unweighted(value: Any) -> tuple[Any, float | None]:
    """The value of a Weighted and its weight; anything else as it is, and None."""
    return (value.value, float(value.weight)) if isinstance(value, Weighted) else (value, None)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def contributors(collect: Collect, num_results: int, mesh: DeviceMesh, *, no_copies: bool = False) -> tuple[int, ...]:
    """Which of the workers' results `collect` reads.

    'first': the first. 'none' and functions: all. The others: one a data group, in data order, from its last pipeline
    stage; tp, cp and ulysses peers are copies of it. no_copies: every worker had a part of the batch of its own, so all have something to say
    (all of the last pipeline stage for 'last_pp').
    """
    if collect == "first":
        return (0,)
    if collect == "none" or callable(collect) or num_results != mesh.world_size:
        return tuple(range(num_results))
    if no_copies:
        return tuple(range(num_results - num_results // mesh.pp_size if collect == "last_pp" else 0, num_results))
    return mesh.representatives()


def joins(collect: Collect, num_results: int) -> bool:
    """Whether `collect` puts batches of `num_results` contributors end to end, so that a part of the whole needs only some of them."""
    return not callable(collect) and (num_results == 1 or collect in ("flatten", "last_pp"))


def combine(collect: Collect, results: list[Any], mesh: DeviceMesh, weights: Sequence[float | None] = ()) -> Any:
    """The collected value of the contributors' results. Raises CollectError where they do not go together.

    weights: for 'mean', one a result; unless all are known they count alike.
    """
    if callable(collect):
        return collect(results, mesh)
    if collect == "none":
        return results[0] if len(results) == 1 else results
    if len(results) == 1:
        return results[0]
    if collect == "sum":
        return _reduce(results, None)
    if collect == "mean":
        return _reduce(results, _known(weights, len(results)))
    return flatten(results)


def flatten(results: Sequence[Any]) -> Any:
    """Join the data groups' results in the structure that one worker's result has.

    Lists, tuples, arrays and tensors are put end to end; dicts key by key (a key that some lack: of those that have it), dataclasses field
    by field, both at any depth. A tuple of several batches (`return features, logprobs`: every element a batch or a dict, everywhere as many)
    is joined element by element and stays a tuple, as is a named tuple. All None gives None. Anything else, such as numbers, gives the list of
    the results.
    """
    if len(results) == 1:
        return results[0]
    if is_structure(results):
        return tuple(_flatten(column) for column in zip(*results, strict=True))
    return _flatten(results)


def _flatten(results: Sequence[Any]) -> Any:
    first: Any = results[0]
    if are_batches(results):
        return join(results)
    kinds = set(map(type, results))
    if all(issubclass(kind, Mapping) for kind in kinds):
        mappings = cast("Sequence[Mapping[Any, Any]]", results)
        keys = dict.fromkeys(key for mapping in mappings for key in mapping)
        return {key: _flatten_values([mapping[key] for mapping in mappings if key in mapping]) for key in keys}
    if kinds == {type(None)}:
        return None
    if len(kinds) == 1 and hasattr(first, "_fields"):
        return type(first)(*(_flatten_values(column) for column in zip(*results, strict=True)))
    if len(kinds) == 1 and is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first) if field.init]
        return replace(first, **{name: _flatten_values([getattr(result, name) for result in results]) for name in names})
    return list(results)


def _flatten_values(values: Sequence[Any]) -> Any:
    """As `_flatten`, but one scalar stays in a list, so that a dict entry has one type however many ranks have it."""
    if len(values) > 1:
        return _flatten(values)
    return values[0] if _has_parts(values[0]) else list(values)


def _has_parts(value: Any) -> bool:
    return batch_kind(value) is not None or value is None or isinstance(value, Mapping) or is_dataclass(value) or hasattr(value, "_fields")


def is_structure(results: Sequence[Any]) -> bool:
    """Whether plain tuples are several results side by side, rather than batches."""
    first: Any = results[0]
    if type(first) is not tuple or not first:
        return False
    if not all(type(result) is tuple and len(cast("tuple[Any, ...]", result)) == len(cast("tuple[Any, ...]", first)) for result in results):
        return False
    return all(isinstance(item, Mapping) or batch_kind(item) for result in results for item in result)


def _known(weights: Sequence[float | None], num_results: int) -> list[float]:
    known = [weight for weight in weights if weight is not None]
    return known if len(known) == num_results and any(known) else [1.0] * num_results


def _reduce(values: Sequence[Any], weights: Sequence[float] | None) -> Any:
    """The sum of the values, or, with weights, their weighted mean. Values of weight 0 (of no items) are left out of a mean, unless all are."""
    chosen = [index for index, value in enumerate(values) if value is not None]
    if weights is not None and any(weights[index] for index in chosen):
        chosen = [index for index in chosen if weights[index]]
    present = [values[index] for index in chosen]
    counts = None if weights is None else [weights[index] for index in chosen]
    if not present:
        return None
    how: Literal["mean", "sum"] = "sum" if counts is None else "mean"
    first: Any = present[0]
    if all(isinstance(value, Mapping) for value in present):
        # A key that only ranks of weight 0 have is kept as well: the keys are those of all values.
        everywhere = [(index, cast("Mapping[Any, Any]", value)) for index, value in enumerate(values) if value is not None]
        keys = dict.fromkeys(key for _, value in everywhere for key in value)
        return {key: _reduce(*_of_key(key, everywhere, weights)) for key in keys}
    if is_dataclass(first) and not isinstance(first, type):
        if any(type(value) is not type(first) for value in present):
            raise CollectError(f"collect={how!r} needs results of one type from all ranks")
        names = [field.name for field in fields(first) if field.init]
        return replace(first, **{name: _reduce([getattr(value, name) for value in present], counts) for name in names})
    if isinstance(first, (list, tuple)):
        sequences = cast("Sequence[Sequence[Any]]", present)
        kind: type[Any] = type(sequences[0])
        if any(type(value) is not kind or len(value) != len(sequences[0]) for value in sequences):
            raise CollectError(f"collect={how!r} needs lists of one length from all ranks")
        columns = [_reduce(column, counts) for column in zip(*sequences, strict=True)]
        if hasattr(kind, "_fields"):
            return kind(*columns)
        return tuple(columns) if issubclass(kind, tuple) else columns
    if not all(isinstance(value, (int, float, complex)) or is_array(value) or is_tensor(value) or hasattr(value, "__array__") for value in present):
        raise CollectError(f"collect={how!r} adds numbers, arrays and dicts, dataclasses or lists of them, not {type(first).__name__}")
    return _total(present, counts)


def _of_key(key: Any, mappings: Sequence[tuple[int, Any]], weights: Sequence[float] | None) -> tuple[list[Any], list[float] | None]:
    having = [(index, value[key]) for index, value in mappings if key in value]
    return [value for _, value in having], None if weights is None else [weights[index] for index, _ in having]


def _total(values: Sequence[Any], counts: Sequence[float] | None) -> Any:
    wide = [widened(value) for value in values]
    if counts is None or len(set(counts)) == 1:  # alike: no multiplication, so that whole numbers and equal values stay exact
        total = wide[0]
        for value in wide[1:]:
            total = total + value
        return narrowed(total if counts is None else total / len(wide), values)
    total = wide[0] * counts[0]
    for value, count in zip(wide[1:], counts[1:], strict=True):
        total = total + value * count
    return narrowed(total / sum(counts), values)
