"""One pydantic model a command, filled from flags, environment variables, a TOML file and a preset (in that order of strength)."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from twinkle._errors import ConfigError

ENV_PREFIX = "TWINKLE_"
# Variables of that prefix that are not settings of a command.
_OTHER_VARIABLES = frozenset({"TWINKLE_SERVER_URL", "TWINKLE_SERVER_TOKEN", "TWINKLE_PYTHON", "TWINKLE_UV"})


class _Parser(ArgumentParser):
    """An argument parser whose errors are exceptions that suggest the option that was probably meant."""

    known: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            raise ConfigError(message)
        flag = unknown.split()[0].split("=")[0]
        near = difflib.get_close_matches(flag, self.known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "--help lists all options."
        raise ConfigError(f"unknown option {flag}: {hint}")


class CommandConfig(BaseSettings):
    """Base of the commands' configurations. Use `load`; `--config FILE.toml` names a file, `TWINKLE_A__B` sets field a.b."""

    model_config = SettingsConfigDict(
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        use_attribute_docstrings=True,
        nested_model_default_partial_update=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )
    # What `load` hands to the sources; pydantic-settings builds them in a class method and offers no other way.
    _layers: ClassVar[tuple[dict[str, Any], ...]] = ()

    @classmethod
    def presets(cls) -> dict[str, dict[str, Any]]:
        """Defaults of each preset by name."""
        return {}

    @classmethod
    def defaults_for_own_model(cls) -> dict[str, Any]:
        """Defaults that take the preset's place where the user brings a model."""
        return {}

    @classmethod
    def may_change_on_resume(cls) -> frozenset[str]:
        """Settings that may differ from those of the run that `--resume` goes on with. All others decide what it computes."""
        return frozenset({"resume", "run_dir", "steps", "save_model", "checkpoint_every", "checkpoint_keep", "actor", "runtime", "tracker"})

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, *(InitSettingsSource(settings_cls, init_kwargs=layer) for layer in cls._layers))

    @classmethod
    def load(cls, argv: Sequence[str] = (), *, prog: str | None = None) -> Self:
        """Read the configuration from flags, then the environment, then `--config`, then the preset, then the defaults.

        Args:
            argv: command-line words after the command's name.
            prog: name shown by `--help`.

        Raises:
            ConfigError: an unknown option, a value that does not fit, or a file that cannot be read.
            SystemExit: after `--help`.
        """
        words = list(argv)
        _refuse_misspelt_variables(cls)
        file_values = _read_toml(_take_option(words, "--config"))
        run = _peek_option(words, "--resume") or os.environ.get(ENV_PREFIX + "RESUME")
        recorded = {} if run is None else _recorded(run)
        preset = (
            _peek_option(words, "--preset")
            or os.environ.get(ENV_PREFIX + "PRESET")
            or file_values.get("preset")
            or recorded.get("preset")
            or cls.model_fields["preset"].default
        )
        if preset not in cls.presets():
            raise ConfigError(f"unknown preset {preset!r}: there are {', '.join(cls.presets())}")
        chosen = {"preset": preset, **cls.presets()[preset]}
        if _peek_option(words, "--model") or os.environ.get(ENV_PREFIX + "MODEL") or file_values.get("model"):
            chosen |= cls.defaults_for_own_model()
        loaded = type(cls.__name__, (cls,), {"__doc__": cls.__doc__, "__module__": cls.__module__, "_layers": (file_values, recorded, chosen)})
        parser = _Parser(prog=prog, description=cls.__doc__, allow_abbrev=False, epilog=_EPILOG)
        parser.known = ["--config", *option_names(cls)]
        try:
            flags = CliSettingsSource(loaded, root_parser=parser, cli_parse_args=words, cli_exit_on_error=False)
            values = loaded(_cli_settings_source=flags)  # pyright: ignore[reportCallIssue]
        except ValidationError as error:
            raise ConfigError(_readable(error, option_names(cls), file_values)) from None
        if run is not None:
            _refuse_changes(values, recorded, cls.may_change_on_resume(), run)
        return cls.model_construct(_fields_set=None, **{name: getattr(values, name) for name in cls.model_fields})


