"""What counts as a batch (list, tuple, numpy array, torch tensor, dict of columns), how it is cut and how parts are joined.

torch is used only where the caller's values are tensors, so it is imported already.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from twinkle_remote._errors import CollectError

BatchKind = Literal["list", "tuple", "array", "tensor", "columns"]


def _torch() -> Any:
    return sys.modules.get("torch")


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor."""
    torch = _torch()
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Whether `value` is a numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def batch_kind(value: Any) -> BatchKind | None:
    """Which kind of batch `value` is; None for what is not one (scalars, strings, dicts, named tuples, other objects)."""
    if isinstance(value, list):
        return "list"
    if isinstance(value, tuple):
        return None if hasattr(cast("object", value), "_fields") else "tuple"
    if is_array(value):
        return "array" if value.ndim else None
    if is_tensor(value):
        return "tensor" if value.ndim else None
    return None


def column_lengths(value: Any, name: str = "", also: type | None = None) -> dict[str, int | None] | None:
    """The lengths of the columns of a dict that is a batch, by name; None for what is not one.

    A dict is a batch where all its values are batches (or dicts that are), at least one of them an array or a tensor: a dict of lists alone
    is as likely to be settings. also: a type that counts like an array, of unknown length (None).
    """
    lengths: dict[str, int | None] = {}
    return lengths if isinstance(value, Mapping) and _add_lengths(cast("Mapping[Any, Any]", value), name, also, lengths) else None


def _add_lengths(value: Mapping[Any, Any], name: str, also: type | None, lengths: dict[str, int | None]) -> bool:
    arrays = False
    for key, column in value.items():
        label = f"{name}[{key!r}]"
        if also is not None and isinstance(column, also):
            lengths[label] = None
            arrays = True
        elif isinstance(column, Mapping):
            inner: dict[str, int | None] = {}
            if not _add_lengths(cast("Mapping[Any, Any]", column), label, also, inner):
                return False
            lengths |= inner
            arrays = True
        elif (kind := batch_kind(column)) is None:
            return False
        else:
            lengths[label] = len(column)
            arrays = arrays or kind in ("array", "tensor")
    return arrays


def result_kind(value: Any) -> tuple[BatchKind | None, int]:
    """The kind of batch that a method returned, dicts of columns of one length included, and its length (0 for what is not a batch)."""
    if (kind := batch_kind(value)) is not None:
        return kind, len(value)
    lengths = column_lengths(value)
    return ("columns", next(iter(lengths.values())) or 0) if lengths and len(set(lengths.values())) == 1 else (None, 0)


def cut(value: Any, bounds: slice) -> Any:
    """The items of a batch, of each column of a dict, within `bounds`."""
    if isinstance(value, Mapping):
        return {key: cut(column, bounds) for key, column in cast("Mapping[Any, Any]", value).items()}
    return value[bounds]


def even_slice(n: int, parts: int, index: int) -> slice:
    """Part `index` of `n` items cut into `parts`: in order, sizes differ by at most one, as DeviceMesh.get_slice."""
    share, longer = divmod(n, parts)
    start = index * share + min(index, longer)
    return slice(start, start + share + (index < longer))


def are_batches(parts: Sequence[Any]) -> bool:
    """Whether all parts are batches (dicts apart). Takes a few nanoseconds a part where they are of one type."""
    types = set(map(type, parts))
    if types <= {list} or types == {tuple}:
        return True
    if len(types) == 1 and (is_array(parts[0]) or is_tensor(parts[0])):
        return all(part.ndim for part in parts)
    return all(batch_kind(part) for part in parts)


def join(parts: Sequence[Any]) -> Any:
    """Put batches of one kind end to end, dicts column by column. Raises CollectError for batches of different kinds or columns."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if isinstance(first, Mapping):
        names = cast("Mapping[Any, Any]", first).keys()
        if not all(isinstance(part, Mapping) and cast("Mapping[Any, Any]", part).keys() == names for part in parts):
            raise CollectError(f"cannot cut dicts whose keys differ between ranks into rows: some have {', '.join(map(repr, names))}, others do not")
        return {name: join([part[name] for part in parts]) for name in names}
    kinds = {batch_kind(part) for part in parts} if len(set(map(type, parts))) > 1 else {batch_kind(first)}
    if len(kinds) != 1 or None in kinds:
        raise CollectError(f"cannot join batches of different types: {', '.join(sorted({type(part).__name__ for part in parts}))}")
    kind = kinds.pop()
    if kind == "array":
        return _concatenated(parts)
    if kind == "tensor":
        return _torch().cat([part.detach() if part.requires_grad else part for part in parts])
    items = [item for part in parts for item in part]
    return tuple(items) if kind == "tuple" else items


def _concatenated(arrays: Sequence[Any]) -> Any:
    import numpy

    np: Any = numpy
    if any(isinstance(array, np.ma.MaskedArray) for array in arrays):
        return np.ma.concatenate(arrays)  # numpy's own forgets the masks
    whole = np.concatenate(arrays)
    kinds: set[type] = set(map(type, arrays))
    return whole.view(kinds.pop()) if len(kinds) == 1 and type(whole) is np.ndarray else whole  # record arrays come back as plain ones


def widened(value: Any) -> Any:
    """A number, array or tensor in a type that sums of many do not overflow: small integers and booleans as 64 bits, halves as 32. As numpy's
    and torch's own sums do; `+` does not."""
    if is_tensor(value):
        torch = _torch()
        if value.dtype.is_floating_point:
            return value.float() if value.element_size() < 4 else value
        return value if value.dtype.is_complex or value.element_size() == 8 else value.to(torch.int64)
    dtype: Any = getattr(value, "dtype", None)
    wide = {"b": "i8", "i": "i8", "u": "u8", "f": "f4"}.get(getattr(dtype, "kind", ""))
    return value.astype(wide) if wide is not None and dtype.itemsize < int(wide[1]) else value


def narrowed(total: Any, values: Sequence[Any]) -> Any:
    """The total of values that were halves as one again. Whole numbers stay wide."""
    dtype: Any = getattr(values[0], "dtype", None)
    if dtype is None or any(getattr(value, "dtype", None) != dtype for value in values):
        return total
    if is_tensor(total):
        return total.to(dtype) if dtype.is_floating_point else total
    return total.astype(dtype) if getattr(dtype, "kind", "") == "f" else total
