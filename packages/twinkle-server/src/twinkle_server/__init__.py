"""Training as a service: the native REST interface, and the Tinker protocol, over trainers and samplers."""

from ._config import ModelConfig, SamplerConfig, ServerConfig, load_config, parse_config
from ._errors import ApiError, ConfigError, ServerError
from ._keys import Principal, create_key
from ._service import Service
from .http._app import create_app
from .store import Store

__all__ = [
    "ApiError",
    "ConfigError",
    "ModelConfig",
    "Principal",
    "SamplerConfig",
    "ServerConfig",
    "ServerError",
    "Service",
    "Store",
    "create_app",
    "create_key",
    "load_config",
    "parse_config",
]
