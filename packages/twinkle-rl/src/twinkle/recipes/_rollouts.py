"""Recorded rollouts: what one GRPO step trained on, written by `--record` and read by `--replay`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twinkle._errors import ConfigError
from twinkle_data import InputFeature

ROLLOUTS_FILE = "rollouts.jsonl"
INITIAL_POLICY = "initial"

_FLOATS = ("logprobs", "ref_logprobs", "advantages")


def rollout_record(step: int, features: Sequence[InputFeature], rewards: Sequence[float]) -> dict[str, Any]:
    """One line of the rollouts file: every array that a sampled feature has; floats keep all their fp32 digits."""
    return {"step": step, "rewards": list(rewards), "features": [_to_json(feature) for feature in features]}


def read_rollouts(folder: Path) -> Iterator[tuple[int, list[InputFeature], list[float]]]:
    """Yield (step, features, rewards) of a recorded run, in order.

    Args:
        folder: the run folder of a run with `--record`.

    Raises:
        ConfigError: there is no record, or a line of it is damaged.
    """
    path = folder / ROLLOUTS_FILE
    if not path.is_file() or not (folder / INITIAL_POLICY).is_dir():
        raise ConfigError(f"--replay {folder}: no {ROLLOUTS_FILE} and {INITIAL_POLICY}/ there; give the folder of a run that was made with --record")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                yield record["step"], [_from_json(entry) for entry in record["features"]], record["rewards"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"--replay {folder}: line {number} of {ROLLOUTS_FILE} is damaged ({error})") from error


def _to_json(feature: InputFeature) -> dict[str, Any]:
    entry: dict[str, Any] = {"input_ids": feature.input_ids.tolist(), "temperature": feature.temperature}
    if feature.completion_mask is not None:
        entry["completion_mask"] = feature.completion_mask.astype(int).tolist()
    if feature.labels is not None:
        entry["labels"] = feature.labels.tolist()
    for name in _FLOATS:
        value = getattr(feature, name)
        if value is not None:
            entry[name] = value.astype(float).tolist() if isinstance(value, np.ndarray) else float(value)
    return entry


def _from_json(entry: dict[str, Any]) -> InputFeature:
    arrays: dict[str, Any] = {"input_ids": np.asarray(entry["input_ids"], dtype=np.int64), "temperature": entry["temperature"]}
    if "completion_mask" in entry:
        arrays["completion_mask"] = np.asarray(entry["completion_mask"], dtype=bool)
    if "labels" in entry:
        arrays["labels"] = np.asarray(entry["labels"], dtype=np.int64)
    for name in _FLOATS:
        if name in entry:
            value = entry[name]
            arrays[name] = np.asarray(value, dtype=np.float32) if isinstance(value, list) else value
    return InputFeature(**arrays)
