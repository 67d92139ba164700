"""The wire types: strict about requests, tolerant about answers, and records that can be replaced as the originals can."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from twinkle_client import types


class Array:
    """What numpy and torch have in common."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tolist(self) -> Any:
        return self.value


def test_a_batch_takes_features_packed_rows_and_conversations_by_their_fields() -> None:
    body = types.ForwardBackward.model_validate(
        {
            "inputs": [
                {"input_ids": [1, 2]},
                {"features": [{"input_ids": [3]}, {"input_ids": [4, 5]}]},
                {"messages": [{"role": "user", "content": "hello"}]},
            ],
            "adapter_name": "mine",
        }
    )
    assert [type(row).__name__ for row in body.inputs] == ["InputFeature", "PackedFeature", "Trajectory"]
    assert types.ForwardBackward.model_validate_json(body.model_dump_json(exclude_none=True)) == body


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ([{"input_ids": [1], "lables": [1]}], "lables"),
        ([{"input_ids": [1, 2], "labels": [1]}], "labels has 1 entries, input_ids has 2"),
        ([{"input_ids": [1, 2], "position_ids": [[0, 1], [0]]}], "position_ids has 1 entries"),
        ([{"input_ids": [-1]}], "greater than or equal to 0"),
        ([{"input_ids": [1.5]}], "integer"),
        ([{"input_ids": ["1"]}], "integer"),
        ([{"input_ids": []}], "at least 1"),
        ([{"input_ids": [1], "logprobs": [float("nan")]}], "finite"),
        ([{"messages": []}], "at least 1"),
        ([], "at least 1"),
    ],
)
def test_what_is_wrong_in_a_batch_is_named_and_nothing_else_is(inputs: list[Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told) as caught:
        types.ForwardBackward.model_validate({"inputs": inputs})
    assert caught.value.error_count() == 1 or "position_ids" in told, str(caught.value)


@pytest.mark.parametrize("field", ["lr", "eps", "momentum"])
def test_numbers_of_requests_are_finite(field: str) -> None:
    with pytest.raises(ValidationError, match="finite"):
        types.SetOptimizer.model_validate({field: float("nan")})


def test_options_of_a_named_loss_travel_beside_its_name_and_elsewhere_unknown_fields_are_errors() -> None:
    body = types.SetLoss.model_validate({"loss": "grpo", "epsilon": 0.2, "adapter_name": "a"})
    assert body.options == {"epsilon": 0.2}
    with pytest.raises(ValidationError, match="learning_rate"):
        types.SetOptimizer.model_validate({"learning_rate": 0.1})


def test_records_are_replaced_and_checked_and_take_arrays() -> None:
    arrays: dict[str, Any] = {"input_ids": Array([1, 2]), "logprobs": Array([0.0, -1.0])}
    feature = types.InputFeature(**arrays)
    assert dataclasses.replace(feature, advantages=2.0).advantages == 2.0
    assert feature.input_ids == [1, 2]
    with pytest.raises(ValidationError, match="advantages has 1 entries"):
        dataclasses.replace(feature, advantages=[1.0])


def test_numbers_that_are_no_json_travel_as_texts() -> None:
    adapter = TypeAdapter(types.ModelOutput)
    text = adapter.dump_json(types.ModelOutput(loss=float("nan"), metrics={"x": float("inf")}))
    assert json.loads(text)["loss"] == "NaN"
    back = adapter.validate_json(text)
    assert back.loss != back.loss
    assert back.metrics == {"x": float("inf")}


def test_answers_ignore_what_a_newer_server_adds() -> None:
    capacity = types.CapacityInfo.model_validate({"max_loras": 2, "used_loras": 1, "free_loras": 1, "parked_loras": 5})
    assert capacity.free_loras == 1
    assert types.ServerCapabilities.model_validate({"supported_models": ["a/b", {"model_name": "c"}]}).supported_models[0].model_name == "a/b"


def test_tool_calls_come_in_either_form() -> None:
    plain: Any = {"name": "f", "arguments": {"x": 1}, "id": "1"}
    openai: Any = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    null: Any = None  # as OpenAI's API answers beside calls
    ours = types.Message(role="assistant", tool_calls=(plain,))
    assert types.Message(role="assistant", content=null, tool_calls=(openai,)) == ours


@pytest.mark.parametrize(
    "path",
    [
        "twinkle://run/weights/..",
        "twinkle://../weights/a",
        "twinkle://run/weights/a/b",
        "twinkle://run/optimizer/a",
        "twinkle://run/weights/",
        "twinkle://run/weights/a\n",
        "twinkle://run/weights/%2e%2e",
        "/etc/passwd",
        "twinkle://ru\u0661n/weights/a",
        "twinkle://run/weights/" + "a" * 129,
    ],
)
def test_a_path_that_means_anything_else_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="is no checkpoint"):
        types.parse_twinkle_path(path)


def test_a_path_has_parts() -> None:
    parts = types.parse_twinkle_path("twinkle://run-1/sampler_weights/step.10")
    assert (parts.run_id, parts.checkpoint_id, parts.name, str(parts)) == (
        "run-1", "sampler_weights/step.10", "step.10", "twinkle://run-1/sampler_weights/step.10",
    )  # fmt: skip


def test_a_sample_that_was_not_served_raises_its_error() -> None:
    error: Any = ValueError("too long")
    response = types.SampleResponse(sequences=[], prompt_token_ids=[], error=error)
    with pytest.raises(Exception, match="ValueError: too long"):
        response.raise_for_error()


def test_every_type_has_a_json_schema_and_a_docstring() -> None:
    assert len(types.__all__) == len(set(types.__all__)) > 50
    for name in types.__all__:
        value = getattr(types, name)
        if isinstance(value, type) and name != "Result":
            assert TypeAdapter(value).json_schema()
            assert value.__doc__
