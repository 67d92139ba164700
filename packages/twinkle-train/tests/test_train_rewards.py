from typing import Literal

import numpy as np
import pytest

from twinkle_data import InputFeature, Message, SampledSequence, SampleResponse, Trajectory
from twinkle_train import ConfigError, ExactMatchReward, GRPOAdvantage, InputError, Reward, group_advantages

REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.4, 0.0, 0.9]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_the_formula(scale):
    have = group_advantages(REWARDS, 4, scale=scale)
    want = []
    for start in range(0, len(REWARDS), 4):
        group = REWARDS[start : start + 4]
        mean = sum(group) / 4
        group_std = (sum((r - mean) ** 2 for r in group) / 3) ** 0.5
        all_mean = sum(REWARDS) / len(REWARDS)
        batch_std = (sum((r - all_mean) ** 2 for r in REWARDS) / (len(REWARDS) - 1)) ** 0.5
        divisor = {"group": group_std + 1e-4, "batch": batch_std + 1e-4, "none": 1.0}[scale]
        want += [(r - mean) / divisor for r in group]
    np.testing.assert_allclose(have, want, atol=1e-12)
    np.testing.assert_array_equal(GRPOAdvantage(scale=scale)(REWARDS, 4), have)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("epsilon", [1e-4, 0.0])
def test_groups_of_equal_rewards_have_exactly_no_advantage(scale, epsilon):
    assert not group_advantages([0.1] * 7 + [0.7] * 7, 7, scale=scale, epsilon=epsilon).any()
    assert not group_advantages([0.3] * 6, 3, scale=scale, epsilon=epsilon).any()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_one_sample_a_prompt_is_an_error_not_the_raw_reward(scale):
    with pytest.raises(ConfigError, match="two samples"):
        group_advantages([1.0, 0.0], 1, scale=scale)


@pytest.mark.parametrize(
    ("rewards", "num_samples", "options", "error", "message"),
    [
        ([1.0, 0.0, 1.0], 2, {}, InputError, "groups of 2"),
        ([], 2, {}, InputError, "groups of 2"),
        ([1.0, float("nan")], 2, {}, InputError, "reward 1"),
        ([1.0, 0.0], 2, {"scale": "std"}, ConfigError, "scale"),
        ([1.0, 0.0], 2, {"epsilon": -1}, ConfigError, "epsilon"),
    ],
)
def test_wrong_rewards_are_refused(rewards, num_samples, options, error, message):
    with pytest.raises(error, match=message):
        group_advantages(rewards, num_samples, **options)


def _response(*texts: str, stop_reason: Literal["stop", "length"] = "stop") -> SampleResponse:
    feature = InputFeature(input_ids=[1, 2])
    sequences = [SampledSequence(tokens=[2], logprobs=[-1.0], stop_reason=stop_reason, decoded=text, new_input_feature=feature) for text in texts]
    return SampleResponse(sequences=sequences, prompt_token_ids=[1])


def _prompt(answer: object) -> Trajectory:
    return Trajectory(messages=[Message(role="user", content="?")], user_data={"answer": answer})


def test_exact_match_rewards_each_completion_in_order_without_partial_credit():
    reward = ExactMatchReward()
    assert isinstance(reward, Reward)
    responses = [_response("1 10 10", "10 1", "110", ""), _response("the answer is 7", "7.")]
    assert reward([_prompt("10"), _prompt(7)], responses) == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def test_exact_match_refuses_a_completion_that_was_cut():
    assert ExactMatchReward()([_prompt("3")], [_response("3", stop_reason="length")]) == [0.0]
    assert ExactMatchReward(require_stop=False)([_prompt("3")], [_response("3", stop_reason="length")]) == [1.0]


def test_exact_match_uses_the_given_extraction_and_key():
    reward = ExactMatchReward(extract=lambda text: text.partition("=")[2], answer_key="result")
    prompt = Trajectory(messages=[Message(role="user", content="?")], user_data={"result": "5"})
    assert reward([prompt], [_response("2+3=5", "5")]) == [1.0, 0.0]


def test_exact_match_names_what_is_missing():
    with pytest.raises(InputError, match="1 prompts but 2 responses"):
        ExactMatchReward()([_prompt("1")], [_response("1"), _response("1")])
    with pytest.raises(InputError, match="'answer'"):
        ExactMatchReward()([Trajectory(messages=[Message(role="user", content="?")], user_data={"label": 1})], [_response("1")])
