"""What counts as a batch (list, tuple, numpy array, torch tensor), how it is cut and how parts are joined.

torch is used only where the caller's values are tensors, so it is imported already.
"""

import sys
from collections.abc import Sequence
from typing import Any, Literal, cast

from twinkle_remote._errors import CollectError

BatchKind = Literal["list", "tuple", "array", "tensor"]


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


def even_slice(n: int, parts: int, index: int) -> slice:
    """Part `index` of `n` items cut into `parts`: in order, sizes differ by at most one, as DeviceMesh.get_slice."""
    share, longer = divmod(n, parts)
    start = index * share + min(index, longer)
    return slice(start, start + share + (index < longer))


def join(parts: Sequence[Any]) -> Any:
    """Put batches of one kind end to end. Raises CollectError for batches of different kinds."""
    if len(parts) == 1:
        return parts[0]
    kinds = {batch_kind(part) for part in parts}
    if len(kinds) != 1 or None in kinds:
        raise CollectError(f"cannot join batches of different types: {', '.join(sorted({type(part).__name__ for part in parts}))}")
    kind = kinds.pop()
    if kind == "array":
        import numpy as np

        return np.concatenate(parts)
    if kind == "tensor":
        return _torch().cat([part.detach() if part.requires_grad else part for part in parts])
    items = [item for part in parts for item in part]
    return tuple(items) if kind == "tuple" else items
