"""Between Hugging Face checkpoints and megatron-core models: one interface, and mbridge behind it."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from ._errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


class Bridge(Protocol):
    """Builds a model's chunks for this rank, fills them from a Hugging Face checkpoint, and gives whole tensors back under its names."""

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
        """Every weight, whole, under its Hugging Face name, once. Collective: all ranks iterate to the end."""
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
    """The Hugging Face configuration of a checkpoint folder, checked for what :class:`Bridge` can build.

    Raises:
        UnsupportedModelError: an architecture or option that is not supported, by name.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"{path} is a {config.model_type!r} model; MegatronModel supports {', '.join(SUPPORTED_MODEL_TYPES)} (dense) in this version."
        )
    refused = {
        "hidden_act": config.hidden_act != "silu",
        "attention_bias": bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "use_sliding_window": bool(getattr(config, "use_sliding_window", False)),
        "layer_types": any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()),
    }
    for option, wrong in refused.items():
        if wrong:
            raise UnsupportedModelError(f"{path}: config.json has {option} = {getattr(config, option)!r}, which MegatronModel does not support.")
    rope_arguments(config)
    return config


def rope_arguments(hf_config: Any) -> dict[str, Any]:
    """megatron-core's rotary arguments for a Hugging Face configuration.

    Raises:
        UnsupportedModelError: a kind of rotary scaling that megatron-core computes differently.
    """
    rope = dict(hf_config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    arguments: dict[str, Any] = {"rotary_base": rope.get("rope_theta", 10000.0)}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor other than 1 is not supported.")
    if kind == "default":
        return arguments
    if kind == "linear":
        return arguments | {"seq_len_interpolation_factor": float(rope["factor"])}
    if kind == "llama3":
        # megatron-core 0.16.1 fixes these three.
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        wrong = {name: rope.get(name) for name, value in fixed.items() if rope.get(name) != value}
        if wrong:
            raise UnsupportedModelError(f"rope_type 'llama3' is supported with {fixed} only; config.json has {wrong}.")
        return arguments | {"rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    raise UnsupportedModelError(f"rope_type {kind!r} is not supported: default, linear and llama3 are.")


class MBridge:
    """The :class:`Bridge` over mbridge 0.15.1. Parallel state must be initialised.

    Args:
        hf_config: from :func:`read_config`.
        dtype: of the parameters.
        tp_size: the tensor-parallel size, to a multiple of which the vocabulary is padded.
    """

    def __init__(self, hf_config: Any, dtype: torch.dtype, tp_size: int) -> None:
        self._hf_config = hf_config
        self._dtype = dtype
        # megatron-core 0.16.1 warns of the default of its own cuda_graph_scope whenever a configuration is made.
        warnings.filterwarnings("ignore", message="full scope is deprecated", category=UserWarning)
        divisible_by = tp_size if hf_config.vocab_size % tp_size else None
        self._bridge: Any = _dense_bridge_class(hf_config.model_type)(hf_config, dtype=dtype, make_vocab_size_divisible_by=divisible_by)

    @property
    def vocab_size(self) -> int:
        """The real size of the vocabulary."""
        return self._hf_config.vocab_size

    def build(self, options: Mapping[str, Any]) -> list[torch.nn.Module]:
        """This rank's model chunks, without weights."""
        self._bridge.set_extra_args(**options)
        # mbridge 0.15.1 prints the number of parameters on every data-parallel rank 0.
        with contextlib.redirect_stdout(io.StringIO()):
            return self._bridge.get_model(
                weight_path=None, bf16=self._dtype is torch.bfloat16, use_cpu_initialization=bool(options.get("use_cpu_initialization"))
            )

    def load(self, chunks: list[torch.nn.Module], path: Path) -> None:
        """Fills the chunks from a checkpoint folder.

        Raises:
            CheckpointError: a tensor is missing.
        """
        present = _tensor_names(path)
        # Before anything is sent: mbridge finds out on one rank of a tensor-parallel group only, and the others would wait for it.
        missing = sorted({name for chunk in chunks for name in self._names_in(chunk)} - present)
        if missing:
            raise CheckpointError(f"{path} lacks {len(missing)} tensors that its config.json calls for: {', '.join(missing[:5])}.")
        with torch.no_grad():
            self._bridge.load_weights(chunks, str(path))

    def _names_in(self, chunk: torch.nn.Module) -> Iterator[str]:
        for name in self._bridge._weight_name_mapping_mcore_local_to_global(chunk).values():
            if "_extra_state" not in name:
                yield from self._bridge._weight_name_mapping_mcore_to_hf(name)

    def export_weights(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight, whole, once; each may share memory with the model and stays as it is until the next one is asked for."""
        return self._export(chunks)

    def export_gradients(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every gradient, whole, once, as in :meth:`export_weights`."""
        from mbridge.core.util import unwrap_model

        return self._export([_gradients_of(unwrap_model(chunk)) for chunk in chunks])

    @torch.no_grad()
    def _export(self, chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        exported: set[str] = set()
        for name, tensor in self._bridge.export_weights(chunks):
            # A tied head is on the last stage as well as the first.
            if name not in exported:
                exported.add(name)
                yield name, tensor.detach()


def check_same_model(path: Path, ours: Any) -> None:
    """Refuses a checkpoint of another model than the one that was built.

    Raises:
        CheckpointError: an entry of its config.json that the computation depends on differs, by name.
    """
    theirs = read_config(path)
    for name in (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "tie_word_embeddings",
        # No weight shows these, and another value gives other log-probabilities.
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "rope_parameters",
    ):
        mine, other = getattr(ours, name, None), getattr(theirs, name, None)
        if mine != other:
            raise CheckpointError(f"{path} is another model: its {name} is {other}, this model's is {mine}.")


def _tensor_names(path: Path) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return names


def _gradients_of(chunk: Any) -> Any:
    """Looks to mbridge like the chunk, with gradients in the place of parameters."""

    def named_parameters() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in chunk.named_parameters():
            gradient = parameter.main_grad.detach()
            for attribute in ("tensor_model_parallel", "partition_dim"):
                setattr(gradient, attribute, getattr(parameter, attribute, None))
            yield name, gradient

    return SimpleNamespace(named_parameters=named_parameters, state_dict=chunk.state_dict, decoder=chunk.decoder)


def _dense_bridge_class(model_type: str) -> type:
    """mbridge's class for an architecture, with its faults mended.

    mbridge 0.15.1: Qwen2Bridge and Qwen3Bridge write the tied head into a table of the class, so that an untied model loaded later in
    the same process exports its head as the embedding. LLaMABridge does not know tied heads at all, asks ``"rope_scaling" in config``
    (which transformers 5 cannot answer), and takes every kind of scaling for linear interpolation.
    """
    from mbridge.models.llama import LLaMABridge
    from mbridge.models.qwen2 import Qwen2Bridge
    from mbridge.models.qwen3 import Qwen3Bridge

    base: Any = {"llama": LLaMABridge, "qwen2": Qwen2Bridge, "qwen3": Qwen3Bridge}[model_type]

    class DenseBridge(base):
        def _adjust_mapping_for_shared_weights(self) -> None:
            head = "model.embed_tokens.weight" if self.hf_config.tie_word_embeddings else "lm_head.weight"
            self._DIRECT_MAPPING = {**base._DIRECT_MAPPING, "output_layer.weight": head}

        def _get_gptmodel_args(self) -> dict[str, Any]:
            return {
                "vocab_size": self.hf_config.vocab_size,
                "max_sequence_length": self.hf_config.max_position_embeddings,
                "position_embedding_type": "rope",
                **rope_arguments(self.hf_config),
            }

    return DenseBridge
