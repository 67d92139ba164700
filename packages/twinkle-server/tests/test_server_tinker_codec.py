"""The protobuf bodies of the Tinker protocol, against the official SDK's own messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tinker
from numpy.typing import NDArray
from tinker.proto import tinker_public_pb2 as theirs
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest

from twinkle_server._errors import BadRequest
from twinkle_server.tinker import _messages as ours
from twinkle_server.tinker._codec import Sampled, read_forward_backward, write_forward_backward, write_sample


def f32(values: Any) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def request(data: list[tinker.Datum], loss_fn: Any = "cross_entropy", config: Any = None) -> bytes:
    fields = ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config)
    return forward_backward_request_to_proto(
        ForwardBackwardRequest(forward_backward_input=fields, model_id="s:train:0", seq_id=7)
    ).SerializeToString()


def datum(tokens: list[int], **inputs: Any) -> tinker.Datum:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def test_every_field_that_is_read_or_written_has_the_sdks_number_and_type():
    for name in ours._MESSAGES:
        if name == "OtherChunk":
            continue
        mine, sdk = ours._MADE[name].DESCRIPTOR, theirs.DESCRIPTOR.message_types_by_name[name]
        for field in mine.fields:
            other = sdk.fields_by_name[field.name]
            # An enumeration is a number on the wire.
            kinds = {field.type, other.type}
            assert (field.number, field.is_repeated) == (other.number, other.is_repeated), f"{name}.{field.name}"
            assert len(kinds) == 1 or kinds == {field.TYPE_INT32, field.TYPE_ENUM}, f"{name}.{field.name}"
    assert {name: theirs.DType.Value(f"DTYPE_{name}") for name in ("FLOAT32", "INT64", "INT32", "BFLOAT16")} == {
        "FLOAT32": ours.FLOAT32,
        "INT64": ours.INT64,
        "INT32": ours.INT32,
        "BFLOAT16": ours.BFLOAT16,
    }
    assert (theirs.STOP_REASON_STOP, theirs.STOP_REASON_LENGTH) == (ours.STOP, ours.LENGTH)


def test_a_request_of_the_sdk_is_read_as_it_was_meant():
    import torch

    sparse = torch.zeros(3, 40)
    sparse[1, 5], sparse[2, 39] = 0.25, -1.5
    body = request(
        [
            datum([1, 2, 300], target_tokens=[2, 300, 4], weights=[0.0, 1.0, -0.5]),
            datum([7, 8, 9], target_tokens=torch.arange(120).reshape(3, 40), weights=sparse),
        ],
        "ppo",
        {"clip_low_threshold": 0.7, "mode": "fast"},
    )
    have = read_forward_backward(body)
    assert (have.model_id, have.seq_id, have.loss_fn, have.forward_only) == ("s:train:0", 7, "ppo", False)
    assert have.config == {"clip_low_threshold": 0.7, "mode": "fast"}
    first, second = have.data
    np.testing.assert_array_equal(first.tokens, [1, 2, 300])
    assert (first.tokens.dtype, first.loss_inputs["target_tokens"].dtype, first.loss_inputs["weights"].dtype) == (np.int64, np.int64, np.float32)
    np.testing.assert_array_equal(first.loss_inputs["weights"], f32([0, 1, -0.5]))
    np.testing.assert_array_equal(second.loss_inputs["target_tokens"], np.arange(120).reshape(3, 40))
    np.testing.assert_array_equal(second.loss_inputs["weights"], sparse.numpy())
    message = theirs.ForwardBackwardRequest.FromString(body)
    assert message.data[1].loss_fn_inputs["weights"].HasField("sparse_csr"), "the SDK did not send it sparsely"


def _tensor(**fields: Any) -> bytes:
    message = theirs.ForwardBackwardRequest(model_id="m", seq_id=1)
    each = message.data.add()
    each.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    each.loss_fn_inputs["weights"].CopyFrom(theirs.Tensor(dtype=theirs.DTYPE_FLOAT32, **fields))
    return message.SerializeToString()


def _csr(crow: list[int], col: list[int], count: int) -> dict[str, bytes]:
    indices = {"crow_indices": np.array(crow, np.int64).tobytes(), "col_indices": np.array(col, np.int64).tobytes()}
    return {"values": np.ones(count, np.float32).tobytes(), **indices}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"\xff\xff\xff", "no ForwardBackwardRequest"),
        (_tensor(dense=b"123"), "no multiple of 4"),
        (_tensor(dense=b"1234", shape=[2]), "1 elements and the shape"),
        (_tensor(dense=b"1234", shape=[-1]), "the shape"),
        (_tensor(sparse_csr=theirs.SparseCsr(**_csr([0, 1], [0], 1)), shape=[1]), "two are needed"),
        (_tensor(sparse_csr=theirs.SparseCsr(**_csr([0, 1], [3], 1)), shape=[1, 3]), "into 3 columns"),
        (_tensor(sparse_csr=theirs.SparseCsr(**_csr([0, 1], [-1], 1)), shape=[1, 3]), "into 3 columns"),
        (_tensor(sparse_csr=theirs.SparseCsr(**_csr([0, 2, 1], [0], 1)), shape=[2, 3]), "into 2 rows"),
        (_tensor(sparse_csr=theirs.SparseCsr(**_csr([0, 0], [], 0)), shape=[1, 1 << 40]), "elements together"),
    ],
)
def test_bytes_that_make_no_request_are_refused_by_name(body, told):
    with pytest.raises(BadRequest, match=told):
        read_forward_backward(body)


def test_images_are_refused():
    message = theirs.ForwardBackwardRequest(model_id="m", seq_id=1)
    message.data.add().model_input.add().image.data = b"png"
    with pytest.raises(BadRequest, match="kind image"):
        read_forward_backward(message.SerializeToString())


def test_the_sdk_reads_results_as_they_were_meant():
    logprobs = [f32([-1, -2]), f32([[-1, -2, -3]]), f32([[-4, -5, -6], [-7, -8, -9]]), f32([-3])]
    have = deserialize_forward_backward_output(write_forward_backward(logprobs, {"loss:sum": 2.5, "clip_fraction:mean": 0.5}))
    assert have.metrics == {"loss:sum": 2.5, "clip_fraction:mean": 0.5}
    assert [each["logprobs"].shape for each in have.loss_fn_outputs] == [[2], [1, 3], [2, 3], [1]]
    for each, want in zip(have.loss_fn_outputs, logprobs, strict=True):
        np.testing.assert_array_equal(each["logprobs"].to_numpy().reshape(want.shape), want)


def test_the_sdk_reads_samples_as_they_were_meant():
    sequences = [
        Sampled(tokens=[5, 6], logprobs=[-0.5, -1.5], stopped=True, top=[{5: -0.5, 9: -2.0}, {6: -1.5}]),
        Sampled(tokens=[7], logprobs=[-0.25], stopped=False),
    ]
    have = deserialize_sample_response(write_sample(sequences, [0.0, -1.0, -2.0]))
    assert [(each.tokens, each.logprobs, each.stop_reason) for each in have.sequences] == [([5, 6], [-0.5, -1.5], "stop"), ([7], [-0.25], "length")]
    top = have.sequences[0].topk_logprobs_np
    assert top is not None
    np.testing.assert_array_equal(top.token_ids, [[5, 9], [6, 0]])
    np.testing.assert_array_equal(top.logprobs, f32([[-0.5, -2], [-1.5, -99999]]))
    prompt = have.prompt_logprobs_np
    assert prompt is not None
    assert math.isnan(prompt[0])
    np.testing.assert_array_equal(prompt[1:], [-1, -2])
    assert deserialize_sample_response(write_sample(sequences)).prompt_logprobs_np is None
