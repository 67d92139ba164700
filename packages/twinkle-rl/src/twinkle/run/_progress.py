"""Live progress in the terminal; plain lines where the output is no terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from twinkle.run._interruption import Interruption


def say(console: Console, message: str) -> None:
    """Print a message as it is: no markup, no highlighting, no wrapping (it may hold a path or an option)."""
    console.print(message, markup=False, highlight=False, soft_wrap=True)


class Progress:
    """Shows the last steps of a run as a table that follows along, and messages above it.

    Every message and every step raises KeyboardInterrupt if Ctrl-C was pressed and got lost (see `Interruption`).

    Args:
        total_steps: length of the run in steps.
        console: where to write.
        every: steps between two lines where the console is no terminal.
    """

    def __init__(self, total_steps: int, console: Console, every: int = 10) -> None:
        self._total = total_steps
        self._console = console
        self._every = every
        self._start = time.perf_counter()
        self._rows: list[dict[str, Any]] = []
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._interruption = Interruption()

    def __enter__(self) -> Progress:
        self._interruption.__enter__()
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._interruption.__exit__()
        if self._live:
            self._live.stop()

    def say(self, message: str) -> None:
        """Print a message, with the seconds since the start, above the table."""
        self._interruption.check()
        say(self._console, f"[{time.perf_counter() - self._start:4.0f} s] {message}")

    def step(self, row: dict[str, Any]) -> None:
        """Show one step's figures: the keys that `metrics.jsonl` has."""
        self._interruption.check()
        self._rows = [*self._rows[-7:], row]
        if self._live:
            self._live.update(self._table())
        elif row["step"] == 1 or row["step"] % self._every == 0 or row["step"] == self._total:
            self.say(_line(row, self._total))

    def _table(self) -> Table:
        table = Table(title=f"step {self._rows[-1]['step']} of {self._total}")
        for head in ("step", "reward", "KL", "grad norm", "tokens/s", "sync", "sample", "reward", "train"):
            table.add_column(head, justify="right")
        for row in self._rows:
            table.add_row(
                str(row["step"]),
                f"{row['reward']:.3f}",
                _optional(row.get("kl")),
                f"{row['grad_norm']:.3f}",
                f"{row['tokens_per_s']:.0f}",
                *(f"{row[part]:.2f}s" for part in ("sync_s", "sample_s", "reward_s", "train_s")),
            )
        return table


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"


def _line(row: dict[str, Any], total: int) -> str:
    times = " ".join(f"{part.removesuffix('_s')} {row[part]:.2f}s" for part in ("sync_s", "sample_s", "reward_s", "train_s"))
    return f"step {row['step']}/{total}  reward {row['reward']:.3f}  KL {_optional(row.get('kl'))}  {row['tokens_per_s']:.0f} tokens/s  ({times})"
