"""Handles of models, samplers, datasets and loaders over HTTP: a local script's calls, with the records that it has."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import pytest

import twinkle_client
from twinkle_client import (
    AsyncModel,
    AsyncSampler,
    AsyncTwinkleClient,
    CheckpointEngineManager,
    DataLoader,
    Dataset,
    InputFeature,
    LoraConfig,
    MegatronModel,
    SamplingParams,
    Template,
    Trajectory,
    TwinkleClient,
)
from twinkle_client.model import TransformersModel
from twinkle_client.sampler import vLLMSampler


class Array:
    """What numpy and torch have in common."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tolist(self) -> Any:
        return self.value


@dataclasses.dataclass
class LocalFeature:
    """A record of the local library: other fields stay at their None."""

    input_ids: Any
    logprobs: Any = None
    user_data: Any = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class LocalMessage:
    role: str
    content: str


@dataclasses.dataclass
class LocalTrajectory:
    messages: Any


class PeftConfig:
    def to_dict(self) -> dict[str, Any]:
        return {"r": 4, "target_modules": {"v_proj", "q_proj"}, "peft_type": "LORA", "revision": None}


@pytest.fixture
def model(server: Any) -> Any:
    TwinkleClient()
    return TransformersModel("org/tiny")


def test_a_training_loop(server: Any, model: Any) -> None:
    added = model.add_adapter_to_model("mine", LoraConfig(r=4), save_dir="runs/mine", user_metadata={"why": None})
    assert added.training_run_id == "run-1"
    model.set_loss("grpo", adapter_name="mine", epsilon=0.2)
    model.set_optimizer("adam", lr=1e-3, betas=(0.9, 0.95), adapter_name="mine")
    model.set_lr_scheduler("constant", warmup_steps=10, adapter_name="mine")
    batch = [
        InputFeature(input_ids=[1, 2]),
        {"input_ids": [3]},
        LocalFeature(Array([4, 5]), Array([0.0, -1.0]), {"answer": None}),
        LocalTrajectory([LocalMessage("user", "hello")]),
    ]
    output = model.forward_backward(batch, adapter_name="mine")
    assert (output.loss, output.logprobs, output.metrics) == (0.5, [[0.0, -1.0]], {"x": 1.0})
    assert math.isnan(model.clip_grad_and_step(1.0, adapter_name="mine"))
    assert model.calculate_metric(adapter_name="mine") == {"loss": 0.5, "grad_norm": math.inf}
    assert model.save("first", adapter_name="mine", user_state={"step": 3}).twinkle_path == "twinkle://run-1/weights/first"
    assert model.resume_from_checkpoint("first", adapter_name="mine") == {"step": 3}
    assert model.get_state_dict(adapter_name="mine")["w"].shape == [1]
    service = server.service
    assert service.of("add_adapter_to_model")[0]["config"]["r"] == 4
    assert service.of("add_adapter_to_model")[0]["user_metadata"] == {"why": None}
    assert service.of("set_loss") == [{"loss": "grpo", "epsilon": 0.2, "adapter_name": "mine"}]
    assert service.of("set_optimizer")[0]["betas"] == [0.9, 0.95]
    rows = service.of("forward_backward")[0]["inputs"]
    assert rows[2]["logprobs"] == [0.0, -1.0]
    assert rows[2]["user_data"] == {"answer": None}
    assert rows[3]["messages"][0]["content"] == "hello"
    assert all(body["adapter_name"] == "mine" for name, body in service.done if name != "create")


def test_the_name_travels_encoded_and_another_model_is_not_found(server: Any, model: Any) -> None:
    assert server.service.requests[-1][1] == "/api/v1/model/org/tiny/twinkle/create"
    with pytest.raises(twinkle_client.NotFound, match="no model 'org/other'"):
        MegatronModel("org/other")


def test_peft_configurations_are_taken(server: Any, model: Any) -> None:
    model.add_adapter_to_model("mine", PeftConfig())
    model.add_adapter_to_model("yours", {"r": 2})
    first, second = server.service.of("add_adapter_to_model")
    assert first["config"] == {"r": 4, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA", "revision": None}
    assert second["config"] == {"r": 2}


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda model: model.forward_backward([{"input_ids": [1], "lables": [1]}]), "lables"),
        (lambda model: model.forward_backward({"input_ids": [1]}), "must be a list of rows"),
        (lambda model: model.forward_backward([]), "at least 1"),
        (lambda model: model.set_optimizer("adam", learning_rate=1.0), "learning_rate"),
        (lambda model: model.set_optimizer("adam", lr=float("nan")), "finite"),
        (lambda model: model.add_adapter_to_model("a", 3), "a LoRA configuration"),
        (lambda model: model.save("x", user_state={"step": object()}), "no JSON"),
    ],
)
def test_what_is_wrong_in_a_call_is_told_before_anything_is_sent(server: Any, model: Any, call: Any, told: str) -> None:
    before = len(server.service.requests)
    with pytest.raises(twinkle_client.InvalidRequest, match=told):
        call(model)
    assert len(server.service.requests) == before