_EPILOG = f"Also: --config FILE.toml reads the same fields from a file; environment variables are {ENV_PREFIX}STEPS, {ENV_PREFIX}ACTOR__TP, ..."


def option_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every command-line option of a configuration, e.g. `--actor.sequence-parallel`."""
    return [f"--{prefix}{name}" for name in _dotted_names(model)]


def _refuse_misspelt_variables(model: type[BaseModel]) -> None:
    """A variable that is nearly a setting's is a typo, which pydantic-settings would ignore. One of another command or program is not near."""
    known = [name.upper() for name in model.model_fields]
    for variable in sorted(os.environ):
        name = variable.upper().partition("__")[0]
        if not name.startswith(ENV_PREFIX) or name in _OTHER_VARIABLES:
            continue
        setting = name.removeprefix(ENV_PREFIX)
        near = difflib.get_close_matches(setting, known, n=1, cutoff=0.75)
        if near and setting not in known:
            raise ConfigError(f"environment variable {variable}: there is no such setting; did you mean {ENV_PREFIX}{near[0]}?")


def _dotted_names(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        word = name.replace("_", "-")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (f"{word}.{inner}" for inner in _dotted_names(field.annotation))
        else:
            yield word


def _peek_option(words: Sequence[str], flag: str) -> str | None:
    for i, word in enumerate(words):
        if word == flag and i + 1 < len(words):
            return words[i + 1]
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None


def _take_option(words: list[str], flag: str) -> str | None:
    value = _peek_option(words, flag)
    for i, word in enumerate(words):
        if word == flag:
            if value is None:
                raise ConfigError(f"{flag} needs a value")
            del words[i : i + 2]
            break
        if word.startswith(flag + "="):
            del words[i]
            break
    return value


def _read_toml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid TOML: {error}") from error


def _recorded(run: str) -> dict[str, Any]:
    """The configuration of the run in a folder."""
    path = Path(run).expanduser().absolute()
    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume {run}: no config.json of a run there ({error}); give the folder of an earlier run") from None
    return {name: value for name, value in values.items() if name != "resume"} | {"run_dir": str(path)}


def _refuse_changes(values: BaseModel, recorded: dict[str, Any], may_change: frozenset[str], run: str) -> None:
    """What decides the run's numbers stays as it was; a run folder is gone on with in its place."""
    now = values.model_dump(mode="json")
    changed = [name for name in now if name not in may_change and name in recorded and now[name] != recorded[name]]
    if changed:
        names = ", ".join(f"{name} ({recorded[name]!r}, now {now[name]!r})" for name in changed)
        raise ConfigError(
            f"--resume {run}: that run had other settings: {names}. Only {', '.join(sorted(may_change - {'resume', 'run_dir'}))} may change"
        )
    if Path(now["run_dir"]).absolute() != Path(recorded["run_dir"]):
        raise ConfigError(f"--resume {run} goes on in that folder: leave --run-dir out")


def _readable(error: ValidationError, options: Sequence[str], file_values: dict[str, Any]) -> str:
    """One line a fault, under the option's name, or the setting's where it stands in the file."""
    lines: list[str] = []
    for fault in error.errors():
        place = ".".join(str(part) for part in fault["loc"])
        flag = "--" + place.replace("_", "-")
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(flag, options, n=1)
            message = "there is no such setting" + (f"; did you mean {near[0].removeprefix('--').replace('-', '_')}?" if near else "")
        elif fault["type"] not in ("value_error", "extra_forbidden"):
            message = f"{message} (got {fault['input']!r})"
        where = f"{place} in the file of --config" if place and _is_in(fault["loc"], file_values) else flag
        lines.append(f"{where}: {message}" if place else message)
    return "\n".join(lines)


def _is_in(place: tuple[int | str, ...], values: Any) -> bool:
    for part in place:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True
