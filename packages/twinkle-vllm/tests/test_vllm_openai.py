"""The OpenAI-compatible endpoint, with the official client, over a pool with a real engine."""

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import openai
import pytest

from twinkle_data import SamplingParams, Template, Trajectory
from twinkle_vllm import OpenAIServer, SamplerPool

pytestmark = pytest.mark.timeout(300)  # the first test starts the engine


@pytest.fixture(scope="module")
def server(engine, tokenizer):
    with SamplerPool([engine]) as pool, OpenAIServer(pool, Template(tokenizer), model_name="tiny", api_key="secret") as running:
        yield running


@pytest.fixture
def client(server, sampler):
    with openai.OpenAI(base_url=server.base_url, api_key="secret", max_retries=0, timeout=60) as made:
        yield made


def test_models_and_keys(server, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    with openai.OpenAI(base_url=server.base_url, api_key="wrong", max_retries=0) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_chat_gives_the_tokens_and_logprobs_that_the_sampler_would(kit, client, sampler, models, tokenizer):
    messages: Any = [{"role": "user", "content": "What is 1 + 2 ?"}]
    made = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2)
    choice, extra = made.choices[0], made.choices[0].model_extra
    expected = sampler.sample([Trajectory(messages=messages)], {"temperature": 0, "max_tokens": 6, "top_logprobs": 2})[0]
    sequence = expected.sequences[0]
    assert made.model_extra["prompt_token_ids"] == expected.prompt_token_ids
    assert extra["token_ids"] == sequence.tokens
    assert extra["weight_versions"] == sequence.weight_versions
    assert choice.message.content == sequence.decoded
    assert choice.finish_reason == sequence.stop_reason
    np.testing.assert_allclose([entry.logprob for entry in choice.logprobs.content], sequence.logprobs, atol=1e-6)
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * len(sequence.tokens)
    ids = [*expected.prompt_token_ids, *sequence.tokens]
    np.testing.assert_allclose(sequence.logprobs, kit.hf_logprobs(models["old"][1], ids)[len(expected.prompt_token_ids) :], atol=2e-5)
    assert made.usage.completion_tokens == len(sequence.tokens)


def test_completions_take_texts_tokens_and_several_samples(client, sampler, prompts, tokenizer):
    made = client.completions.create(model="tiny", prompt=[prompts[0], prompts[1]], temperature=1.0, max_tokens=4, n=2, seed=5, logprobs=1)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert [choice.model_extra["prompt_token_ids"] for choice in made.choices] == [prompts[0]] * 2 + [prompts[1]] * 2
    again = client.completions.create(model="tiny", prompt=[prompts[0], prompts[1]], temperature=1.0, max_tokens=4, n=2, seed=5, logprobs=1)
    assert [c.model_extra["token_ids"] for c in again.choices] == [c.model_extra["token_ids"] for c in made.choices]
    assert len(made.choices[0].logprobs.token_logprobs) == len(made.choices[0].model_extra["token_ids"])
    text = client.completions.create(model="tiny", prompt="the quick", temperature=0, max_tokens=3).choices[0]
    assert text.text == tokenizer.decode(text.model_extra["token_ids"], skip_special_tokens=True)


def test_a_stop_text_ends_the_text_and_is_not_in_it(client, prompts, tokenizer):
    free = client.completions.create(model="tiny", prompt=prompts[2], temperature=0, max_tokens=12).choices[0].text
    middle = free[len(free) // 2 : len(free) // 2 + 2]
    for stream in (False, True):
        made = client.completions.create(model="tiny", prompt=prompts[2], temperature=0, max_tokens=12, stop=[middle], stream=stream)
        text = "".join(part.choices[0].text for part in made) if stream else made.choices[0].text
        assert text == free[: free.index(middle)]


def test_a_stream_comes_in_parts_that_make_the_whole(client, sampler, prompts):
    options: Any = {"model": "tiny", "prompt": prompts[0], "temperature": 0, "max_tokens": 40}
    whole = client.completions.create(**options).choices[0]
    step = sampler._engine.llm_engine.step

    def slow():
        import time

        time.sleep(0.03)
        return step()

    sampler._engine.llm_engine.step = slow
    try:
        parts = list(client.completions.create(**options, stream=True))
    finally:
        del sampler._engine.llm_engine.step
    assert len(parts) > 3
    assert "".join(part.choices[0].text for part in parts) == whole.text
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].choices[0].model_extra["token_ids"] == whole.model_extra["token_ids"]
    messages: Any = [{"role": "user", "content": "What ?"}]
    with_usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *chat, last = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=5, **with_usage)
    assert "".join(part.choices[0].delta.content or "" for part in chat) != ""
    assert (last.choices, last.usage.completion_tokens) == ([], len(chat[-1].choices[0].model_extra["token_ids"]))


def test_what_is_wrong_is_an_error_of_the_right_kind_that_names_it(client, server):
    messages: Any = [{"role": "user", "content": "What ?"}]
    chat = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        chat(model="gpt", messages=messages)
    with pytest.raises(openai.BadRequestError, match="temprature: Extra inputs"):
        chat(model="tiny", messages=messages, extra_body={"temprature": 1})
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        chat(model="tiny", messages=messages, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="max_model_len is 64"):
        client.completions.create(model="tiny", prompt=[5] * 64)
    with pytest.raises(openai.BadRequestError, match="max_model_len is 64"):
        client.completions.create(model="tiny", prompt=[5] * 64, stream=True)
    with pytest.raises(openai.BadRequestError, match="truncated distribution"):
        chat(model="tiny", messages=messages, top_p=0.5, logprobs=True)
    with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
        chat(model="tiny", messages=messages, frequency_penalty=0.5)
    with pytest.raises(openai.BadRequestError, match="prompt is empty"):
        client.completions.create(model="tiny", prompt=[])
    with pytest.raises(openai.BadRequestError, match="seed is -1"):
        chat(model="tiny", messages=messages, seed=-1)
    with pytest.raises(openai.BadRequestError, match="token id"):
        client.completions.create(model="tiny", prompt=[2**70])
    request = urllib.request.Request(server.base_url + "/completions", b"not json", {"Authorization": "Bearer secret"})
    with pytest.raises(urllib.error.HTTPError) as failed:
        urllib.request.urlopen(request)
    assert failed.value.code == 400
    assert json.loads(failed.value.read())["error"]["type"] == "invalid_request_error"


def test_structured_output_by_response_format(client):
    messages: Any = [{"role": "user", "content": "What ?"}]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    choice = client.chat.completions.create(model="tiny", messages=messages, max_tokens=30, response_format=form).choices[0]
    assert choice.message.content.startswith("{")


def test_a_client_that_goes_away_leaves_no_request(sampler, prompts):
    async def take_one(pool):
        async for tokens, response in pool.stream(prompts[0], SamplingParams(max_tokens=40, stop_token_ids=[], logprobs=False)):
            return tokens, response

    with SamplerPool([sampler]) as pool:
        asyncio.run(take_one(pool))
        assert [status.state for status in pool.status()] == ["serving"]
    assert sampler._loop.unfinished == []
    assert sampler.collect() == []
