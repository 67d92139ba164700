"""Trainers and samplers from the configuration, and the runtime that they live in."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import threading
from typing import Any

from twinkle_mesh import DeviceGroup, DeviceMesh
from twinkle_remote import Runtime, initialize

from .._config import ModelConfig, RuntimeConfig, SamplerConfig, ServerConfig
from .._errors import ConfigError

_TRAINERS = {"transformers": ("twinkle_transformers", "TransformersModel"), "megatron": ("twinkle_megatron", "MegatronModel")}
# Code from a checkpoint's folder is never run.
_REFUSED_OPTIONS = ("trust_remote_code", "remote_group", "device_mesh", "model_id")


def start_runtime(config: RuntimeConfig) -> Runtime:
    """Starts the runtime; see `twinkle_remote.initialize`."""
    groups = [DeviceGroup(**group.model_dump()) for group in config.groups]
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return initialize(
            config.mode, groups=groups, address=config.address, start_timeout_s=config.start_timeout_s, call_timeout_s=config.call_timeout_s
        )
    finally:
        # Ray (2.60) takes SIGTERM for itself, and ends the process at once: the server's own handler parks everything first.
        if threading.current_thread() is threading.main_thread():
            for number, handler in signals.items():
                if handler is not None:
                    signal.signal(number, handler)


def build_trainer(config: ModelConfig) -> Any:
    """The trainer of a model: a remote class that follows `twinkle_train.TrainModel`. Loads the weights."""
    module, name = _TRAINERS[config.backend]
    trainer = getattr(_module(module, config.backend), name)
    return trainer(config.path, device_mesh=_mesh(config.mesh), remote_group=config.group, **_options(config.name, config.options))


def build_sampler(model: ModelConfig, config: SamplerConfig) -> Any:
    """The sampler beside a model: a remote class with the methods of `twinkle_vllm.vLLMSampler` that the server uses."""
    path, options = config.path or model.path, _options(f"{model.name}.sampler", config.options)
    if config.backend == "vllm":
        sampler = _module("twinkle_vllm", "vllm").vLLMSampler
        engine_args = {"enable_lora": True, "max_loras": config.max_loras, "max_lora_rank": model.max_rank, **options.pop("engine_args", {})}
        return sampler(path, engine_args, device_mesh=_mesh(config.mesh), remote_group=config.group, **options)
    _module("twinkle_transformers", "transformers")
    from ._torch_sampler import TorchSampler

    return TorchSampler(path, device_mesh=_mesh(config.mesh), remote_group=config.group, **options)


def check_backends(config: ServerConfig) -> None:
    """Raises ConfigError for an option that is refused, a mesh that is none or does not fit its group, or an engine that is not installed.

    Imports no engine.
    """
    groups = {group.name: DeviceGroup(**group.model_dump()) for group in config.runtime.groups}
    for model in config.models:
        _options(model.name, model.options)
        _check_mesh(model.name, model.mesh, groups.get(model.group or ""))
        engines = [(_TRAINERS[model.backend][0], model.backend)] if model.trainable else []
        if model.sampler is not None:
            _options(f"{model.name}.sampler", model.sampler.options)
            _check_mesh(f"{model.name}.sampler", model.sampler.mesh, groups.get(model.sampler.group or ""))
            engines.append(("twinkle_vllm" if model.sampler.backend == "vllm" else "twinkle_transformers", model.sampler.backend))
        for module, extra in engines:
            if importlib.util.find_spec(module) is None:
                raise _missing(extra)


def _module(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise _missing(extra) from error


def _missing(extra: str) -> ConfigError:
    return ConfigError(f"the backend {extra!r} is not installed: pip install 'twinkle-server[{extra}]'")


def _mesh(sizes: Any) -> DeviceMesh | None:
    return None if sizes is None else DeviceMesh.from_sizes(**sizes)


def _check_mesh(name: str, sizes: Any, group: DeviceGroup | None) -> None:
    try:
        mesh = _mesh(sizes)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: the mesh cannot be: {error}") from None
    if mesh is not None and group is not None and mesh.world_size != group.num_workers:
        raise ConfigError(f"{name}: the mesh has {mesh.world_size} ranks, the group {group.name!r} {group.num_workers} workers: make them equal")


def _options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    if refused := sorted(set(options) & set(_REFUSED_OPTIONS)):
        raise ConfigError(f"{name}: the options {', '.join(refused)} cannot be set here")
    return dict(options)
