"""How a low-rank adapter is configured, in peft's field names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

from ._errors import ConfigError

# Fields of peft.LoraConfig that say where an adapter comes from, not what it computes.
_PROVENANCE = frozenset({"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"})
# Fields that only tune a feature which another field switches on, and which is refused.
_SUBORDINATE = frozenset({"qalora_group_size"})
# Fields whose neutral value is not simply empty.
_NEUTRAL: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "init_lora_weights": True,
    "megatron_core": "megatron.core",
    "runtime_config": {"ephemeral_gpu_offload": False},
}


@runtime_checkable
class HasToDict(Protocol):
    """Anything with `to_dict()`, such as peft.LoraConfig."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A low-rank adapter (LoRA, arXiv:2106.09685) on linear layers; the fields that every engine supports, named as in peft.

    r: rank. lora_alpha: scale; the update is multiplied by lora_alpha / r, or by lora_alpha / sqrt(r) with use_rslora (arXiv:2312.03732).
    target_modules: 'all-linear', or the last parts of module names (Hugging Face names: 'q_proj', 'gate_proj', ...).
    lora_dropout: on the adapter's input, in training.

    Raises ConfigError for values out of range.
    """

    r: int = 8
    lora_alpha: float = 8
    target_modules: tuple[str, ...] | str = "all-linear"
    lora_dropout: float = 0.0
    use_rslora: bool = False

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ConfigError(f"r must be >= 1, got {self.r}")
        if not self.lora_alpha > 0:
            raise ConfigError(f"lora_alpha must be > 0, got {self.lora_alpha}")
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"lora_dropout must be in [0, 1), got {self.lora_dropout}")
        object.__setattr__(self, "target_modules", _target_modules(self.target_modules))

    @property
    def scaling(self) -> float:
        """What the product of the two low-rank matrices is multiplied by."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)

    def targeted(self, modules: Sequence[str]) -> list[str]:
        """Which of a model's linear layers (their Hugging Face names) the adapter is on.

        Raises ConfigError for a target module that none of them has as its name or the last parts of it.
        """
        if isinstance(self.target_modules, str):
            return list(modules)  # 'all-linear'
        for target in self.target_modules:
            if not any(_matches(name, target) for name in modules):
                known = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
                raise ConfigError(f"target_modules: {target!r} is no linear layer of this model's attention or MLPs; these are {known}")
        return [name for name in modules if any(_matches(name, target) for target in self.target_modules)]

    @classmethod
    def of(cls, config: LoraConfig | HasToDict | Mapping[str, Any]) -> LoraConfig:
        """From this class, a mapping, or anything with `to_dict()` such as peft.LoraConfig.

        Raises ConfigError naming every field that is set to something this class cannot express.
        """
        if isinstance(config, cls):
            return config
        if isinstance(config, Mapping):
            given: dict[str, Any] = dict(config)
        elif isinstance(config, HasToDict):
            given = config.to_dict()
        else:
            raise ConfigError(f"a LoRA configuration is a LoraConfig, a mapping or has to_dict(), got {type(config).__name__}")
        own = {field.name for field in fields(cls)}
        unsupported = sorted(name for name, value in given.items() if name not in own and not _is_neutral(name, value))
        if unsupported:
            settings = ", ".join(f"{name}={given[name]!r}" for name in unsupported)
            raise ConfigError(f"unsupported LoRA settings {settings}; supported are {', '.join(sorted(own))}")
        chosen = {name: value for name, value in given.items() if name in own}
        if chosen.get("target_modules") is None:
            chosen.pop("target_modules", None)
        return cls(**chosen)

    def to_dict(self) -> dict[str, Any]:
        """The content of peft's adapter_config.json, without the base model's name."""
        modules = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "target_modules": modules,
            "lora_dropout": self.lora_dropout,
            "use_rslora": self.use_rslora,
            "bias": "none",
        }


def _target_modules(modules: str | Iterable[str]) -> tuple[str, ...] | str:
    if isinstance(modules, str):
        if modules != "all-linear":
            raise ConfigError(f"target_modules is 'all-linear' or a list of module names, got the text {modules!r} (patterns are not supported)")
        return modules
    names = tuple(sorted(modules))
    if not names:
        raise ConfigError("target_modules is empty: nothing would be trained")
    return names


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _is_neutral(name: str, value: Any) -> bool:
    if name in _PROVENANCE or name in _SUBORDINATE:
        return True
    if name in _NEUTRAL:
        return value is None or getattr(value, "value", value) == _NEUTRAL[name]
    return value is None or value is False or value in ({}, [], (), "", set())
