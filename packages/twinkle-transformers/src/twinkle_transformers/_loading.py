"""Reads Hugging Face checkpoints."""

import os
from pathlib import Path
from typing import Any

import torch

from ._errors import CheckpointError, ModelNotFoundError, UnsupportedModelError


def find_checkpoint(model_id: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint.

    Raises:
        ModelNotFoundError: there is none.
    """
    folder = Path(model_id)
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{os.fspath(model_id)!r} is not a folder with a Hugging Face model (config.json): give a local path")
    return folder


def load_model(folder: Path, *, attn_implementation: str | None, trust_remote_code: bool) -> Any:
    """The model, whole, in float32 on the CPU.

    Raises:
        UnsupportedModelError: transformers does not know it as a causal language model, or not with this attention.
        CheckpointError: weights are missing.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if attn_implementation is None and getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None):
            attn_implementation = "eager"  # the one that caps scores on every device
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        model, info = loaded
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"transformers cannot load {folder} as a causal language model: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} weights of {type(model).__name__}, {missing[:3]} for example: it is incomplete")
    return model


def check_same_model(folder: Path, config: Any, *, trust_remote_code: bool = False) -> None:
    """CheckpointError unless the checkpoint is of the same model type and sizes."""
    from transformers import AutoConfig

    other = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"):
        have, want = getattr(other, name, None), getattr(config, name, None)
        if have != want:
            raise CheckpointError(f"{folder} has {name}={have!r}, this model has {want!r}: it is a checkpoint of another model")
