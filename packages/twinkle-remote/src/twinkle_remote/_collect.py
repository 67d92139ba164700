"""Put what the workers returned together, as one process would have returned it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from twinkle_mesh import DeviceMesh
from twinkle_remote._errors import CollectError
from twinkle_remote._protocol import Collect
from twinkle_remote._sequences import batch_kind, is_array, is_tensor, join


def contributors(collect: Collect, num_results: int, mesh: DeviceMesh) -> tuple[int, ...]:
    """Which of the workers' results `collect` reads.

    'first': the first. 'none' and functions: all. The others: one a data group, in data order, from its last pipeline
    stage; tp, cp and ulysses peers are copies of it.
    """
    if collect == "first":
        return (0,)
    if collect == "none" or callable(collect) or num_results != mesh.world_size:
        return tuple(range(num_results))
    return mesh.representatives()


def combine(collect: Collect, results: list[Any], mesh: DeviceMesh) -> Any:
    """The collected value of the contributors' results. Raises CollectError where they do not go together."""
    if callable(collect):
        return collect(results, mesh)
    if collect == "none":
        return results[0] if len(results) == 1 else results
    if len(results) == 1:
        return results[0]
    if collect in ("mean", "sum"):
        return _reduce(results, collect)
    return flatten(results)


def flatten(results: Sequence[Any]) -> Any:
    """Join the data groups' results in the structure that one worker's result has.

    Lists, tuples, arrays and tensors are put end to end; dicts key by key (a key that some lack: of those that have it). A
    tuple of several batches (`return features, logprobs`: every element a batch or a dict, everywhere as many) is
    joined element by element and stays a tuple, as is a named tuple. All None gives None. Anything else gives the list of results.
    """
    if len(results) == 1:
        return results[0]
    if all(result is None for result in results):
        return None
    if all(isinstance(result, Mapping) for result in results):
        mappings = cast("Sequence[Mapping[Any, Any]]", results)
        keys = list(dict.fromkeys(key for mapping in mappings for key in mapping))
        return {key: flatten_values([mapping[key] for mapping in mappings if key in mapping]) for key in keys}
    if is_structure(results):
        joined = [flatten(column) for column in zip(*results, strict=True)]
        return tuple(joined) if type(results[0]) is tuple else type(results[0])(*joined)
    if all(batch_kind(result) for result in results):
        return join(results)
    return list(results)


def flatten_values(values: Sequence[Any]) -> Any:
    """As `flatten`, but one scalar stays in a list, so that a dict entry has one type however many ranks have it."""
    if len(values) == 1 and batch_kind(values[0]) is None and not isinstance(values[0], Mapping) and values[0] is not None:
        return [values[0]]
    return flatten(values)


def is_structure(results: Sequence[Any]) -> bool:
    """Whether tuples are several results side by side, rather than batches."""
    first: Any = results[0]
    if not all(isinstance(result, tuple) and len(cast("tuple[Any, ...]", result)) == len(first) for result in results):
        return False
    if hasattr(first, "_fields"):
        return all(type(result) is type(first) for result in results)
    return len(first) > 0 and all(isinstance(item, Mapping) or batch_kind(item) for result in results for item in result)


def _reduce(values: Sequence[Any], how: Literal["mean", "sum"]) -> Any:
    present = [value for value in values if value is not None]
    if not present:
        return None
    first: Any = present[0]
    if all(isinstance(value, Mapping) for value in present):
        keys = list(dict.fromkeys(key for value in present for key in value))
        return {key: _reduce([value[key] for value in present if key in value], how) for key in keys}
    if isinstance(first, (list, tuple)):
        sequences = cast("Sequence[Sequence[Any]]", present)
        kind: type[Any] = type(sequences[0])
        if any(type(value) is not kind or len(value) != len(sequences[0]) for value in sequences):
            raise CollectError(f"collect={how!r} needs lists of one length from all ranks")
        columns = [_reduce(column, how) for column in zip(*sequences, strict=True)]
        if hasattr(kind, "_fields"):
            return kind(*columns)
        return tuple(columns) if issubclass(kind, tuple) else columns
    if not all(isinstance(value, (int, float, complex)) or is_array(value) or is_tensor(value) or hasattr(value, "__array__") for value in present):
        raise CollectError(f"collect={how!r} adds numbers, arrays and dicts or lists of them, not {type(first).__name__}")
    total = present[0]
    for value in present[1:]:
        total = total + value
    return total / len(present) if how == "mean" else total
