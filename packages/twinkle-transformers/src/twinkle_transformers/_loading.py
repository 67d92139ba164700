"""Reads Hugging Face checkpoints, and makes models without weights that are filled from one that has been read elsewhere."""

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

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
        CheckpointError: weights are missing or of other shapes, or a file cannot be read.
    """
    from transformers import AutoModelForCausalLM

    with _reading(folder):
        options = _options(folder, attn_implementation, trust_remote_code)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True, **options)
        model, info = loaded
    for name, have, want in sorted(info["mismatched_keys"]):
        raise CheckpointError(f"{folder} has {name} of shape {tuple(have)}, and its config.json makes it {tuple(want)}: they do not belong together")
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} weights of {type(model).__name__}, {missing[:3]} for example: it is incomplete")
    return model


@dataclass(frozen=True, kw_only=True)
class Form:
    """What only who has read a checkpoint knows about a model.

    first_names: of each parameter's name, the first of the same parameter (tied weights have several). trained: which of these want gradients
    (transformers 5.19 makes AFMoE's expert_bias without, and reads it with). conversions: what transformers did to come
    from the checkpoint's names and shapes to the model's, as `revert_weight_conversion` looks it up.
    """

    first_names: Mapping[str, str]
    trained: frozenset[str]
    conversions: Any


def form_of(model: Any) -> Form:
    """Of a model that `load_model` gave."""
    names: dict[int, str] = {}
    first_names = {name: names.setdefault(id(parameter), name) for name, parameter in model.named_parameters(remove_duplicate=False)}
    trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return Form(first_names=first_names, trained=trained, conversions=getattr(model, "_weight_conversions", None))


def empty_model(folder: Path, form: Form, *, attn_implementation: str | None, trust_remote_code: bool) -> Any:
    """The model that `load_model` gives, without values: parameters and buffers are on torch's meta device."""
    from transformers import AutoModelForCausalLM

    options = _options(folder, attn_implementation, trust_remote_code)
    with torch.device("meta"):  # as from_pretrained makes it
        model: Any = AutoModelForCausalLM.from_config(options.pop("config"), **options)
    model.eval()
    model._weight_conversions = form.conversions
    for name, first in form.first_names.items():
        parent, _, last = name.rpartition(".")
        # One that is tied by the configuration, and has values of its own in the checkpoint, is untied, as transformers does it.
        owner = model.get_parameter(first)
        untied = nn.Parameter(torch.empty_like(owner), requires_grad=first in form.trained)
        model.get_submodule(parent)._parameters[last] = untied if name == first else owner
    return model


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Puts a model from the meta device onto another, with whatever is in the memory there; tied weights stay tied (not by `nn.Module.to_empty`)."""
    made: dict[int, Any] = {}

    def moved(tensor: torch.Tensor, wrap: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor, wrap(torch.empty_like(tensor, device=device))
        return made[id(tensor)][1]

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = moved(parameter, lambda new, old=parameter: nn.Parameter(new, requires_grad=old.requires_grad))  # pyright: ignore[reportArgumentType]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved(buffer, lambda new: new)


def take_tensors(model: nn.Module, *, all_buffers: bool) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers by name, also those that are tied; the model loses them, so that each is freed when it is taken out.

    all_buffers: also those that checkpoints do not have.
    """
    tensors = dict(model.state_dict())
    if all_buffers:
        tensors |= dict(model.named_buffers())
    model.to("meta")
    return tensors


def check_same_model(folder: Path, config: Any, *, trust_remote_code: bool = False) -> None:
    """CheckpointError unless the checkpoint is of the same model type and sizes."""
    from transformers import AutoConfig

    with _reading(folder):
        other = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"):
        have, want = getattr(other, name, None), getattr(config, name, None)
        if have != want:
            raise CheckpointError(f"{folder} has {name}={have!r}, this model has {want!r}: it is a checkpoint of another model")


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """What transformers raises in this context is an error of ours."""
    try:
        yield
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedModelError(f"transformers cannot load {folder} as a causal language model: {error}") from error
    except (OSError, EOFError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"could not read {folder}: {error}") from error


def _options(folder: Path, attn_implementation: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """How transformers is to make the model."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if attn_implementation is None and getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        attn_implementation = "eager"  # the one that caps scores on every device
    return {"config": config, "dtype": torch.float32, "attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
