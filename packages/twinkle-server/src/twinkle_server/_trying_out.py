"""`twinkle-server launch` without a file: a small model, made on the spot, trained and sampled from on the CPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._config import ServerConfig, load_config, parse_config
from ._errors import ConfigError

MODEL = "tiny-qwen3"


def small_config(environ: Mapping[str, str] | None = None) -> ServerConfig:
    """A configuration of one small model with random weights, and what the environment says over it.

    The model is written into data_dir when it is not there; data_dir is a new temporary folder unless the environment names one.
    """
    given = load_config(None, environ).model_dump(exclude_unset=True)
    data_dir = Path(given.get("data_dir") or tempfile.mkdtemp(prefix="twinkle-server-"))
    folder = data_dir.absolute() / "models" / MODEL
    if not (folder / "config.json").is_file():
        make_small_model(folder)
    model: dict[str, Any] = {"name": MODEL, "path": str(folder), "max_length": 512, "max_rank": 32, "sampler": {"backend": "transformers"}}
    return parse_config({"data_dir": str(data_dir), "models": [model], **given, **({} if given.get("data_dir") else {"data_dir": str(data_dir)})})


def make_small_model(folder: Path) -> None:
    """Writes a two-layer Qwen3 with random weights and a tokenizer of its own."""
    try:
        from twinkle_train.testing import tiny_qwen3
    except ModuleNotFoundError as error:
        raise ConfigError("trying out needs an engine: pip install 'twinkle-server[transformers]', or give a configuration with -c") from error
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    tiny_qwen3(folder, hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1)
