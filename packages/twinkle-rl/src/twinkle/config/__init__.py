"""The commands' configurations: one pydantic model each, from TOML file, environment and flags alike."""

from twinkle.config._base import CommandConfig
from twinkle.config._common import ActorConfig, RuntimeConfig, SamplerConfig, TaskConfig, WarmupConfig
from twinkle.config._grpo import GRPOConfig
from twinkle.config._sft import SFTConfig
from twinkle.config._topology import TopologyConfig

__all__ = [
    "ActorConfig",
    "CommandConfig",
    "GRPOConfig",
    "RuntimeConfig",
    "SFTConfig",
    "SamplerConfig",
    "TaskConfig",
    "TopologyConfig",
    "WarmupConfig",
]
