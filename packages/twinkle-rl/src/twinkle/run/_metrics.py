"""The metrics of a run: a line each in `metrics.jsonl`, and a tracker beside it where one is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from twinkle._errors import MissingExtraError
from twinkle.config._common import TrackerName
from twinkle.run._folder import RunFolder

METRICS_FILE = "metrics.jsonl"
_INSTALL = {
    "tensorboard": "pip install 'twinkle-rl[tensorboard]'",
    "wandb": "pip install 'twinkle-rl[wandb]'",
    "swanlab": "pip install swanlab",
    "trackio": "pip install trackio",
}


class Tracker(Protocol):
    """Somewhere that shows figures over steps."""

    def log(self, figures: dict[str, float], step: int) -> None:
        """Take figures of a step; steps do not decrease."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class Metrics:
    """Writes the lines of `metrics.jsonl`, and their numbers to a tracker as `step/loss`, `evaluation/greedy`, ...

    Args:
        folder: of the run. Trackers that write files have theirs in `tracker/` there; W&B is offline unless WANDB_MODE says otherwise
            (`wandb sync` uploads a run later), and so is SwanLab unless SWANLAB_MODE does.
        tracker: its name, or 'none'.
        config: the run's settings, for the tracker's page.

    Raises:
        MissingExtraError: the tracker is not installed.
    """

    def __init__(self, folder: RunFolder, tracker: TrackerName = "none", config: Mapping[str, Any] | None = None) -> None:
        require_tracker(tracker)
        self._folder = folder
        self._tracker: Tracker | None = None
        if tracker != "none":
            with folder.writing("tracker") as path:
                path.mkdir(exist_ok=True)
                self._tracker = _TRACKERS[tracker](path, folder.path.name, dict(config or {}))

    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        """Append a line of that kind; `row` has a `step`."""
        self._folder.append_line(METRICS_FILE, {"kind": kind, **row})
        if self._tracker is not None:
            figures = {f"{kind}/{name}": float(value) for name, value in row.items() if name != "step" and isinstance(value, (int, float))}
            self._tracker.log(figures, int(row["step"]))

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._tracker is not None:
            self._tracker.close()


def require_tracker(tracker: TrackerName) -> None:
    """Raises MissingExtraError, with the line that installs it, when the tracker is not there."""
    if tracker != "none" and find_spec(tracker) is None:
        raise MissingExtraError(f"--tracker {tracker}: it is not installed: {_INSTALL[tracker]}")


class _TensorBoard:
    def __init__(self, path: Path, name: str, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(path))
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Run:
    """Trackers that share W&B's way of calling."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, figures: dict[str, float], step: int) -> None:
        self._run.log(figures, step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb(path: Path, name: str, config: dict[str, Any]) -> Tracker:
    import wandb  # pyright: ignore[reportMissingImports]

    return _Run(wandb.init(project="twinkle", name=name, dir=str(path), config=config, mode=os.environ.get("WANDB_MODE", "offline")))


def _swanlab(path: Path, name: str, config: dict[str, Any]) -> Tracker:
    import swanlab  # pyright: ignore[reportMissingImports]

    mode = os.environ.get("SWANLAB_MODE", "offline")
    return _Run(swanlab.init(project="twinkle", experiment_name=name, logdir=str(path), config=config, mode=mode))


def _trackio(path: Path, name: str, config: dict[str, Any]) -> Tracker:
    os.environ.setdefault("TRACKIO_DIR", str(path))  # read when it is imported
    import trackio  # pyright: ignore[reportMissingImports]

    return _Run(trackio.init(project="twinkle", name=name, config=config))


_TRACKERS: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _wandb, "swanlab": _swanlab, "trackio": _trackio}
