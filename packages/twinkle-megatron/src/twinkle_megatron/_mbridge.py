"""The :class:`Bridge` over mbridge 0.15.1. Imported only once the platform is chosen."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from mbridge.core.util import unwrap_model
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from mbridge.models.glm4moe import GLM4MoEBridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.mixtral import MixtralBridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge

from ._families import FAMILIES, rope_arguments
from ._lora_plan import LinearLayer
from ._moe import use_router
from ._weights import Placement, WeightMap

_BASES: dict[str, Any] = {
    "llama": LLaMABridge,
    "qwen2": Qwen2Bridge,
    "qwen3": Qwen3Bridge,
    "qwen3_moe": Qwen3MoEBridge,
    "mixtral": MixtralBridge,
    "deepseek_v3": DeepseekV3Bridge,
    "glm4_moe": GLM4MoEBridge,
}


class MBridge:
    """mbridge's configuration and names of a model, with its faults mended, and weights moved by `WeightMap`. Parallel state must be initialised.

    A bridge of one's own may derive from it, with `_names`, mbridge's class for the architecture, or one derived from it, set to another.

    Args:
        hf_config: the checked Hugging Face configuration.
        dtype: of the parameters.
        tp_size: the tensor-parallel size, to a multiple of which the vocabulary is padded.
    """

    def __init__(self, hf_config: Any, dtype: torch.dtype, tp_size: int) -> None:
        self._hf_config = hf_config
        self._dtype = dtype
        # megatron-core 0.16.1 warns of the default of its own cuda_graph_scope whenever a configuration is made.
        warnings.filterwarnings("ignore", message="full scope is deprecated", category=UserWarning)
        # mbridge 0.15.1 notes the padded size only where a divisor is given.
        self._bridge: Any = self._names(hf_config)(hf_config, dtype=dtype, make_vocab_size_divisible_by=tp_size)
        self._map: WeightMap | None = None

    def _names(self, hf_config: Any) -> Any:
        """The class of mbridge that builds the architecture and knows its names."""
        return mended(hf_config.model_type)

    @property
    def vocab_size(self) -> int:
        """The real size of the vocabulary."""
        return self._hf_config.vocab_size

    def build(self, options: Mapping[str, Any]) -> list[torch.nn.Module]:
        """This rank's model chunks, without weights."""
        family = FAMILIES.get(self._hf_config.model_type)
        is_half = self._dtype is torch.float16  # mbridge 0.15.1 tells megatron-core of bfloat16 only
        self._bridge.set_extra_args(**({} if family is None else family.options(self._hf_config)) | {"fp16": is_half} | dict(options))
        # mbridge 0.15.1 prints the number of parameters on every data-parallel rank 0.
        with contextlib.redirect_stdout(io.StringIO()):
            chunks = self._bridge.get_model(
                weight_path=None,
                bf16=self._dtype is torch.bfloat16,
                fp16=is_half,
                use_cpu_initialization=bool(options.get("use_cpu_initialization")),
            )
        self._map = WeightMap(self._bridge, [unwrap_model(chunk) for chunk in chunks])
        return chunks

    def check_weights(self, path: Path) -> None:
        """Whether a checkpoint folder fits.

        Raises:
            CheckpointError: a tensor is missing, or has another shape.
        """
        self._weights().check(path)

    def load(self, chunks: list[torch.nn.Module], path: Path) -> None:
        """Fills the chunks from a checkpoint folder that fits."""
        self._weights().load([unwrap_model(chunk) for chunk in chunks], path)

    def export_weights(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight, whole, once, on rank 0; each may share memory with the model and stays as it is until the next one is asked for."""
        return self._weights().export([unwrap_model(chunk) for chunk in chunks])

    def export_gradients(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every gradient, whole, once, as in :meth:`export_weights`."""
        return self._weights().export([unwrap_model(chunk) for chunk in chunks], gradients=True)

    def placements(self, chunks: list[torch.nn.Module]) -> Iterator[Placement]:
        """Where each of this rank's tensors lies in the whole model; for training checkpoints."""
        return self._weights().placements([unwrap_model(chunk) for chunk in chunks])

    def linear_layers(self) -> list[LinearLayer]:
        """The Hugging Face model's linear layers, and where in this model they are; for adapters."""
        return self._weights().linear_layers()

    def _weights(self) -> WeightMap:
        assert self._map is not None, "build() comes first"
        return self._map


def mended(model_type: str) -> type:
    """mbridge's class for an architecture, with its faults mended.

    mbridge 0.15.1: Qwen2Bridge and Qwen3Bridge write the tied head into a table of the class, so that an untied model loaded later in
    the same process exports its head as the embedding; LLaMABridge, MixtralBridge and the expert families do not know tied heads at all, and
    GLM4MoEBridge has a table of its own for them. LLaMABridge and DeepseekV3Bridge ask ``"rope_scaling" in config`` (which transformers 5 cannot
    answer), and take every kind of scaling for the one that they know. GLM4MoEBridge looks for partial_rotary_factor where it no longer is.
    Qwen3MoEBridge has no names for the dense layers of ``mlp_only_layers``.
    """
    base = _BASES[model_type]

    class Mended(base):
        _MLP_MAPPING: ClassVar[dict[str, list[str]]] = {
            **base._MLP_MAPPING,
            **({} if "mlp.linear_fc1.weight" in base._MLP_MAPPING else Qwen2Bridge._MLP_MAPPING),
        }

        def _adjust_mapping_for_shared_weights(self) -> None:
            head = "model.embed_tokens.weight" if self.hf_config.tie_word_embeddings else "lm_head.weight"
            self._DIRECT_MAPPING = {**base._DIRECT_MAPPING, "output_layer.weight": head}

        def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
            direct = self._DIRECT_MAPPING.get(mcore_weights_name)
            return super()._weight_name_mapping_mcore_to_hf(mcore_weights_name) if direct is None else [direct]

        def _build_config(self) -> Any:
            if model_type in ("deepseek_v3", "glm4_moe"):
                return self._build_base_config(**FAMILIES[model_type].options(self.hf_config))
            return super()._build_config()

        def _get_gptmodel_args(self) -> dict[str, Any]:
            return {
                "vocab_size": self.hf_config.vocab_size,
                "max_sequence_length": self.hf_config.max_position_embeddings,
                "position_embedding_type": "rope",
                **({} if model_type == "deepseek_v3" else rope_arguments(self.hf_config)),
            }

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            spec = super()._get_transformer_layer_spec(vp_stage)
            use_router(spec)
            return spec

    if model_type == "deepseek_v3":
        # Its own provider does not pad the vocabulary, and builds multi-token prediction, which transformers does not load either.
        Mended._model_provider = Qwen2Bridge._model_provider
    return Mended
