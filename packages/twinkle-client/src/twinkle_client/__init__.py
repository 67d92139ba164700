"""The client of the Twinkle training service: `TwinkleClient`, handles of what a server holds, and the wire types.

Names are loaded when they are first used, so that importing costs little.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._errors import (
    ClientError,
    ConfigError,
    Conflict,
    DamagedCheckpoint,
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    RequestFailed,
    ServerFailed,
    SessionLost,
    Unauthorized,
    Unreachable,
    WorkLost,
)

if TYPE_CHECKING:
    from . import types as types
    from ._async_client import AsyncTwinkleClient as AsyncTwinkleClient
    from ._async_handles import AsyncModel as AsyncModel
    from ._async_handles import AsyncSampler as AsyncSampler
    from ._client import TwinkleClient as TwinkleClient
    from ._formats import InputFeature as InputFeature
    from ._formats import LoraConfig as LoraConfig
    from ._formats import Message as Message
    from ._formats import ModelOutput as ModelOutput
    from ._formats import PackedFeature as PackedFeature
    from ._formats import SampledSequence as SampledSequence
    from ._formats import SampleResponse as SampleResponse
    from ._formats import SamplingParams as SamplingParams
    from ._formats import ToolCall as ToolCall
    from ._formats import Trajectory as Trajectory
    from ._objects import DataLoader as DataLoader
    from ._objects import Dataset as Dataset
    from ._objects import Template as Template
    from ._registry import latest_client as latest_client
    from ._resources import parse_twinkle_path as parse_twinkle_path
    from ._sync import CheckpointEngineManager as CheckpointEngineManager
    from .model import MegatronModel as MegatronModel
    from .model import Model as Model
    from .model import TransformersModel as TransformersModel
    from .sampler import Sampler as Sampler
    from .sampler import vLLMSampler as vLLMSampler

_LAZY = {
    "AsyncModel": "_async_handles",
    "AsyncSampler": "_async_handles",
    "AsyncTwinkleClient": "_async_client",
    "CheckpointEngineManager": "_sync",
    "DataLoader": "_objects",
    "Dataset": "_objects",
    "InputFeature": "_formats",
    "LoraConfig": "_formats",
    "MegatronModel": "model",
    "Message": "_formats",
    "Model": "model",
    "ModelOutput": "_formats",
    "PackedFeature": "_formats",
    "SampleResponse": "_formats",
    "SampledSequence": "_formats",
    "Sampler": "sampler",
    "SamplingParams": "_formats",
    "Template": "_objects",
    "ToolCall": "_formats",
    "Trajectory": "_formats",
    "TransformersModel": "model",
    "TwinkleClient": "_client",
    "latest_client": "_registry",
    "parse_twinkle_path": "_resources",
    "vLLMSampler": "sampler",
}

__all__ = [
    "AsyncModel",
    "AsyncSampler",
    "AsyncTwinkleClient",
    "CheckpointEngineManager",
    "ClientError",
    "ConfigError",
    "Conflict",
    "DamagedCheckpoint",
    "DataLoader",
    "Dataset",
    "DeadlineExceeded",
    "Exhausted",
    "InputFeature",
    "InvalidRequest",
    "LoraConfig",
    "MegatronModel",
    "Message",
    "Model",
    "ModelOutput",
    "NotFound",
    "PackedFeature",
    "QuotaExceeded",
    "RequestFailed",
    "SampleResponse",
    "SampledSequence",
    "Sampler",
    "SamplingParams",
    "ServerFailed",
    "SessionLost",
    "Template",
    "ToolCall",
    "Trajectory",
    "TransformersModel",
    "TwinkleClient",
    "Unauthorized",
    "Unreachable",
    "WorkLost",
    "latest_client",
    "parse_twinkle_path",
    "types",
    "vLLMSampler",
]


def __getattr__(name: str) -> Any:
    if name == "types":
        return import_module(".types", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
