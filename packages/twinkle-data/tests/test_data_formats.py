"""The records: conversion, equality, and what each refuses."""

import pickle
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from twinkle_data import (
    FormatError,
    InputFeature,
    Message,
    ModelOutput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    Trajectory,
    append_context,
    append_sample,
)


def test_arrays_get_their_documented_dtypes():
    feature = InputFeature(
        input_ids=[1, 2],
        labels=[-100, 2],
        position_ids=[0, 1],
        completion_mask=[0, 1],
        loss_weights=[0, 2],
        logprobs=[0, -1],
        ref_logprobs=[0, -2],
        advantages=[0, 1],
    )
    dtypes = {name: getattr(feature, name).dtype for name in ("input_ids", "labels", "completion_mask", "logprobs", "advantages")}
    assert dtypes == {"input_ids": "int64", "labels": "int64", "completion_mask": "bool", "logprobs": "float32", "advantages": "float32"}
    assert len(feature) == 2
    assert isinstance(replace(feature, advantages=np.float32(2)).advantages, float)


def test_features_are_equal_when_all_arrays_are_and_survive_pickling():
    feature = InputFeature(input_ids=[1, 2], logprobs=[0, -1], user_data={"a": 1})
    assert pickle.loads(pickle.dumps(feature)) == feature
    assert feature != replace(feature, logprobs=[0, -2])
    assert feature != replace(feature, logprobs=None)
    assert feature != "a feature"


def test_records_are_frozen_and_keyword_only():
    feature = InputFeature(input_ids=[1])
    with pytest.raises(FrozenInstanceError):
        feature.temperature = 2.0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        Message("user", "hello")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [1.5]}, "must hold integers"),
        ({"input_ids": [1, -1]}, r"input_ids\[1\] is negative"),
        ({"labels": [2, -100]}, r"labels\[0\] is 2, input_ids\[0\] is 1: .* not shifted here"),
        ({"labels": [-100]}, r"labels has shape \(1,\), input_ids has \(2,\)"),
        ({"position_ids": [-1, 0]}, "negative position"),
        ({"completion_mask": [0, 2]}, "must hold booleans"),
        ({"loss_weights": [1, float("nan")]}, "not finite"),
        ({"logprobs": [-1, -1]}, r"logprobs\[0\] is -1.0, but nothing precedes token 0"),
        ({"logprobs": [0, float("-inf")]}, "not finite"),
        ({"advantages": ["x", "y"]}, "must hold numbers"),
        ({"advantages": [1, 2, 3]}, "advantages has shape"),
        ({"temperature": 0}, "temperature must be a finite number above 0"),
        ({"user_data": None}, "user_data must be a dict"),
    ],
)
def test_a_feature_refuses_fields_that_contradict_each_other(fields, message):
    with pytest.raises(FormatError, match=message):
        InputFeature(**{"input_ids": [1, 2], **fields})


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "needs at least one"),
        ("hello", "must be a list of Message, not str"),
        ([{"role": "user"}], r"messages\[0\] has no 'content'"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": None}], r"messages\[1\]: Message.content must be a string"),
        ([{"role": "user", "content": "a", "colour": "b"}], r"messages\[0\] has unknown fields \['colour'\]"),
        ([{"role": "user", "content": "a", "loss": True}], "is for assistant turns"),
        ([3], r"messages\[0\] must be a Message or a mapping, not int"),
    ],
)
def test_a_trajectory_names_the_message_it_refuses(messages, message):
    with pytest.raises(FormatError, match=message):
        Trajectory(messages=messages)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_k", 0),
        ("min_p", 2),
        ("stop", [""]),
        ("num_samples", 0),
        ("num_samples", 1.5),
        ("max_tokens", "3"),
        ("temperature", "1"),
        ("top_k", 2.0),
        ("seed", 0.5),
        ("logprobs", 2),
        ("top_logprobs", -1),
        ("min_tokens", -1),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: float("inf")}),
        ("structured_output", {"json": {}, "regex": "a"}),
        ("structured_output", {"xml": ""}),
    ],
)
def test_sampling_params_refuse_what_is_out_of_range(field, value):
    with pytest.raises(FormatError, match=f"SamplingParams.{field} is"):
        SamplingParams(**{field: value})


def test_one_stop_text_stays_one_text():
    assert SamplingParams(stop="###", stop_token_ids=[7]) == SamplingParams(stop=("###",), stop_token_ids=(7,))


def test_a_sampled_sequence_has_as_many_logprobs_as_tokens_or_none():
    feature = InputFeature(input_ids=[1, 2])
    fields = {"tokens": [2], "stop_reason": "stop", "decoded": "b", "new_input_feature": feature}
    response = SampleResponse(sequences=[SampledSequence(logprobs=[], **fields)], prompt_token_ids=[1])
    assert response.sequences[0].new_input_feature is feature
    with pytest.raises(FormatError, match="1 tokens but 2 logprobs"):
        SampledSequence(logprobs=[-1, -1], **fields)
    with pytest.raises(FormatError, match="must be 'stop', 'length' or 'abort'"):
        SampledSequence(logprobs=[], **{**fields, "stop_reason": "eos"})


def test_a_response_is_sequences_or_an_error():
    fine = SampleResponse(sequences=[], prompt_token_ids=[1])
    assert fine.raise_for_error() is fine
    failed = SampleResponse(sequences=[], prompt_token_ids=[1], error=LookupError("no such adapter"))
    with pytest.raises(LookupError, match="no such adapter"):
        failed.raise_for_error()
    sequence = SampledSequence(tokens=[2], logprobs=[], stop_reason="abort", decoded="", new_input_feature=InputFeature(input_ids=[1, 2]))
    with pytest.raises(FormatError, match="1 sequences and an error"):
        SampleResponse(sequences=[sequence], prompt_token_ids=[1], error=LookupError("no"))
    with pytest.raises(FormatError, match="1 tokens but 2 weight_versions"):
        replace(sequence, weight_versions=[1, 2])


def test_options_that_change_the_distribution_are_named():
    assert SamplingParams(top_p=0.5, min_tokens=1, max_tokens=4).changes_distribution == ["top_p", "min_tokens"]
    assert SamplingParams(temperature=0, top_k=3, logit_bias={4: 1}).changes_distribution == ["logit_bias"]
    assert SamplingParams(temperature=0.5).changes_distribution == []


def test_every_token_keeps_the_version_of_its_weights():
    def versions(feature):
        assert feature.weight_versions is not None
        return feature.weight_versions.tolist()

    first = append_sample(InputFeature(input_ids=[1, 2]), [3, 4], [-1, -1], weight_version=[7, 8])
    assert (first.weight_version, versions(first)) == (7, [-1, -1, 7, 8])
    second = append_sample(append_context(first, [5]), [6], [-1], weight_version=9)
    assert (second.weight_version, versions(second)) == (7, [-1, -1, 7, 8, -1, 9])
    older = InputFeature(input_ids=[1, 2], completion_mask=[0, 1], weight_version=3)
    assert versions(append_sample(older, [3], weight_version=4)) == [-1, 3, 4]
    assert append_sample(InputFeature(input_ids=[1]), [2]).weight_versions is None
    with pytest.raises(FormatError, match="2 sampled tokens but weight versions of shape"):
        append_sample(InputFeature(input_ids=[1]), [2, 3], weight_version=[1, 2, 3])


def test_a_model_output_may_be_empty():
    assert ModelOutput().loss is None
