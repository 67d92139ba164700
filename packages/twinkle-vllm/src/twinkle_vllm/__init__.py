"""A vLLM sampler on a device mesh whose weights are always current. `import twinkle_vllm` does not import vLLM; building a sampler does."""

from ._errors import (
    AdapterNotLoaded,
    EngineMissing,
    EngineSettingError,
    IncompleteWeights,
    ModelNotFound,
    PromptError,
    SamplerError,
    SamplingOptionError,
)
from ._sampler import vLLMSampler

__all__ = [
    "AdapterNotLoaded",
    "EngineMissing",
    "EngineSettingError",
    "IncompleteWeights",
    "ModelNotFound",
    "PromptError",
    "SamplerError",
    "SamplingOptionError",
    "vLLMSampler",
]
