"""Twinkle: compose Megatron or Transformers trainers and vLLM samplers for RL, SFT and distillation from one driver script.

The names here come from the layers; `import twinkle` loads no engine (no torch, ray, vLLM, Megatron or transformers).
"""

from twinkle._errors import ConfigError, MissingExtraError, RunFolderError, TwinkleError, WarmupError
from twinkle._exports import EXTRAS, lazy_exports
from twinkle_mesh import DeviceGroup, DeviceMesh
from twinkle_remote import (
    LazyResult,
    Runtime,
    current_runtime,
    gather,
    initialize,
    remote_class,
    remote_function,
    shutdown,
)

_LAZY = {
    "CheckpointEngineManager": "twinkle_sync",
    "DataLoader": "twinkle_data",
    "Dataset": "twinkle_data",
    "InputFeature": "twinkle_data",
    "LoraConfig": "twinkle_train",
    "MegatronModel": "twinkle_megatron",
    "Message": "twinkle_data",
    "SamplingParams": "twinkle_data",
    "Template": "twinkle_data",
    "Trajectory": "twinkle_data",
    "TransformersModel": "twinkle_transformers",
    "group_advantages": "twinkle_train",
    "vLLMSampler": "twinkle_vllm",
}

__all__ = [
    "CheckpointEngineManager",
    "ConfigError",
    "DataLoader",
    "Dataset",
    "DeviceGroup",
    "DeviceMesh",
    "InputFeature",
    "LazyResult",
    "LoraConfig",
    "MegatronModel",
    "Message",
    "MissingExtraError",
    "RunFolderError",
    "Runtime",
    "SamplingParams",
    "Template",
    "Trajectory",
    "TransformersModel",
    "TwinkleError",
    "WarmupError",
    "current_runtime",
    "gather",
    "group_advantages",
    "initialize",
    "remote_class",
    "remote_function",
    "shutdown",
    "vLLMSampler",
]

__getattr__ = lazy_exports(__name__, _LAZY, EXTRAS)


def __dir__() -> list[str]:
    return __all__
