"""What each command of `twinkle` does, and how its errors are shown."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Sequence

from rich.console import Console

from twinkle._errors import ConfigError, TwinkleError
from twinkle.cli.main import INTERRUPTED
from twinkle.config import GRPOConfig, SFTConfig, TopologyConfig
from twinkle.run import say

# The base error of every layer: looked up, not imported, since an error of a layer means that it was imported.
_BASE_ERRORS = {
    "twinkle_mesh": "MeshError",
    "twinkle_remote": "RemoteError",
    "twinkle_data": "DataError",
    "twinkle_train": "TrainError",
    "twinkle_sync": "SyncError",
    "twinkle_megatron": "MegatronError",
    "twinkle_transformers": "TransformersError",
    "twinkle_vllm": "SamplerError",
}


def run_command(command: str, options: Sequence[str], console: Console, errors: Console) -> int:
    """Run a command; errors that users can mend are one message without a traceback, all others keep theirs."""
    warnings.formatwarning = lambda message, *_args, **_kwargs: f"warning: {message}\n"  # for users, who need no line of ours
    if command.startswith("-"):
        return _fail(errors, f"name a command before its options, such as: twinkle grpo {' '.join([command, *options])}", 2)
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        return _fail(errors, f"unknown command {command}: {hint}", 2)
    try:
        return COMMANDS[command](options, console)
    except ConfigError as error:
        return _fail(errors, str(error), 2)
    except KeyboardInterrupt:
        return _fail(errors, "interrupted; everything that the run had started has been ended", INTERRUPTED)
    except _user_errors() as error:
        return _fail(errors, str(error), 1)


def _grpo(options: Sequence[str], console: Console) -> int:
    config = GRPOConfig.load(options, prog="twinkle grpo")
    from twinkle.recipes import run_grpo

    run_grpo(config, console)
    return 0


def _sft(options: Sequence[str], console: Console) -> int:
    config = SFTConfig.load(options, prog="twinkle sft")
    from twinkle.recipes import run_sft

    run_sft(config, console)
    return 0


def _topology(options: Sequence[str], console: Console) -> int:
    config = TopologyConfig.load(options, prog="twinkle topology")
    from twinkle.layout import draw_layout, plan_layout

    layout = plan_layout(config.runtime, config.backend, config.actor, config.sampler)
    if config.svg is None:
        say(console, draw_layout(layout))
        return 0
    try:
        config.svg.write_text(draw_layout(layout, format="svg"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--svg {config.svg}: the file cannot be written: {error.strerror}") from None
    say(console, f"wrote {config.svg}")
    return 0


def _doctor(options: Sequence[str], console: Console) -> int:
    if options and options[0] in ("-h", "--help"):
        say(console, "usage: twinkle doctor\n\nWhat is installed, what is missing and how to install it. It takes no options.")
        return 0
    if options:
        raise ConfigError(f"doctor takes no options (got {' '.join(options)})")
    from twinkle.cli._doctor import run_doctor

    return run_doctor(console)


COMMANDS: dict[str, Callable[[Sequence[str], Console], int]] = {"grpo": _grpo, "sft": _sft, "topology": _topology, "doctor": _doctor}


def _user_errors() -> tuple[type[BaseException], ...]:
    layers = (getattr(sys.modules[name], error) for name, error in _BASE_ERRORS.items() if name in sys.modules)
    return (TwinkleError, *layers)


def _fail(errors: Console, message: str, status: int) -> int:
    errors.print("error: ", style="bold red", end="")
    say(errors, message)
    return status
