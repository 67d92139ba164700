"""The `twinkle` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console

INTERRUPTED = 130

USAGE = """usage: twinkle COMMAND [OPTIONS]

commands:
  grpo       train by GRPO: a Megatron actor and a vLLM sampler, each in its own device group
  sft        train on worked answers or your own chat data
  topology   draw the groups and meshes of a configuration, and start nothing
  doctor     what is installed, what is missing and how to install it

`twinkle COMMAND --help` explains every option of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: command-line words; None takes those of the process.

    Returns:
        0 for success, 1 for an error of the run, 2 for a wrong command line, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    console, errors = Console(), Console(stderr=True)
    if not words or words[0] in ("-h", "--help", "help"):
        console.print(USAGE, markup=False, highlight=False, end="")
        return 0 if words else 2
    if words[0] == "--version":
        from importlib.metadata import version

        console.print(version("twinkle-rl"), highlight=False)
        return 0
    # Before torch loads its OpenMP, as the workers on Ray have it: in local mode, threads that spin at barriers slow down whatever else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from twinkle.cli._commands import run_command

    return run_command(words[0], words[1:], console, errors)


def entry() -> NoReturn:
    """What the installed `twinkle` command calls: `main`, then the end of the process."""
    status = main()
    if status == INTERRUPTED:
        # Threads that still wait in Ray or torch crash now and then when the interpreter is taken down beneath them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
