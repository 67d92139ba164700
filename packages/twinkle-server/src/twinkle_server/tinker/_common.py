"""What several routes of the protocol share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .._errors import BadRequest, Invalid
from . import _wire as wire

# The scale of every adapter of the protocol, whatever its rank.
_LORA_ALPHA = 32
_ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
_MLP = ("down_proj", "gate_proj", "up_proj")
_METADATA_BYTES = 64 << 10


def lora_fields(config: wire.LoraConfig) -> dict[str, Any]:
    """The fields of `twinkle_train.LoraConfig` for one of the protocol; BadRequest when nothing would be trained."""
    if not (config.train_attn or config.train_mlp):
        raise BadRequest("train_attn and train_mlp are both false: this server adapts attention and MLP layers, not the head")
    modules: str | list[str] = "all-linear" if config.train_attn and config.train_mlp else list(_ATTENTION if config.train_attn else _MLP)
    return {"r": config.rank, "lora_alpha": _LORA_ALPHA, "target_modules": modules}


def trains(lora: Mapping[str, Any]) -> dict[str, bool]:
    """`train_attn` and `train_mlp` of an adapter."""
    modules = lora.get("target_modules", "all-linear")
    whole = modules == "all-linear"
    return {
        "train_attn": whole or any(name in modules for name in _ATTENTION),
        "train_mlp": whole or any(name in modules for name in _MLP),
    }


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a client wants to be kept with an object; Invalid when it is too much."""
    kept = dict(metadata or {})
    if len(json.dumps(kept)) > _METADATA_BYTES:
        raise Invalid(f"user_metadata is larger than {_METADATA_BYTES} bytes")
    return kept


def as_texts(metadata: Mapping[str, Any]) -> dict[str, str] | None:
    """Metadata as the SDK reads it: texts by name."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()} or None
