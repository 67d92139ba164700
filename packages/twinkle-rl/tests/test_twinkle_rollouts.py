import json

import numpy as np
import pytest

from twinkle import ConfigError
from twinkle.recipes import mean_kl, read_rollouts, rollout_record
from twinkle_data import InputFeature


def _feature(seed: int = 0, length: int = 6) -> InputFeature:
    random = np.random.default_rng(seed)
    logprobs = -random.random(length).astype(np.float32)
    logprobs[:3] = 0
    return InputFeature(
        input_ids=random.integers(0, 50, length),
        completion_mask=np.arange(length) >= 3,
        logprobs=logprobs,
        ref_logprobs=logprobs,
        advantages=float(random.normal()),
        temperature=0.7,
    )


def test_a_record_gives_the_same_features_back_to_the_last_bit(tmp_path):
    features = [_feature(seed) for seed in range(4)]
    (tmp_path / "initial").mkdir()
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(rollout_record(1, features, [0.0, 1.0, 0.0, 1.0])) + "\n")
    [(step, back, rewards)] = read_rollouts(tmp_path)
    assert (step, rewards) == (1, [0.0, 1.0, 0.0, 1.0])
    assert back == features


def test_a_folder_without_a_record_is_an_error_that_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match="--record"):
        next(read_rollouts(tmp_path))


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "initial").mkdir()
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1\n')
    with pytest.raises(ConfigError, match="line 1"):
        next(read_rollouts(tmp_path))


def _logprobs(feature: InputFeature) -> np.ndarray:
    assert feature.logprobs is not None
    return feature.logprobs.copy()


def test_kl_is_exactly_zero_for_equal_policies_and_positive_otherwise():
    features = [_feature(seed) for seed in range(3)]
    policy = [_logprobs(feature) for feature in features]
    assert mean_kl(features, policy, policy) == 0.0
    other = [values - np.float32(0.1) for values in policy]
    assert mean_kl(features, policy, other) == pytest.approx(np.exp(-0.1) - 1 + 0.1, rel=1e-4)


def test_kl_looks_at_completion_tokens_only():
    feature = _feature()
    reference = _logprobs(feature)
    reference[1] = -5.0
    assert mean_kl([feature], [_logprobs(feature)], [reference]) == 0.0
