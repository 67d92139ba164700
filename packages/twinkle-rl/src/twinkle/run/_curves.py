"""The curves of a run as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinkle._errors import MissingExtraError


def write_curves(path: Path, steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> None:
    """Draw reward, held-out accuracy, KL and time split over the steps.

    Args:
        path: where the PNG goes.
        steps: the lines of `metrics.jsonl` that are steps.
        evaluations: dicts with `step`, `sampled` and `greedy`.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise MissingExtraError("the curves need matplotlib: pip install 'twinkle-rl[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    x = [row["step"] for row in steps]
    reward, accuracy, kl, times = axes.flat
    reward.plot(x, [row["reward"] for row in steps], linewidth=0.7, alpha=0.5, label="step")
    reward.plot(x, _running_mean([row["reward"] for row in steps], 10), label="mean of 10")
    reward.set(title="reward (training prompts)", xlabel="step", ylim=(0, 1))
    reward.legend(loc="lower right")
    for kind in ("sampled", "greedy"):
        accuracy.plot([row["step"] for row in evaluations], [row[kind] for row in evaluations], marker="o", label=kind)
    accuracy.set(title="held-out exact match", xlabel="step", ylim=(0, 1))
    accuracy.legend(loc="lower right")
    kl.plot(x, [row.get("kl", float("nan")) for row in steps])
    kl.set(title="KL to the initial policy (nats a token)", xlabel="step")
    parts = ("sync_s", "sample_s", "reward_s", "train_s")
    times.stackplot(x, *[[row.get(part, 0.0) for row in steps] for part in parts], labels=[part.removesuffix("_s") for part in parts])
    times.set(title="seconds a step", xlabel="step")
    times.margins(y=0.25)  # room for the legend
    times.legend(loc="upper center", ncols=4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]