def test_a_verb_whose_answer_was_lost_is_not_done_twice(server: Any, model: Any) -> None:
    server.service.faults["clip_grad_and_step"] = ["break"]
    model.clip_grad_and_step(adapter_name="mine")
    sent = [headers["idempotency-key"] for _, path, headers in server.service.requests if path.endswith("clip_grad_and_step")]
    assert len(sent) == 2
    assert len(set(sent)) == 1
    assert len(server.service.of("clip_grad_and_step")) == 1
    model.clip_grad_and_step(adapter_name="mine")
    assert len(server.service.of("clip_grad_and_step")) == 2


def test_long_work_is_waited_for(server: Any, model: Any) -> None:
    server.service.as_futures = True
    assert model.forward_backward([InputFeature(input_ids=[1])]).loss == 0.5
    assert model.save("x").twinkle_path == "twinkle://run-1/weights/x"
    assert [path for _, path, _ in server.service.requests].count("/api/v1/twinkle/futures/future-1") == 2
    with pytest.raises(twinkle_client.WorkLost, match="the server stopped"):
        model.step()
    with pytest.raises(twinkle_client.Conflict, match="calculate_loss first"):
        model.backward()


def test_sampling_and_its_stream(server: Any, model: Any) -> None:
    sampler = vLLMSampler("org/tiny")
    params = SamplingParams(max_tokens=4, stop=("x",))
    responses = sampler.sample([InputFeature(input_ids=[5]), "text", [1, 2], [{"role": "user", "content": "hi"}]], params)
    assert [response.raise_for_error().sequences[0].new_input_feature.input_ids for response in responses] == [[5, 1]] * 4
    body = server.service.of("sample")[0]
    assert [type(prompt).__name__ for prompt in body["inputs"]] == ["dict", "str", "list", "dict"]
    assert body["sampling_params"]["max_tokens"] == 4
    chunks = list(sampler.sample_stream(["text"]))
    assert chunks[0].text == "a"
    assert chunks[-1].response is not None
    with pytest.raises(twinkle_client.InvalidRequest, match="temperature"):
        sampler.sample(["text"], {"temperature": -1})


def test_a_stream_that_is_refused_raises_its_error_and_is_not_repeated(server: Any, model: Any) -> None:
    sampler = vLLMSampler("org/tiny")
    server.service.faults["sample_stream"] = [(503, "no room", {})]
    with pytest.raises(twinkle_client.ServerFailed, match="no room"):
        list(sampler.sample_stream(["text"]))
    server.service.faults["sample_stream"] = ["break"]
    with pytest.raises((twinkle_client.Unreachable, ValueError)):
        list(sampler.sample_stream(["text"]))
    assert [path for _, path, _ in server.service.requests].count("/api/v1/sampler/org/tiny/twinkle/sample_stream") == 2


def test_datasets_and_loaders(server: Any, model: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": str(number)} for number in range(5)]
    rows = [Trajectory(messages=(message,)) for message in messages]
    dataset = Dataset(rows)
    assert len(dataset) == 5
    assert dataset[1] == rows[1]
    assert dataset[-1] == rows[-1]
    assert list(dataset) == rows
    with pytest.raises(IndexError):
        dataset[5]
    loader = DataLoader(dataset, batch_size=2, shuffle=False)
    assert list(loader) == [rows[0:2], rows[2:4], rows[4:5]]
    assert len(loader) == 3
    with pytest.raises(TypeError, match="no end"):
        len(DataLoader(dataset, batch_size=2, num_epochs=None))
    created = server.service.of("create")[-1]
    assert created["dataset"] == {"processor_id": dataset.processor_id}
    model.set_template(Template("org/tiny", max_length=8), adapter_name="mine", truncation="left")
    assert server.service.of("set_template")[0]["template"]["processor_id"].startswith("object-")


def test_the_sampler_is_kept_current(server: Any, model: Any) -> None:
    from twinkle_client import types

    weights = CheckpointEngineManager(model=model, sampler=vLLMSampler("org/tiny"))
    path = weights.sync_weights(adapter_name="mine")
    assert server.service.of("add_adapter_to_sampler") == [{"adapter_name": "mine", "path": path}]
    server.service.checkpoints = [
        types.Checkpoint.model_validate(
            {"checkpoint_id": "c", "checkpoint_type": "sampler_weights", "time": 0, "size_bytes": 1, "twinkle_path": path}
        )
    ]
    weights.sync_weights(adapter_name="mine")
    assert not server.service.checkpoints
    weights.sync_weights(adapter_name="mine")  # the copy before is gone already


def test_the_asynchronous_handles(server: Any) -> None:
    async def use() -> None:
        async with AsyncTwinkleClient() as client:
            model, sampler = AsyncModel("org/tiny", client=client), AsyncSampler("org/tiny", client=client)
            await model.create()
            await sampler.create()
            await model.add_adapter_to_model("mine", LoraConfig())
            outputs = await asyncio.gather(*(model.forward_backward([{"input_ids": [1]}], adapter_name="mine") for _ in range(3)))
            assert [output.loss for output in outputs] == [0.5] * 3
            server.service.as_futures = True
            assert (await model.forward_backward([{"input_ids": [1]}])).loss == 0.5
            assert len(await sampler.sample(["text"])) == 1
            assert len([chunk async for chunk in sampler.sample_stream(["text"])]) == 2
            with pytest.raises(twinkle_client.NotFound):
                await AsyncModel("org/other", client=client).create()

    asyncio.run(asyncio.wait_for(use(), 30))
