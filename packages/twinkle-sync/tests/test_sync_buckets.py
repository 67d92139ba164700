"""Buckets: what goes in comes out, and what was altered is noticed."""

import pickle
from dataclasses import replace

import pytest
import torch

import twinkle_sync
from twinkle_sync import (
    Bucket,
    ChannelMisuse,
    Ledger,
    SyncError,
    TensorNotSupported,
    TensorSpec,
    TransferCorrupted,
    Unpacker,
    pack,
)
from twinkle_sync._ahead import started
from twinkle_sync._buffers import Buffers
from twinkle_sync._messages import Abort, Begin, End, decode, encode, outgoing

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)


def _tensors():
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        yield f"{dtype}.matrix", torch.randint(0, 2, (7, 5), generator=generator).to(dtype)
    yield "scalar", torch.tensor(3.5)
    yield "empty", torch.zeros(0, 3)
    yield "transposed", torch.arange(12.0).view(3, 4).t()
    yield "parameter", torch.nn.Parameter(torch.ones(3))
    yield "large", torch.randn(400, generator=generator)


def _round_trip(size, verify=True):
    sent, received = Ledger(), Ledger()
    buckets = list(pack(_tensors(), size, sent, verify=verify))
    unpacker = Unpacker(received, verify=verify)
    tensors = [item for bucket in buckets for item in unpacker.feed(bucket)]
    unpacker.finish()
    assert received.receipt(1) == sent.receipt(1)
    return buckets, tensors, sent.receipt(1)


@pytest.mark.parametrize("size", [64, 100, 512, 1 << 20])
@pytest.mark.parametrize("verify", [True, False])
def test_every_dtype_and_shape_survives_any_bucket_size(size, verify):
    buckets, received, _ = _round_trip(size, verify)
    expected = list(_tensors())
    assert [name for name, _ in received] == [name for name, _ in expected]
    for (name, got), (_, want) in zip(received, expected, strict=True):
        assert got.dtype == want.dtype, name
        assert got.shape == want.shape, name
        assert torch.equal(got.view(torch.uint8) if got.dim() else got, want.detach().contiguous().view(torch.uint8) if got.dim() else want), name
    assert all(bucket.payload.numel() <= size for bucket in buckets)


def test_only_tensors_larger_than_a_bucket_are_split():
    buckets, _, _ = _round_trip(512)
    pieces = [piece for bucket in buckets for piece in bucket.pieces]
    assert {piece.spec.name for piece in pieces if piece.size_bytes < piece.spec.size_bytes} == {"large"}


def test_received_tensors_stay_valid_when_later_buckets_arrive():
    ledger = Ledger()
    unpacker = Unpacker(Ledger())
    source = [(f"t{i}", torch.full((16,), float(i))) for i in range(20)]
    kept = [item for bucket in pack(source, 64, ledger) for item in unpacker.feed(bucket)]
    assert [tensor[0].item() for _, tensor in kept] == [float(i) for i in range(20)]


def test_memory_is_used_again_once_nobody_looks_at_it():
    buffers = Buffers()
    first = buffers.take(1000)
    first.fill_(1)
    view = first[10:20].view(torch.int16)
    address = first.data_ptr()
    del first
    other = buffers.take(1000)
    other.fill_(2)
    assert view.tolist() == [257] * 5
    del view
    again = buffers.take(900)
    assert again.data_ptr() == address
    assert len(again) == 900
    assert other.tolist() == [2] * 1000
    waiting = started(buffers.take, 1000, wait_s=30)  # two are lent
    assert not waiting.done()
    del other
    assert len(waiting.result(10)) == 1000
    waiting = started(buffers.take, 1000, wait_s=30)
    buffers.need(True)  # the loader waits and keeps what it has
    assert len(waiting.result(10)) == 1000


def test_the_digest_depends_on_content_order_and_names_but_not_on_the_buckets():
    digests = {_round_trip(size)[2].digest for size in (64, 512, 1 << 20)}
    assert len(digests) == 1

    def digest(tensors):
        ledger = Ledger()
        for _ in pack(tensors, 512, ledger):
            pass
        return ledger.receipt(1).digest

    a, b = torch.arange(8.0), torch.ones(8)
    variants = [
        [("a", a), ("b", b)],
        [("b", b), ("a", a)],
        [("a", b), ("b", a)],
        [("a", a), ("c", b)],
        [("a", a.view(2, 4)), ("b", b)],
        [("a", a.int()), ("b", b)],
        [("a", a.flip(0)), ("b", b)],
    ]
    assert len({digest(variant) for variant in variants}) == len(variants)


