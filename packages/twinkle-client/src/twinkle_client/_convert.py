"""What callers give, as the wire types take it: records of twinkle-data, peft's configurations, arrays and paths."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from ._errors import InvalidRequest
from ._formats import HasToDict, LoraConfig, SamplingParams, as_list


def rows_of(inputs: Any) -> list[Any]:
    """The rows of a batch; those that are records of another package, by their fields.

    Raises:
        InvalidRequest: no list.
    """
    if isinstance(inputs, (str, bytes, Mapping)) or not isinstance(inputs, Iterable):
        raise InvalidRequest(f"inputs must be a list of rows, not {type(cast('object', inputs)).__name__}")
    return [_record(each) for each in cast("Iterable[Any]", inputs)]


def prompts_of(inputs: Any) -> list[Any]:
    """The prompts of a batch: records, texts, token ids, or a conversation's messages.

    Raises:
        InvalidRequest: no list.
    """
    return [_prompt(each) for each in rows_of(inputs)]


def params_of(params: Any) -> Any:
    """Sampling parameters, of twinkle-data's too, or a list of them."""
    if params is None:
        return SamplingParams()
    if isinstance(params, Sequence) and not isinstance(params, (str, bytes)):
        return [params_of(each) for each in cast("Sequence[Any]", params)]
    return _record(params)


def lora_of(config: LoraConfig | HasToDict | Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of a LoRA configuration; the server refuses those of peft that no engine has.

    Raises:
        InvalidRequest: something else.
    """
    if config is None:
        config = LoraConfig()
    fields = config.to_dict() if isinstance(config, HasToDict) else dict(config) if isinstance(config, Mapping) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if fields is None:
        raise InvalidRequest(f"a LoRA configuration is a LoraConfig, a mapping or has to_dict(), not {type(config).__name__}")
    # peft keeps target_modules as a set, and its enumerations as such.
    return {
        name: sorted(cast("set[str]", value)) if isinstance(value, (set, frozenset)) else getattr(value, "value", value)
        for name, value in fields.items()
    }


def plain(value: Any) -> Any:
    """Arguments of objects that the server holds, as JSON: records by their fields, arrays as lists, paths as texts."""
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return {name: each for name, each in named.items() if each is not None}
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in cast("Sequence[Any]", value)]
    return as_list(value)


def _record(value: Any) -> Any:
    if not dataclasses.is_dataclass(value) or isinstance(value, type) or type(value).__module__.startswith("twinkle_client"):
        return as_list(value)
    return {each.name: _nested(getattr(value, each.name)) for each in dataclasses.fields(value)}


def _nested(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        return [_record(each) for each in items] if items and dataclasses.is_dataclass(items[0]) else items
    return _record(value)


def _prompt(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    items = list(cast("Sequence[Any]", value))
    return {"messages": [_record(each) for each in items]} if items and not isinstance(items[0], int) else items
