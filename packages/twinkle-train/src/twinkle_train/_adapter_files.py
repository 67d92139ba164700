"""Adapters in peft's format, whatever engine has them: names, first values, files, and the way to samplers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from ._errors import CheckpointError, ConfigError
from ._hf_checkpoint import staged_folder, write_on_rank_zero
from ._lora import LoraConfig

_CONFIG_FILE, _WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def peft_name(module: str, letter: Literal["A", "B"]) -> str:
    """The name of an adapter's matrix in peft's files. module: the name of the linear layer in the Hugging Face model."""
    return f"base_model.model.{module}.lora_{letter}.weight"


def draw_lora_a(name: str, rows: int, columns: int, *, adapter_name: str, seed: int) -> torch.Tensor:
    """The first values of an adapter's matrix A, ``[rows, columns]``: uniform in +-1/sqrt(columns), as peft draws it.

    From a generator of its own, so that an adapter begins alike in every layout and engine. name: the matrix's, of :func:`peft_name`.
    """
    digest = hashlib.sha256(f"{seed}/{adapter_name}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    # nn.init.kaiming_uniform_(a=sqrt(5)), as peft has it.
    bound = 1 / math.sqrt(columns)
    return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)


def save_adapter(
    matrices: Iterator[tuple[str, torch.Tensor]],
    target: Path,
    config: Mapping[str, Any],
    *,
    error_type: type[CheckpointError] = CheckpointError,
) -> None:
    """Writes an adapter's folder in peft's format, complete or not at all. Collective: all ranks call it, rank 0 writes (needs safetensors).

    Args:
        matrices: the collective stream of whole matrices under peft's names.
        target: the folder to write; one that is there is replaced.
        config: the content of adapter_config.json.

    Raises:
        CheckpointError: rank 0 could not write; on every rank, naming the cause, as `error_type`.
    """
    write_on_rank_zero(matrices, target, lambda: _write(matrices, target, config), error_type=error_type)


def _write(matrices: Iterator[tuple[str, torch.Tensor]], target: Path, config: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    with staged_folder(target, _CONFIG_FILE) as folder:
        tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in matrices}
        save_file(tensors, folder / _WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / _CONFIG_FILE).write_text(json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True) + "\n")


def read_adapter(folder: Path, lora: LoraConfig, *, error_type: type[CheckpointError] = CheckpointError) -> dict[str, torch.Tensor]:
    """The matrices of an adapter's folder, which must have been made with the same rank and scaling (needs safetensors).

    Raises:
        CheckpointError: no adapter is there, or it has another configuration; as `error_type`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        content = json.loads((folder / _CONFIG_FILE).read_text())
        matrices = load_file(folder / _WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise error_type(f"{folder} is no adapter in peft's format ({_CONFIG_FILE} and {_WEIGHTS_FILE}): {error}") from None
    try:
        theirs = LoraConfig.of(content)
    except ConfigError as error:
        raise error_type(f"{folder}/{_CONFIG_FILE}: {error}") from None
    for field in dataclasses.fields(lora):
        mine, other = getattr(lora, field.name), getattr(theirs, field.name)
        # Which modules it is on, its matrices say; dropout is a matter of training.
        if field.name in ("r", "lora_alpha", "use_rslora") and mine != other:
            raise error_type(f"{folder} is an adapter with {field.name}={other}, and this one has {mine}: add an adapter that is configured alike.")
    return matrices


def check_adapter_matrices(
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    adapter_name: str,
    source: str,
    error_type: type[CheckpointError] = CheckpointError,
) -> None:
    """Refuses matrices that are missing, left over, or of another shape than an adapter's.

    Args:
        tensors: from `source`, by peft's names.
        shapes: what the adapter wants.

    Raises:
        CheckpointError: naming some of them, as `error_type`.
    """
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise error_type(f"{source} lacks {len(missing)} matrices of the adapter {adapter_name!r}: {', '.join(missing[:3])}, ...")
    if others := sorted(tensors.keys() - shapes.keys()):
        raise error_type(f"{source} has {len(others)} matrices that the adapter {adapter_name!r} has no place for: {', '.join(others[:3])}, ...")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise error_type(f"{source}: {name} is {tuple(tensors[name].shape)}, and the adapter {adapter_name!r} has {shape} there (r?)")


def merge_adapter(
    weights: Iterator[tuple[str, torch.Tensor]], matrices: Mapping[str, torch.Tensor], lora: LoraConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream of whole weights with an adapter's products added, in float32: W + scaling * B A; all others as they are.

    weights: by Hugging Face name. matrices: whole, by peft's names.
    """
    for name, weight in weights:
        module = name.removesuffix(".weight")
        down, up = matrices.get(peft_name(module, "A")), matrices.get(peft_name(module, "B"))
        if down is None or up is None:
            yield name, weight
        else:
            yield name, (weight.float() + up.float() @ down.float() * lora.scaling).to(weight.dtype)


class HasAdapters(Protocol):
    """What an AdapterSource needs of a trainer."""

    def adapter_config(self, adapter_name: str) -> dict[str, Any]:
        """The content of the adapter's adapter_config.json; UnknownAdapterError when there is none of that name."""
        ...

    def iter_adapter(self, adapter_name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Every matrix, whole, under peft's name. Collective: every rank iterates to the end."""
        ...


class AdapterSource:
    """One adapter of a trainer as a `twinkle_sync.WeightSource`: its matrices, whole, under peft's names.

    Args:
        trainer: the trainer itself, on each of its ranks (not the handle of a remote one).
        adapter_name: an adapter that was added to it.

    Raises:
        UnknownAdapterError: there is none of that name.
    """

    def __init__(self, trainer: HasAdapters, adapter_name: str) -> None:
        self._trainer = trainer
        self._adapter_name = adapter_name
        self.config: dict[str, Any] = trainer.adapter_config(adapter_name)

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every matrix as it is now. Collective: every rank iterates to the end."""
        return self._trainer.iter_adapter(self._adapter_name)
