"""Adapters on disk, in peft's format: adapter_config.json and adapter_model.safetensors."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from twinkle_train import ConfigError, LoraConfig, staged_folder, write_on_rank_zero

from ._errors import CheckpointError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def save_adapter(matrices: Iterator[tuple[str, torch.Tensor]], target: Path, config: Mapping[str, Any]) -> None:
    """Writes an adapter's folder, complete or not at all. Collective: all ranks call it, rank 0 writes.

    Args:
        matrices: the collective stream of whole matrices under peft's names.
        target: the folder to write; one that is there is replaced.
        config: the content of adapter_config.json.

    Raises:
        CheckpointError: rank 0 could not write; on every rank, naming the cause.
    """
    write_on_rank_zero(matrices, target, lambda: _write(matrices, target, config), error_type=CheckpointError)


def _write(matrices: Iterator[tuple[str, torch.Tensor]], target: Path, config: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    with staged_folder(target) as folder:
        tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in matrices}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True) + "\n")


def read_adapter(folder: Path, lora: LoraConfig) -> dict[str, torch.Tensor]:
    """The matrices of an adapter's folder, which must have been made with the same rank and scaling.

    Raises:
        CheckpointError: no adapter is there, or it has another configuration.
    """
    from safetensors.torch import load_file

    try:
        content = json.loads((folder / CONFIG_FILE).read_text())
        matrices = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no adapter in peft's format ({CONFIG_FILE} and {WEIGHTS_FILE}): {error}") from None
    try:
        theirs = LoraConfig.of(content)
    except ConfigError as error:
        raise CheckpointError(f"{folder}/{CONFIG_FILE}: {error}") from None
    for field in dataclasses.fields(lora):
        mine, other = getattr(lora, field.name), getattr(theirs, field.name)
        # Which modules it is on, its matrices say; dropout is a matter of training.
        if field.name in ("r", "lora_alpha", "use_rslora") and mine != other:
            raise CheckpointError(
                f"{folder} is an adapter with {field.name}={other}, and this one has {mine}: add an adapter that is configured alike."
            )
    return matrices
