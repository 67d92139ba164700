"""Options of each request, and what is wrong with one of them while the others are served."""

import json
import pickle

import numpy as np
import pytest
import torch

from twinkle_data import InputFeature, SampleResponse, SamplingParams
from twinkle_vllm import AdapterNotLoaded, EngineFailed, PromptError, SamplingOptionError

pytestmark = pytest.mark.timeout(300)  # the first test starts the engine

GREEDY = {"temperature": 0, "max_tokens": 4}


def test_what_is_wrong_with_a_request_is_its_responses_error_and_the_rest_is_served(sampler, prompts):
    inputs = [prompts[0], [5] * 64, [], 7, prompts[1], [10**6, 5], [{"rolle": "user", "content": "x"}], [-3, 4], [2**70]]
    responses = list(sampler.sample(inputs, GREEDY))
    assert [response.error is None for response in responses] == [True, False, False, False, True, *[False] * 4]
    for index, (kind, message) in {
        1: (PromptError, r"inputs\[1\] has 64 tokens and max_model_len is 64"),
        2: (PromptError, r"inputs\[2\] is an empty list"),
        3: (PromptError, r"inputs\[3\] is a int"),
        5: (SamplingOptionError, r"inputs\[5\]: vLLM refuses the request: .*1000000"),
        6: (PromptError, r"inputs\[6\]: .*role"),
        7: (PromptError, r"inputs\[7\] holds the negative token id -3"),
        8: (PromptError, r"inputs\[8\] holds the token id 1180591620717411303424"),
    }.items():
        assert responses[index].sequences == []
        with pytest.raises(kind, match=message):
            responses[index].raise_for_error()
        again = pickle.loads(pickle.dumps(responses[index]))
        assert (type(again.error), str(again.error)) == (kind, str(responses[index].error))
    alone = sampler.sample([prompts[0], prompts[1]], GREEDY)
    assert [responses[i].raise_for_error().sequences[0].tokens for i in (0, 4)] == [response.sequences[0].tokens for response in alone]


def test_each_request_has_its_own_options_and_errors(sampler, prompts):
    options = [
        {"max_tokens": 3, "num_samples": 2},
        {"temprature": 1.0},
        SamplingParams(temperature=0.7, max_tokens=6, seed=4),
        {"top_p": 0.5},
        {"max_tokens": 2, "stop": ["a"], "top_logprobs": 99},
        {"structured_output": {"regex": "("}, "logprobs": False},
        SamplingParams(temperature=0.7, max_tokens=6, seed=4),
        {"seed": -1},
        {"seed": 2**63},
    ]
    responses = list(sampler.sample([prompts[0]] * 9, options))
    assert [len(response.sequences) for response in responses] == [2, 0, 1, 0, 0, 0, 1, 0, 0]
    assert all(len(sequence.tokens) <= 3 for sequence in responses[0].sequences)
    assert responses[2].sequences[0].tokens == responses[6].sequences[0].tokens  # the same seed, taken as it is
    assert responses[2].sequences[0].new_input_feature.temperature == 0.7
    for index, message in {
        1: r"inputs\[1\]: unknown sampling options \['temprature'\]",
        3: r"inputs\[3\]: with top_p .*truncated distribution",
        4: r"top_logprobs is 99, and engine_args\['max_logprobs'\] allows 20",
        5: r"inputs\[5\]: ",
        7: r"inputs\[7\]: seed is -1; it must be from 0",
        8: r"inputs\[8\]: seed is 9223372036854775808",
    }.items():
        with pytest.raises(SamplingOptionError, match=message):
            responses[index].raise_for_error()
    with pytest.raises(SamplingOptionError, match="there are 2 inputs but sampling_params for 9"):
        sampler.sample(prompts[:2], options)


def test_an_unknown_adapter_of_one_request_leaves_the_others(sampler, prompts):
    good, bad = sampler.sample(prompts[:2], GREEDY, adapter_name=["", "maths"])
    assert len(good.sequences) == 1
    with pytest.raises(AdapterNotLoaded, match=r"inputs\[1\]: no adapter 'maths'"):
        bad.raise_for_error()


def test_top_logprobs_are_the_most_likely_tokens_of_the_distribution_that_is_sampled_from(sampler, models, prompts):
    model = models["old"][1]
    (response,) = sampler.sample([prompts[0]], {"temperature": 0.5, "max_tokens": 5, "top_logprobs": 3})
    sequence = response.sequences[0]
    ids = torch.tensor([[*prompts[0], *sequence.tokens]])
    with torch.no_grad():
        expected = (model(ids).logits[0, len(prompts[0]) - 1 : -1].double() / 0.5).log_softmax(-1).topk(3)
    assert [list(place) for place in sequence.top_logprobs] == expected.indices.tolist()
    np.testing.assert_allclose([list(place.values()) for place in sequence.top_logprobs], expected.values, atol=2e-5)
    for token, logprob, place in zip(sequence.tokens, sequence.logprobs, sequence.top_logprobs, strict=True):
        assert place.get(token, logprob) == logprob


