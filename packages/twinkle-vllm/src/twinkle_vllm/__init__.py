"""A vLLM sampler on a device mesh whose weights are always current. `import twinkle_vllm` does not import vLLM; building a sampler does."""

from ._errors import (
    AdapterNotLoaded,
    AdapterRefused,
    EngineFailed,
    EngineMissing,
    EngineSettingError,
    IncompleteWeights,
    ModelNotFound,
    PromptError,
    ReplicaLost,
    SamplerError,
    SamplerPaused,
    SamplingOptionError,
    StaleRequest,
)
from ._openai import OpenAIServer, openai_app
from ._pool import ReplicaStatus, SamplerPool
from ._sampler import vLLMSampler

__all__ = [
    "AdapterNotLoaded",
    "AdapterRefused",
    "EngineFailed",
    "EngineMissing",
    "EngineSettingError",
    "IncompleteWeights",
    "ModelNotFound",
    "OpenAIServer",
    "PromptError",
    "ReplicaLost",
    "ReplicaStatus",
    "SamplerError",
    "SamplerPaused",
    "SamplerPool",
    "SamplingOptionError",
    "StaleRequest",
    "openai_app",
    "vLLMSampler",
]
