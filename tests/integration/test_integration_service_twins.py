"""The records on the service's wire beside the originals: the same fields and defaults, and the same record after the journey."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from pydantic import TypeAdapter

import twinkle_data
import twinkle_train
from twinkle_client import Model, types
from twinkle_client._convert import plain

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    "name",
    [
        *("ToolCall", "Message", "Trajectory", "InputFeature", "PackedFeature"),
        *("SamplingParams", "SampledSequence", "SampleResponse", "ModelOutput", "LoraConfig"),
    ],
)
def test_the_twins_on_the_wire_have_the_fields_and_defaults_of_the_originals(name: str) -> None:
    original = getattr(twinkle_train if name == "LoraConfig" else twinkle_data, name)
    twin = getattr(types, name)

    def described(record: Any) -> dict[str, Any]:
        return {
            each.name: each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default
            for each in dataclasses.fields(record)
        }

    assert described(twin) == described(original)
    assert twin.__dataclass_params__.frozen is original.__dataclass_params__.frozen is True


# Of a server: what a run's end, its checkpoints and the server's configuration do instead, and what would not fit into an answer.
NOT_SERVED = {"remove_adapter", "save_checkpoint", "wait_for_checkpoint", "export_weights", "export_gradients"}
OTHERWISE = {"save": {"path", "merge"}, "resume_from_checkpoint": {"saved_as"}, "forward_only": {"logits"}}


def test_the_clients_model_has_the_verbs_of_the_contract_with_their_arguments() -> None:
    contract = {name: value for name, value in vars(twinkle_train.TrainModel).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert set(contract) > NOT_SERVED
    for name in set(contract) - NOT_SERVED:
        ours, theirs = (dict(inspect.signature(each).parameters) for each in (contract[name], getattr(Model, name)))
        takes_more = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in theirs.values())
        for argument in set(ours) - OTHERWISE.get(name, set()):
            if argument in theirs and theirs[argument].kind is not inspect.Parameter.VAR_KEYWORD:
                assert theirs[argument].kind == ours[argument].kind, f"{name}: {argument}"
                assert theirs[argument].default == ours[argument].default or ours[argument].default in (None, inspect.Parameter.empty), name
            else:
                assert takes_more, f"{name}: {argument}"


@pytest.mark.parametrize(
    "original",
    [
        twinkle_data.InputFeature(input_ids=[1, 2], labels=[-100, 2], logprobs=[0.0, -0.5], weight_version=3, user_data={"a": None}),
        twinkle_data.InputFeature(input_ids=[1, 2], advantages=[0.0, 1.0], completion_mask=[False, True], temperature=0.5),
        twinkle_data.PackedFeature(features=[twinkle_data.InputFeature(input_ids=[1]), twinkle_data.InputFeature(input_ids=[2, 3])]),
        twinkle_data.Trajectory(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "loss": False}], tools=()),
        twinkle_data.SamplingParams(max_tokens=3, stop="x", logit_bias={1: 0.5}, structured_output={"regex": "a+"}),
        twinkle_train.LoraConfig(r=4, target_modules=("v_proj", "q_proj")),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_record_that_travels_is_the_same_afterwards(original: Any) -> None:
    adapter = TypeAdapter(getattr(types, type(original).__name__))
    there = adapter.validate_json(adapter.dump_json(adapter.validate_python(plain(original)), exclude_none=True))
    assert _local(there, original) == original


def _local(twin: Any, original: Any) -> Any:
    """The local record with a twin's fields."""
    fields = {each.name: getattr(twin, each.name) for each in dataclasses.fields(twin)}
    if "features" in fields:
        fields["features"] = [_local(each, original.features[0]) for each in fields["features"]]
    if "messages" in fields:
        fields["messages"] = [_local(each, original.messages[0]) for each in fields["messages"]]
    return type(original)(**fields)