def test_one_altered_byte_is_noticed_and_named():
    ledger = Ledger()
    (bucket,) = pack([("first", torch.ones(4)), ("second", torch.ones(4))], 1024, ledger)
    bucket.payload[bucket.pieces[1].bucket_offset + 5] ^= 1
    with pytest.raises(TransferCorrupted, match="second: checksum"):
        Unpacker(Ledger()).feed(bucket)


def test_without_verification_an_altered_byte_passes():
    (bucket,) = pack([("only", torch.ones(4))], 1024, Ledger(), verify=False)
    bucket.payload[0] ^= 1
    ((_, tensor),) = Unpacker(Ledger(), verify=False).feed(bucket)
    assert not torch.equal(tensor, torch.ones(4))


def test_a_missing_piece_of_a_split_tensor_is_noticed():
    buckets = list(pack([("large", torch.randn(100)), ("small", torch.ones(2))], 128, Ledger()))
    unpacker = Unpacker(Ledger())
    unpacker.feed(buckets[0])
    with pytest.raises(TransferCorrupted, match="expected byte 128 of large, got byte 256"):
        unpacker.feed(buckets[2])
    cut_short = Unpacker(Ledger())
    cut_short.feed(buckets[0])
    with pytest.raises(TransferCorrupted, match="large: 128 of 400 bytes arrived"):
        cut_short.finish()


def test_a_piece_that_reaches_past_its_bucket_is_refused():
    (bucket,) = pack([("a", torch.ones(4))], 1024, Ledger())
    with pytest.raises(TransferCorrupted, match="past the end"):
        Unpacker(Ledger()).feed(Bucket(bucket.pieces, bucket.payload[:8]))


def test_what_cannot_be_sent_is_refused_by_name():
    def send(name, tensor):
        list(pack([(name, tensor)], 1024, Ledger()))

    with pytest.raises(TensorNotSupported, match=r"w: only dense tensors"):
        send("w", torch.eye(3).to_sparse())
    with pytest.raises(TensorNotSupported, match=r"w: only dense tensors"):
        send("w", torch.empty(3, device="meta"))
    with pytest.raises(TensorNotSupported, match="not list"):
        send("w", [1.0])
    with pytest.raises(TensorNotSupported, match="w was yielded twice"):
        list(pack([("w", torch.ones(1)), ("w", torch.ones(1))], 1024, Ledger()))
    with pytest.raises(ChannelMisuse, match="at least 64"):
        list(pack([], 10, Ledger()))


def test_messages_survive_the_wire_format():
    messages = list(outgoing(_tensors(), version=7, bucket_size_bytes=512, verify=True))
    assert isinstance(messages[0], Begin)
    assert isinstance(messages[-1], End)
    for message in [*messages, Abort("ValueError: it is so")]:
        back = decode(*encode(message))
        if isinstance(message, Bucket):
            assert isinstance(back, Bucket)
            assert back.pieces == message.pieces
            assert torch.equal(back.payload, message.payload)
        else:
            assert back == message


@pytest.mark.parametrize(("kind", "text"), [(9, b"1"), (0, b"{"), (1, b"3"), (2, b"[1]"), (0, b"\xff")])
def test_bytes_that_are_no_message_are_refused(kind, text):
    with pytest.raises(TransferCorrupted):
        decode(kind, text, torch.empty(0, dtype=torch.uint8))


def test_a_spec_knows_its_size_and_refuses_unknown_dtypes():
    spec = TensorSpec.of("w", torch.zeros(3, 4, dtype=torch.bfloat16))
    assert (spec.dtype, spec.numel, spec.size_bytes) == ("bfloat16", 12, 24)
    with pytest.raises(TensorNotSupported, match="'nonsense' is not a dtype"):
        _ = replace(spec, dtype="nonsense").torch_dtype


def test_public_names_are_sorted_documented_and_errors_pickle():
    assert twinkle_sync.__all__ == sorted(twinkle_sync.__all__)
    for name in twinkle_sync.__all__:
        value = getattr(twinkle_sync, name)
        assert name == "Message" or value.__doc__, name
        if isinstance(value, type) and issubclass(value, SyncError):
            error = pickle.loads(pickle.dumps(value("what happened")))
            assert type(error) is value
            assert str(error) == "what happened"