def test_prompt_logprobs_are_given_at_temperature_1_and_refused_under_a_wrong_name(kit, sampler, models, prompts):
    plain = {"max_tokens": 3, "prompt_logprobs": True}
    first, greedy, hot = sampler.sample([prompts[0]] * 3, [plain, {**plain, "temperature": 0}, {**plain, "temperature": 0.5}])
    expected = kit.hf_logprobs(models["old"][1], prompts[0])
    for response in (first, greedy):
        np.testing.assert_allclose(response.prompt_logprobs, expected, atol=2e-5)
    with pytest.raises(SamplingOptionError, match=r"prompt_logprobs at temperature 0\.5"):
        hot.raise_for_error()
    assert sampler.sample([prompts[0]], {"max_tokens": 3})[0].prompt_logprobs == []


def test_min_tokens_logit_bias_and_structure_are_honoured(sampler, tokenizer, models, prompts):
    without = {"temperature": 0, "logprobs": False}
    free = sampler.sample([prompts[0]], {**without, "max_tokens": 8})[0].sequences[0].tokens
    end = {"stop_token_ids": [free[1]], "max_tokens": 8}
    short, longer = sampler.sample([prompts[0]] * 2, [{**without, **end}, {**without, **end, "min_tokens": 5}])
    assert len(short.sequences[0].tokens) == 2
    assert len(longer.sequences[0].tokens) >= 5
    (biased,) = sampler.sample([prompts[0]], {**without, "max_tokens": 3, "logit_bias": {9: 100.0}})
    assert biased.sequences[0].tokens == [9] * 3
    chosen = sampler.sample(prompts[:4], {"logprobs": False, "max_tokens": 20, "structured_output": {"choice": ["quick fox", "1 2"]}})
    assert {response.sequences[0].decoded for response in chosen} <= {"quick fox", "1 2"}
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["n"],
        "additionalProperties": False,
    }
    written = sampler.sample([prompts[0]], {"logprobs": False, "max_tokens": 40, "structured_output": {"json": schema}})[0].sequences[0]
    if written.stop_reason == "stop":
        assert 0 <= json.loads(written.decoded)["n"] <= 99
    for options in ({"min_tokens": 2}, {"logit_bias": {3: 1.0}}, {"structured_output": {"choice": ["1"]}}):
        with pytest.raises(SamplingOptionError, match=f"with {next(iter(options))} .*truncated distribution"):
            sampler.sample([prompts[0]], options)


def test_messages_are_a_prompt(sampler):
    messages = [{"role": "user", "content": "What is 1 + 2 ?"}]
    plain, with_data = sampler.sample([messages, {"messages": messages, "user_data": {"answer": "3"}}], GREEDY)
    assert plain.sequences[0].tokens == with_data.sequences[0].tokens
    assert with_data.user_data == {"answer": "3"}


def test_a_turn_that_cannot_be_continued_is_an_error_of_its_own(sampler, prompts):
    earlier = InputFeature(input_ids=[5, 6], logprobs=[0.0, -1.0], temperature=0.5)
    good, bad = sampler.sample([prompts[0], earlier], {"max_tokens": 2})
    assert isinstance(good, SampleResponse)
    assert good.error is None
    with pytest.raises(PromptError, match=r"inputs\[1\] was sampled at temperature 0\.5"):
        bad.raise_for_error()


def test_several_turns_keep_their_logprobs_and_versions(kit, sampler, models, prompts):
    kit.load(sampler, models["old"][1], version=3)
    first = sampler.sample([prompts[0]], {"max_tokens": 3})[0].sequences[0].new_input_feature
    kit.load(sampler, models["new"][1], version=4)
    second = sampler.sample([first], {"max_tokens": 2})[0].sequences[0].new_input_feature
    size = len(prompts[0])
    new = len(second) - len(first)
    assert second.weight_versions.tolist() == [-1] * size + [3] * (len(first) - size) + [4] * new
    assert second.weight_version == 3
    old_part, new_part = (kit.hf_logprobs(models[name][1], second.input_ids) for name in ("old", "new"))
    np.testing.assert_allclose(second.logprobs[size : len(first)], old_part[size : len(first)], atol=2e-5)
    np.testing.assert_allclose(second.logprobs[len(first) :], new_part[len(first) :], atol=2e-5)


def test_weights_with_nan_are_an_error_of_each_request(kit, sampler, models, prompts):
    tensors = dict(kit.tensors_of(models["old"][1]))
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * float("nan")
    sampler.load_weights(tensors.items(), 0)
    responses = list(sampler.sample(prompts[:2], {"max_tokens": 2, "num_samples": 2}))
    for response in responses:
        with pytest.raises(EngineFailed, match="not a finite number"):
            response.raise_for_error()
    with pytest.raises(EngineFailed, match="not a finite number"):
        sampler.score(prompts[:2]).get()
