"""Metrics of a run, in its file and in trackers."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from twinkle import MissingExtraError
from twinkle.recipes._rollout_queue import importance_weights
from twinkle.run import Metrics, RunFolder
from twinkle_data import InputFeature


def test_tensorboard_has_every_number_at_its_step(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path / "run")
    with Metrics(folder, "tensorboard", {"lr": 0.1}) as metrics:
        metrics.write("evaluation", {"step": 0, "greedy": 0.5})
        for step in (1, 2):
            metrics.write("step", {"step": step, "loss": 1.0 / step, "note": "not a number", "kl": None})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [("evaluation", 0), ("step", 1), ("step", 2)]
    written = EventAccumulator(str(tmp_path / "run" / "tracker"))
    written.Reload()
    assert sorted(written.Tags()["scalars"]) == ["evaluation/greedy", "step/loss"]
    assert [(event.step, event.value) for event in written.Scalars("step/loss")] == [(1, 1.0), (2, 0.5)]


@pytest.mark.parametrize("tracker", ["wandb", "swanlab", "trackio"])
def test_a_tracker_that_is_not_installed_is_an_early_error_with_the_install_line(tmp_path, tracker):
    if find_spec(tracker) is not None:
        pytest.skip(f"{tracker} is installed")
    with pytest.raises(MissingExtraError, match=rf"--tracker {tracker}: it is not installed: pip install '?(twinkle-rl\[)?{tracker}"):
        Metrics(RunFolder(tmp_path / "run"), tracker)


def test_importance_weights_are_ratios_of_completion_tokens_and_bounded():
    mask = np.array([False, True, True, True])
    feature = InputFeature(input_ids=[5, 6, 7, 8], completion_mask=mask, logprobs=np.array([0.0, -1.0, -2.0, -3.0]))
    (weights,) = importance_weights([feature], [np.array([9.0, -1.0, -2.5, 0.0], np.float32)], 2.0)
    np.testing.assert_allclose(weights, [0.0, 1.0, np.exp(-0.5), 2.0], rtol=1e-6)
