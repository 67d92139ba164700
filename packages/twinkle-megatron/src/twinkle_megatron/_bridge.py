"""Between Hugging Face checkpoints and megatron-core models: the interface, and which bridge a checkpoint gets."""

import importlib.metadata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ._errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from ._families import FAMILIES

BRIDGES = "twinkle_megatron.bridges"


class Bridge(Protocol):
    """Builds a model's chunks for this rank, fills them from a Hugging Face checkpoint, and gives whole tensors back under its names.

    Your own for a ``model_type`` that is not supported registers through the entry point group ``twinkle_megatron.bridges``, whose name is the
    ``model_type`` and whose value a class that is called with ``(hf_config, dtype, tp_size)``; parallel state is initialised then. It may have
    a static method ``check(hf_config)``, which raises UnsupportedModelError before anything is built, and a method ``check_weights(path)``, which
    raises CheckpointError before anything is loaded. Its module is imported once the platform is chosen, so it may import megatron-core and
    `twinkle_megatron.bridges`, whose `MBridge` is a base to start from.
    """

    @property
    def vocab_size(self) -> int:
        """The real size of the vocabulary; the model's may be padded to a multiple of the tensor-parallel size."""
        ...

    def build(self, options: Mapping[str, Any]) -> list[torch.nn.Module]:
        """This rank's model chunks (one, or one a virtual stage), without weights. ``options`` are fields of megatron-core's TransformerConfig."""
        ...

    def load(self, chunks: list[torch.nn.Module], path: Path) -> None:
        """Fills the chunks from a checkpoint folder. Collective."""
        ...

    def export_weights(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight, whole, under its Hugging Face name, once, on rank 0 (others may yield fewer). Collective: all ranks iterate to the end."""
        ...

    def export_gradients(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """As :meth:`export_weights`, for the gradients (``main_grad``) that megatron-core accumulated and reduced."""
        ...


def find_checkpoint(model_id: str) -> Path:
    """The folder of a Hugging Face checkpoint.

    Raises:
        ModelNotFoundError: the folder, its config.json or its safetensors files are absent.
    """
    path = Path(model_id).expanduser()
    advice = (
        "Give model_id a local folder with config.json and *.safetensors, as written by save_pretrained() or `hf download ORG/NAME --local-dir DIR`."
    )
    if not path.is_dir():
        raise ModelNotFoundError(f"There is no model folder at {model_id!r} (looked for {path.absolute()}). {advice}")
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{path} has no config.json. {advice}")
    if not any(path.glob("*.safetensors")):
        raise ModelNotFoundError(f"{path} has no *.safetensors file (other weight formats are not read). {advice}")
    return path


def read_config(path: Path) -> Any:
    """The Hugging Face configuration of a checkpoint folder, checked for what its bridge can build.

    Raises:
        UnsupportedModelError: an architecture or option that is not supported, by name.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path}: config.json cannot be read: {error}") from None
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"{path} is quantized (quantization_config in config.json): convert it to bfloat16 or float32 first.")
    if registered_bridge(config.model_type) is not None:
        # Its module may import megatron-core, and the platform may not be chosen yet: make_bridge asks it.
        return config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedModelError(
            f"{path} is a {config.model_type!r} model; MegatronModel supports {', '.join(sorted(FAMILIES))}, and others through a bridge of your "
            f"own (entry point group {BRIDGES!r})."
        )
    try:
        family.check(config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None
    return config


def registered_bridge(model_type: str) -> importlib.metadata.EntryPoint | None:
    """The bridge that somebody registered for a ``model_type``; it takes precedence over ours.

    Raises:
        UnsupportedModelError: two packages registered one.
    """
    found = [entry for entry in importlib.metadata.entry_points(group=BRIDGES) if entry.name == model_type]
    if len(found) > 1:
        names = ", ".join(entry.value for entry in found)
        raise UnsupportedModelError(f"{len(found)} bridges are registered for {model_type!r} ({names}): uninstall all but one.")
    return found[0] if found else None


def make_bridge(hf_config: Any, dtype: torch.dtype, tp_size: int) -> Bridge:
    """The bridge for a configuration from :func:`read_config`. Parallel state must be initialised.

    Raises:
        UnsupportedModelError: what a registered bridge does not support.
    """
    registered = registered_bridge(hf_config.model_type)
    if registered is not None:
        own = registered.load()
        check = getattr(own, "check", None)
        if check is not None:
            check(hf_config)
        return own(hf_config, dtype, tp_size)
    from ._mbridge import MBridge

    return MBridge(hf_config, dtype, tp_size)


def check_weights(bridge: Bridge, path: Path) -> None:
    """Refuses a folder whose tensors do not fit, before anything is read; a bridge of one's own may leave that to its `load`.

    Raises:
        CheckpointError: a tensor is missing, or has another shape.
    """
    check: Any = getattr(bridge, "check_weights", None)
    if check is not None:
        check(path)


def check_same_model(path: Path, ours: Any) -> None:
    """Refuses a checkpoint of another model than the one that was built.

    Raises:
        CheckpointError: an entry of its config.json that the computation depends on differs, by name.
    """
    theirs = read_config(path)
    # What does not change the computation; all else does, though no weight may show it (head_dim, rms_norm_eps, rope_parameters, ...).
    ignored = {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache", "architectures"}
    ignored |= {"pad_token_id", "bos_token_id", "eos_token_id", "output_router_logits", "initializer_range", "max_position_embeddings"}
    mine, other = ours.to_dict(), theirs.to_dict()
    # The sizes first, which say most.
    first = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for name in (*first, *sorted(mine.keys() | other.keys())):
        if name not in ignored and mine.get(name) != other.get(name):
            raise CheckpointError(f"{path} is another model: its {name} is {other.get(name)}, this model's is {mine.get(name)}.")
