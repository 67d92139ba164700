"""Between the wire's records and those of the layers. twinkle-data comes with an engine, so it is imported where it is used."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from twinkle_client import types as wire

from .._errors import Invalid, Unavailable

# As safetensors names them.
_DTYPES = {"torch.float32": "F32", "torch.float64": "F64", "torch.bfloat16": "BF16", "torch.float16": "F16", "torch.int64": "I64"}


def data_layer() -> Any:
    """The module twinkle_data; Unavailable where no engine, which brings it, is installed."""
    try:
        import twinkle_data
    except ModuleNotFoundError as error:
        raise Unavailable("this server has no engine installed, so it has no data layer") from error
    return twinkle_data


def record_of(value: Any) -> Any:
    """A record of twinkle_data from one of the wire's; anything else as it is. Raises twinkle_data.FormatError (a ValueError)."""
    data = data_layer()
    if isinstance(value, wire.PackedFeature):
        return data.PackedFeature(features=tuple(record_of(each) for each in value.features))
    if isinstance(value, wire.Trajectory):
        messages = tuple(
            data.Message(**_fields(message) | {"tool_calls": tuple(data.ToolCall(**_fields(call)) for call in message.tool_calls)})
            for message in value.messages
        )
        return data.Trajectory(**_fields(value) | {"messages": messages})
    if isinstance(value, (wire.InputFeature, wire.SamplingParams)):
        return getattr(data, type(value).__name__)(**_fields(value))
    return value


def rows_of(inputs: Sequence[Any], encode: Any, *, max_rows: int, max_length: int) -> list[Any]:
    """The rows of a batch, conversations encoded (`encode`: what does that); Invalid for too many or too long ones."""
    if len(inputs) > max_rows:
        raise Invalid(f"a batch has at most {max_rows} rows here, not {len(inputs)}")
    rows = [encode(record_of(each)) if isinstance(each, wire.Trajectory) else record_of(each) for each in inputs]
    for index, row in enumerate(rows):
        if len(row) > max_length:
            raise Invalid(f"inputs[{index}] has {len(row)} tokens; this model takes {max_length}")
    return rows


def output_of(output: Any) -> bytes:
    """A trainer's ModelOutput as the answer's bytes. Its arrays may be long, so they are written as they are, without the wire type's checks."""
    fields = {each.name: _plain(getattr(output, each.name, None)) for each in dataclasses.fields(wire.ModelOutput)}
    return to_json({"result": fields}, inf_nan_mode="strings")


def plain_row(value: Any) -> Any:
    """A row of a dataset as plain JSON values."""
    kinds = {"InputFeature": wire.InputFeature, "Trajectory": wire.Trajectory, "PackedFeature": wire.PackedFeature}
    kind = kinds.get(type(value).__name__)
    if kind is None:
        return value
    return _adapter(kind).dump_python(_adapter(kind).validate_python(_twin(value)), mode="json", exclude_none=True)


def record_json(kind: Any, value: Any) -> bytes:
    """A record of the layers as JSON of its wire type."""
    return _adapter(kind).dump_json(_adapter(kind).validate_python(_twin(value)))


def tensor_of(tensor: Any) -> wire.TensorData:
    """A tensor of torch."""
    import torch

    whole = tensor.detach().cpu().contiguous()
    flat = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
    return wire.TensorData(dtype=_DTYPES.get(str(tensor.dtype), str(tensor.dtype)), shape=list(tensor.shape), data=base64.b64encode(flat).decode())


def check_loss(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a loss that is named, each of its type; Invalid for a name that is not on the list, or another type."""
    from twinkle_train import resolve_loss

    kind = type(resolve_loss(name))
    if unknown := sorted(set(options) - {each.name for each in dataclasses.fields(kind)}):  # pyright: ignore[reportArgumentType]
        raise Invalid(f"the loss {name} has no options {', '.join(unknown)[:300]}")
    try:
        checked = TypeAdapter(kind).validate_python(dict(options))
    except ValidationError as error:
        raise Invalid("; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))) from None
    return {each.name: getattr(checked, each.name) for each in dataclasses.fields(checked) if each.name in options}  # pyright: ignore[reportArgumentType]


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def _twin(value: Any) -> Any:
    """What pydantic takes for a record's twin: its fields, at any depth, with lists for arrays."""
    if isinstance(value, Exception):
        return {"type": type(value).__name__, "message": str(value)[:2000]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # What is not there is left out, so that fields that a newer layer has added need no twin.
        return {name: _twin(each) for name, each in _fields(value).items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [_twin(each) for each in value] if value and not isinstance(value[0], (int, float)) else list(value)
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
