"""The server's configuration: one YAML file, every field of which an environment variable can override."""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ._errors import ConfigError

ENVIRONMENT_PREFIX = "TWINKLE_SERVER__"
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GroupConfig(_Section):
    """A group of devices (`twinkle_mesh.DeviceGroup`)."""

    name: str
    ranks: int | list[int] = 1
    device_type: str = "cuda"
    visible_devices: str | None = None
    gpus_per_worker: int = 1


class RuntimeConfig(_Section):
    """Where models live: in this process, or on the workers of a Ray cluster."""

    mode: Literal["local", "ray"] = "local"
    groups: list[GroupConfig] = []
    address: str | None = Field(default=None, description="Of a running Ray cluster; without it one is started.")
    start_timeout_s: float = Field(default=600, gt=0)
    call_timeout_s: float = Field(default=1800, gt=0)


class SamplerConfig(_Section):
    """The sampler beside a model. backend 'transformers' samples in plain torch: small and slow, for trying out."""

    backend: Literal["vllm", "transformers"] = "vllm"
    path: str | None = Field(default=None, description="Of the model's folder; the trainer's when not given.")
    group: str | None = None
    mesh: dict[str, int | str] | None = Field(default=None, description="Arguments of DeviceMesh.from_sizes.")
    options: dict[str, Any] = Field(default={}, description="More arguments of the sampler, by name.")
    max_loras: int = Field(default=8, ge=1, description="Adapters that are loaded at a time.")
    concurrency: int = Field(default=1, ge=1, le=256, description="Calls that run at a time.")


class ModelConfig(_Section):
    """A base model that the server trains adapters on, and samples from."""

    name: Name
    path: str = Field(description="A local folder with a Hugging Face checkpoint.")
    backend: Literal["transformers", "megatron"] = "transformers"
    trainable: bool = True
    group: str | None = None
    mesh: dict[str, int | str | bool] | None = Field(default=None, description="Arguments of DeviceMesh.from_sizes.")
    options: dict[str, Any] = Field(default={}, description="More arguments of the trainer, by name.")
    max_loras: int = Field(default=8, ge=1, description="Adapters in memory at a time; others wait on disk.")
    max_rank: int = Field(default=128, ge=1)
    max_length: int = Field(default=32_768, ge=1, description="Tokens of one row.")
    max_rows: int = Field(default=4_096, ge=1, description="Rows of one batch.")
    micro_batch_size: int | None = Field(default=None, ge=1, description="Where a client names none.")
    sampler: SamplerConfig | None = None


class LimitConfig(_Section):
    """What one tenant may do at once."""

    body_bytes: int = Field(default=64 << 20, ge=1024)
    body_timeout_s: float = Field(default=60, gt=0, description="For a whole request body to arrive.")
    requests_per_s: float = Field(default=200, gt=0, description="Sustained, each key.")
    request_burst: int = Field(default=1000, ge=1)
    failed_logins_per_minute: int = Field(default=60, ge=1, description="Each address.")
    queued_calls: int = Field(default=512, ge=1, description="Calls of a tenant that wait for one model.")
    queued_bytes: int = Field(default=1 << 30, ge=1024, description="Of payloads of one tenant that wait.")
    sessions: int = Field(default=1_000, ge=1, description="Live sessions of a tenant.")
    runs: int = Field(default=1_000, ge=1, description="Of a tenant.")
    processors: int = Field(default=32, ge=1, description="Datasets and loaders of a tenant.")
    checkpoint_bytes: int = Field(default=100 << 30, ge=0, description="Of all checkpoints of a tenant.")
    upload_bytes: int = Field(default=8 << 30, ge=1024, description="Of one uploaded checkpoint.")
    wait_s: float = Field(default=30, gt=0, le=300, description="The longest that a request waits for a future.")
    call_s: float = Field(default=3600, gt=0, description="The longest that a native call waits for its result.")
    step_idle_s: float = Field(default=120, gt=0, description="An adapter in the middle of a step keeps its place so long without a call.")
    capacity_s: float = Field(default=600, gt=0, description="How long a call waits for a place among the adapters in memory.")
    order_gap_s: float = Field(default=600, gt=0, description="How long numbered calls wait for a missing predecessor.")


class RetentionConfig(_Section):
    """What `gc` and the server's own rounds delete."""

    session_s: float = Field(default=120, gt=0, description="Without a heartbeat a session is over.")
    future_s: float = Field(default=24 * 3600, gt=0, description="Results, and idempotency keys with them, are kept so long.")
    processor_s: float = Field(default=3600, gt=0, description="Without a call a dataset or loader is let go.")
    audit_s: float = Field(default=365 * 24 * 3600, gt=0)
    checkpoint_s: float | None = Field(default=None, gt=0, description="Age of a checkpoint; None keeps them.")
    every_s: float = Field(default=60, gt=0)


