"""The protobuf messages of the Tinker protocol that this server reads and writes, as classes made at run time.

Names and numbers of fields are facts of the wire. The messages live in a pool of their own, so that the official SDK's can be loaded beside them;
fields that are not named here are skipped when read.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""The values of a tensor's `dtype`."""

STOP, LENGTH = 0, 1
"""The values of a sampled sequence's `stop_reason`."""

_PACKAGE = "twinkle_server.tinker"

# A field: its name, number and type. "[]" behind a type: repeated; "{}": a map from text; "a|b": a message of which one field is set.
_MESSAGES: dict[str, list[tuple[str, int, str]]] = {
    "SparseCsr": [("values", 1, "bytes"), ("crow_indices", 2, "bytes"), ("col_indices", 3, "bytes")],
    "Tensor": [("dense", 1, "bytes|encoding"), ("sparse_csr", 2, "SparseCsr|encoding"), ("dtype", 3, "int32"), ("shape", 4, "int64[]")],
    "EncodedTextChunk": [("tokens", 1, "bytes")],
    "OtherChunk": [],
    "Chunk": [("encoded_text", 1, "EncodedTextChunk|chunk"), ("image", 2, "OtherChunk|chunk"), ("dmel", 3, "OtherChunk|chunk")],
    "Datum": [("model_input", 1, "Chunk[]"), ("loss_fn_inputs", 2, "Tensor{}")],
    "LossConfigValue": [("number", 1, "double|value"), ("text", 2, "string|value")],
    "ForwardBackwardRequest": [
        ("model_id", 1, "string"),
        ("seq_id", 2, "int32"),
        ("data", 3, "Datum[]"),
        ("loss_fn", 4, "string"),
        ("loss_fn_config", 5, "double{}"),
        ("forward_only", 6, "bool"),
        ("loss_fn_config_v2", 7, "LossConfigValue{}"),
    ],
    "BatchedTensor": [("data", 1, "bytes"), ("offsets", 2, "bytes"), ("dtype", 3, "int32"), ("trailing_shape", 4, "int64[]")],
    "ArrayRecord": [("type_tag", 1, "string"), ("fields", 2, "BatchedTensor{}"), ("num_datums", 3, "int64")],
    "ForwardBackwardOutput": [("loss_fn_output_type", 1, "string"), ("loss_fn_outputs", 2, "ArrayRecord[]"), ("metrics", 3, "double{}")],
    "TopkLogprobs": [("token_ids", 1, "bytes"), ("logprobs", 2, "bytes"), ("k", 3, "uint32"), ("length", 4, "uint32")],
    "SampledSequence": [
        ("stop_reason", 1, "int32"),
        ("tokens", 2, "bytes"),
        ("logprobs", 3, "bytes"),
        ("topk_sampled_logprobs", 4, "TopkLogprobs"),
    ],
    "SampleResponse": [
        ("sequences", 1, "SampledSequence[]"),
        ("prompt_logprobs", 2, "bytes"),
        ("topk_prompt_logprobs", 3, "TopkLogprobs"),
    ],
}


def _field(message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str) -> None:
    kind, _, oneof = kind.partition("|")
    repeated, mapped = kind.endswith("[]"), kind.endswith("{}")
    kind = kind.removesuffix("[]").removesuffix("{}")
    field = message.field.add(name=name, number=number)
    field.label = field.LABEL_REPEATED if repeated or mapped else field.LABEL_OPTIONAL
    if mapped:
        entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _field(entry, "key", 1, "string")
        _field(entry, "value", 2, kind)
        field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{entry.name}"
    elif kind in _MESSAGES:
        field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = getattr(field, f"TYPE_{kind.upper()}")
    if oneof:
        known = [each.name for each in message.oneof_decl]
        if oneof not in known:
            message.oneof_decl.add(name=oneof)
            known.append(oneof)
        field.oneof_index = known.index(oneof)


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="twinkle_server/tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for each in fields:
            _field(message, *each)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}


_MADE = _classes()
ForwardBackwardRequest: Any = _MADE["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = _MADE["ForwardBackwardOutput"]
SampleResponse: Any = _MADE["SampleResponse"]
