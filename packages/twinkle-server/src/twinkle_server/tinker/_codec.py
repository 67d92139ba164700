"""The bodies of the Tinker protocol that are protobuf: what comes in as arrays, what goes out as bytes.

Shape suffixes: N tokens of a datum, K targets of a position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from .._errors import BadRequest
from . import _messages as messages

PROTOBUF = "application/x-protobuf"

_DTYPES: dict[int, np.dtype[Any]] = {
    messages.FLOAT32: np.dtype("<f4"),
    messages.INT64: np.dtype("<i8"),
    messages.INT32: np.dtype("<i4"),
}
# Of all tensors of a request together, once sparse ones are dense.
_MAX_ELEMENTS = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Datum:
    """One sequence: its tokens, int64 [N], and the inputs of its loss by name, float32 or int64, [N] or [N, K]."""

    tokens: NDArray[np.int64]
    loss_inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """A request to run the model, and with `forward_only=False` its gradients. config: of the loss."""

    model_id: str
    seq_id: int
    loss_fn: str
    config: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    forward_only: bool = False
    data: Sequence[Datum] = ()


def read_forward_backward(body: bytes) -> ForwardBackward:
    """A request from its bytes.

    Raises BadRequest for bytes that are no such message, tensors whose bytes and shapes disagree, and images or audio.
    """
    message = _parse(body)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is not None:
            config[name] = getattr(value, kind)
    reader = _Reader()
    return ForwardBackward(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss_fn=message.loss_fn,
        config=config,
        forward_only=message.forward_only,
        data=[reader.datum(f"data[{index}]", datum) for index, datum in enumerate(message.data)],
    )


def read_header(body: bytes) -> tuple[str, int]:
    """The model and the number of a request; BadRequest when it has none, or is no such message."""
    message = _parse(body)
    if not message.model_id or message.seq_id < 1:
        raise BadRequest("a ForwardBackwardRequest needs model_id and a seq_id from 1")
    return message.model_id, message.seq_id


def _parse(body: bytes) -> Any:
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise BadRequest("the body is no ForwardBackwardRequest") from error
    return message


class _Reader:
    """Reads the tensors of one request, and counts their elements."""

    def __init__(self) -> None:
        self._left = _MAX_ELEMENTS

    def datum(self, where: str, message: Any) -> Datum:
        chunks: list[NDArray[np.int64]] = []
        for chunk in message.model_input:
            kind = chunk.WhichOneof("chunk")
            if kind != "encoded_text":
                raise BadRequest(f"{where}.model_input has a chunk of kind {kind}; this server trains on encoded_text")
            chunks.append(_array(f"{where}.model_input", chunk.encoded_text.tokens, np.dtype("<i4")).astype(np.int64))
        tokens = np.concatenate(chunks) if chunks else np.zeros(0, np.int64)
        return Datum(tokens=tokens, loss_inputs={name: self._tensor(f"{where}.{name}", each) for name, each in message.loss_fn_inputs.items()})

    def _tensor(self, where: str, message: Any) -> NDArray[Any]:
        dtype = _DTYPES.get(message.dtype)
        if dtype is None:
            raise BadRequest(f"{where} has the dtype number {message.dtype}; FLOAT32 and INT64 are known")
        shape = tuple(message.shape)
        if any(size < 0 for size in shape):
            raise BadRequest(f"{where} has the shape {shape}")
        if message.HasField("sparse_csr"):
            return self._sparse(where, message.sparse_csr, dtype, shape)
        values = _array(where, message.dense, dtype)
        self._take(where, values.size)
        if shape and math.prod(shape) != values.size:
            raise BadRequest(f"{where} has {values.size} elements and the shape {shape}")
        return _native(values.reshape(shape or (values.size,)))

    def _sparse(self, where: str, message: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        if len(shape) != 2:
            raise BadRequest(f"{where} is sparse and has {len(shape)} axes; two are needed")
        values = _array(where, message.values, dtype)
        begins = _array(f"{where}.crow_indices", message.crow_indices, np.dtype("<i8"))
        columns = _array(f"{where}.col_indices", message.col_indices, np.dtype("<i8"))
        rows, width = shape
        self._take(where, rows * width)
        if len(begins) != rows + 1 or begins[0] != 0 or begins[-1] != len(values) or (np.diff(begins) < 0).any():
            raise BadRequest(f"{where}.crow_indices do not divide {len(values)} values into {rows} rows")
        if len(columns) != len(values) or (len(columns) and (columns.min() < 0 or columns.max() >= width)):
            raise BadRequest(f"{where}.col_indices do not place {len(values)} values into {width} columns")
        dense = np.zeros(shape, dtype.newbyteorder("="))
        dense[np.repeat(np.arange(rows), np.diff(begins)), columns] = values
        return dense

    def _take(self, where: str, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise BadRequest(f"{where}: the tensors of a request may have {_MAX_ELEMENTS} elements together")


def _array(where: str, content: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(content) % dtype.itemsize:
        raise BadRequest(f"{where} has {len(content)} bytes, which is no multiple of {dtype.itemsize}")
    return np.frombuffer(content, dtype)


def _native(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.float32 if values.dtype.kind == "f" else np.int64, copy=False)


def write_forward_backward(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """A result: `logprobs`, one array a datum, of its targets' shape [N] or [N, K]; metrics by name, each with one ':' in it."""
    message = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    # A record is rectangular behind its first axis: neighbours of one width share a record.
    begin = 0
    while begin < len(logprobs):
        trailing = logprobs[begin].shape[1:]
        end = begin + 1
        while end < len(logprobs) and logprobs[end].shape[1:] == trailing:
            end += 1
        arrays = [np.ascontiguousarray(array, "<f4") for array in logprobs[begin:end]]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        field_ = record.fields["logprobs"]
        field_.data = b"".join(array.tobytes() for array in arrays)
        field_.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes()
        field_.dtype = messages.FLOAT32
        field_.trailing_shape.extend(trailing)
        begin = end
    return message.SerializeToString()


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A sampled sequence: its tokens and their log-probabilities, and whether it ended by itself. top: the best tokens of each place."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    top: Sequence[Mapping[int, float]] = ()


def write_sample(sequences: Sequence[Sampled], prompt_logprobs: Sequence[float] | None = None) -> bytes:
    """A result of sampling. prompt_logprobs: one for each token of the prompt; that of the first is NaN on the wire, whatever it is here."""
    message = messages.SampleResponse()
    for each in sequences:
        sequence = message.sequences.add(
            stop_reason=messages.STOP if each.stopped else messages.LENGTH,
            tokens=np.asarray(each.tokens, "<i4").tobytes(),
            logprobs=np.asarray(each.logprobs, "<f4").tobytes(),
        )
        if each.top:
            _write_top(sequence.topk_sampled_logprobs, each.top)
    if prompt_logprobs is not None:
        values = np.asarray(prompt_logprobs, "<f4").copy()
        values[:1] = np.nan
        message.prompt_logprobs = values.tobytes()
    return message.SerializeToString()


def _write_top(message: Any, places: Sequence[Mapping[int, float]]) -> None:
    width = max(map(len, places))
    tokens = np.zeros((len(places), width), "<i4")
    logprobs = np.full((len(places), width), -99999.0, "<f4")  # what an empty cell holds
    for row, place in enumerate(places):
        for column, (token, logprob) in enumerate(sorted(place.items(), key=lambda item: -item[1])):
            tokens[row, column], logprobs[row, column] = token, logprob
    message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()
    message.k, message.length = width, len(places)