class ServerConfig(_Section):
    """Everything about a server. Unknown fields are errors."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    data_dir: Path = Path("twinkle-server-data")
    database_url: str | None = Field(default=None, description="SQLAlchemy's; without it SQLite in data_dir.")
    route_prefix: str = Field(default="/twinkle", pattern=r"^(/[A-Za-z0-9_-]+)+$")
    root_path: str = Field(default="", description="Under which a proxy serves this.")
    forwarded_allow_ips: str = Field(default="127.0.0.1", description="Proxies whose X-Forwarded-* headers are believed.")
    tls_certfile: Path | None = None
    tls_keyfile: Path | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = Field(default="text", description="json: an object a line, with the request's id.")
    tracing: bool = Field(default=False, description="OpenTelemetry spans (extra 'otel'); where they go, its OTEL_ variables say.")
    runtime: RuntimeConfig = RuntimeConfig()
    models: list[ModelConfig] = []
    limits: LimitConfig = LimitConfig()
    retention: RetentionConfig = RetentionConfig()
    processors: list[str] = Field(default=["Dataset", "DataLoader"], description="What /processor may make.")
    dataset_dirs: list[Path] = Field(default=[], description="Folders whose files tenants may read as datasets.")

    @field_validator("models")
    @classmethod
    def _names_differ(cls, models: list[ModelConfig]) -> list[ModelConfig]:
        names = [model.name for model in models]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two models are named {', '.join(doubled)}")
        return models

    @model_validator(mode="after")
    def _groups_exist(self) -> ServerConfig:
        known = {group.name for group in self.runtime.groups}
        for model in self.models:
            for group in (model.group, None if model.sampler is None else model.sampler.group):
                if group is not None and group not in known:
                    raise ValueError(f"the model {model.name!r} names the group {group!r}; runtime.groups has {sorted(known)}")
        if (self.tls_certfile is None) != (self.tls_keyfile is None):
            raise ValueError("tls_certfile and tls_keyfile belong together")
        return self

    @property
    def url(self) -> str:
        """The database's."""
        return self.database_url or f"sqlite:///{(self.data_dir / 'server.db').absolute()}"

    @property
    def is_public(self) -> bool:
        """Whether others than this machine can reach it."""
        return not is_loopback(self.host)

    def model(self, name: str) -> ModelConfig | None:
        """The model of that name."""
        return next((model for model in self.models if model.name == name), None)


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own; of names only 'localhost' is."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_config(path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> ServerConfig:
    """The configuration of a file, with what the environment says over it.

    TWINKLE_SERVER__LIMITS__BODY_BYTES=1048576 sets limits.body_bytes; values are YAML. Relative paths are relative to the working folder.

    Raises ConfigError that lists every field that is wrong.
    """
    content: Any = {}
    if path is not None:
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no YAML: {error}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{path} must hold settings by name, not a {type(content).__name__}")
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            _override(content, name, value)
    return parse_config(content)


def parse_config(content: Mapping[str, Any]) -> ServerConfig:
    """A configuration from plain values; raises ConfigError that lists every field that is wrong."""
    try:
        return ServerConfig.model_validate(content)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, each['loc'])) or 'settings'}: {_no_such_setting(each['loc']) if each['type'] == 'extra_forbidden' else each['msg']}"
            for each in error.errors(include_url=False, include_input=False)
        ]
        raise ConfigError("the configuration is wrong:\n  " + "\n  ".join(lines)) from None


_SECTIONS: dict[str, type[_Section]] = {
    "runtime": RuntimeConfig,
    "groups": GroupConfig,
    "models": ModelConfig,
    "sampler": SamplerConfig,
    "limits": LimitConfig,
    "retention": RetentionConfig,
}


def _no_such_setting(at: tuple[int | str, ...]) -> str:
    """What is said of a setting that there is not: which one may be meant."""
    section = next((part for part in reversed(at[:-1]) if isinstance(part, str)), "")
    names = list(_SECTIONS.get(section, ServerConfig).model_fields)
    near = difflib.get_close_matches(str(at[-1]), names, 1)
    return "there is no such setting; " + (f"is {near[0]!r} meant?" if near else f"there are {', '.join(names)}")


def _override(content: dict[str, Any], name: str, value: str) -> None:
    *sections, last = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
    for section in sections:
        content = content.setdefault(section, {})
        if not isinstance(content, dict):
            raise ConfigError(f"{name}: {section} holds no settings by name")
    try:
        content[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is no YAML: {error}") from None
