"""What may be sent, and what is checked before anything is: names and shapes, dtypes, changes only, adapters."""

from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from twinkle_remote import remote_class
from twinkle_sync import (
    ChannelMisuse,
    CheckpointEngineManager,
    CheckpointFolder,
    ShapesDiffer,
    TensorNotSupported,
    TensorSpec,
    TransferCorrupted,
    WeightReceiver,
    WeightSender,
    WeightsUnavailable,
    WorkerInfo,
)
from twinkle_sync._delta import Kept
from twinkle_sync._plan import senders_of


def some_weights(seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(64, 32, generator=generator).to(dtype),
        "layer.0": torch.randn(128, 32, generator=generator).to(dtype),
        "scale": torch.tensor(float(seed)),
        "ids": torch.arange(40),
    }


@remote_class()
class Source(WeightSender):
    def __init__(self, weights):
        self.weights = weights
        self.runs = 0

    def iter_weights(self):
        self.runs += 1
        yield from self.weights.items()

    def iter_adapter(self, adapter_name):
        yield "lora_A", torch.ones(2, 3)
        if adapter_name == "broken":
            raise ZeroDivisionError("no matrix B")
        yield "lora_B", torch.zeros(3, 2)

    def iter_merged(self, adapter_name):
        for name, tensor in self.weights.items():
            yield name, tensor + 1 if name == "embed" else tensor

    def adapter_config(self, adapter_name):
        return {"r": 2, "name": adapter_name}


@remote_class()
class Sink(WeightReceiver):
    def __init__(self, expected=()):
        self.weights, self.adapters = {}, {}
        self.expected = expected

    def weight_specs_expected(self):
        return self.expected

    def load_weights(self, tensors, version):
        self.weights = {name: tensor.clone() for name, tensor in tensors}

    def load_adapter_weights(self, adapter_name, config, tensors, version):
        self.adapters[adapter_name] = (config, dict(tensors), version)


def same_bits(one, other):
    return list(one) == list(other) and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n].reshape(-1).view(torch.uint8), other[n].reshape(-1).view(torch.uint8)) for n in one
    )


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (TensorSpec("lm_head", "float32", (2,)), "the sender has no lm_head, which this Sink needs"),
        (TensorSpec("embed", "bfloat16", (64, 31)), r"embed: the sender's has shape \(64, 32\), this Sink needs \(64, 31\)"),
    ],
)
def test_names_and_shapes_are_checked_before_anything_is_loaded(expected, message, tmp_path):
    """A folder tells what is in it; a trainer what it sent the last time."""
    save_file(some_weights(), tmp_path / "model.safetensors")
    known = Source(some_weights())
    CheckpointEngineManager(model=known, sampler=Sink()).sync_weights()
    for source in (CheckpointFolder(tmp_path), known):
        sink = Sink([expected])
        sink.weights = {"old": torch.ones(1)}
        with pytest.raises(ShapesDiffer, match=message):
            CheckpointEngineManager(model=source, sampler=sink).sync_weights()
        assert list(sink.weights) == ["old"]
        sink.require_weights()  # not half-loaded: the old ones still serve
        sink.expected = [TensorSpec("embed", "float32", (64, 32))]
        CheckpointEngineManager(model=source, sampler=sink).sync_weights()
        with pytest.raises(ShapesDiffer, match="embed is bfloat16 at the sender and float32 here"):
            CheckpointEngineManager(model=source, sampler=sink, dtype="same").sync_weights()


def test_a_source_that_announces_nothing_is_checked_tensor_by_tensor():
    sink = Sink([TensorSpec("layer.0", "bfloat16", (1, 1))])
    with pytest.raises(ShapesDiffer, match=r"layer.0: the sender's has shape"):
        CheckpointEngineManager(model=Source(some_weights()), sampler=sink).sync_weights()
    with pytest.raises(WeightsUnavailable):
        sink.require_weights()


def test_floating_point_tensors_are_sent_as_the_dtype_that_is_asked_for():
    source, sink = Source(some_weights(dtype=torch.float32)), Sink()
    report = CheckpointEngineManager(model=source, sampler=sink, dtype="bfloat16").sync_weights()
    assert {tensor.dtype for tensor in sink.weights.values()} == {torch.bfloat16, torch.int64}
    assert torch.equal(sink.weights["embed"], source.weights["embed"].bfloat16())
    assert report.size_bytes == 2 * (64 * 32 + 128 * 32 + 1) + 8 * 40


def test_a_source_that_changes_its_tensors_is_an_error_and_the_next_sync_works():
    source, sink = Source(some_weights()), Sink()
    manager = CheckpointEngineManager(model=source, sampler=sink)
    manager.sync_weights()
    manager.sync_weights()
    assert source.runs == 2
    source.weights["embed"] = torch.zeros(3)
    with pytest.raises(TensorNotSupported, match=r"embed: the source yields .* not what it announced or had before"):
        manager.sync_weights()
    manager.sync_weights()
    assert torch.equal(sink.weights["embed"], torch.zeros(3))


def test_a_delta_is_exact_and_moves_few_bytes():
    source, sink = Source(some_weights()), Sink()
    manager = CheckpointEngineManager(model=source, sampler=sink, bucket_size_bytes=1 << 10)
    full = manager.sync_weights("delta")
    assert full.mode == "full"
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for name in ("embed", "layer.0"):
            flat = source.weights[name].view(-1)
            chosen = torch.randperm(flat.numel(), generator=generator)[: flat.numel() // 50]
            flat[chosen] += torch.randn(len(chosen), generator=generator).bfloat16()
        report = manager.sync_weights("delta")
        assert report.mode == "delta"
        assert same_bits(sink.weights, source.weights)
        assert report.size_bytes < 0.08 * full.size_bytes
    assert manager.sync_weights("delta").size_bytes == 0
    assert same_bits(sink.weights, source.weights)


def test_a_delta_tells_zeros_and_nans_apart_and_sends_dense_changes_whole():
    source, sink = Source(some_weights(dtype=torch.float32)), Sink()
    manager = CheckpointEngineManager(model=source, sampler=sink)
    manager.sync_weights("delta")
    source.weights["embed"].view(-1)[:3] = torch.tensor([-0.0, float("nan"), float("inf")])
    manager.sync_weights("delta")
    source.weights["embed"].view(-1)[0] = 0.0  # another sign, the same number
    source.weights["layer.0"] = source.weights["layer.0"] + 1
    report = manager.sync_weights("delta")
    assert same_bits(sink.weights, source.weights)
    assert report.size_bytes == source.weights["layer.0"].nbytes + 4 + 4 + 8


def test_a_delta_follows_a_full_transfer_after_anything_else():
    source, sink = Source(some_weights()), Sink()
    manager = CheckpointEngineManager(model=source, sampler=sink)
    modes: Any = ("delta", "delta", "full", "delta", "delta")
    assert [manager.sync_weights(mode).mode for mode in modes] == ["full", "delta", "full", "full", "delta"]
    manager = CheckpointEngineManager(model=source, sampler=Sink(), first_version=6)
    assert manager.sync_weights("delta").mode == "full"  # another sampler


def test_a_delta_of_one_manager_is_not_applied_to_what_another_has_sent():
    """Their versions are equal; what the receiver keeps is not what the first one's sender keeps."""
    one, other, sink = Source(some_weights(0)), Source(some_weights(1)), Sink()
    first, second = (CheckpointEngineManager(model=source, sampler=sink) for source in (one, other))
    assert [first.sync_weights("delta").mode, second.sync_weights("delta").mode] == ["full", "full"]
    assert first.version == second.version
    assert first.sync_weights("delta").mode == "full"
    assert same_bits(sink.weights, one.weights)


def test_a_setting_that_cannot_work_is_refused_before_a_sampler_loses_its_weights():
    wrong: Any = (({"bucket_size_bytes": 0}, "bucket_size_bytes is 0"), ({"dtype": "bf17"}, "'bf17' is not a dtype"))
    for settings, message in wrong:
        with pytest.raises((ChannelMisuse, TensorNotSupported), match=message):
            CheckpointEngineManager(model=Source(some_weights()), sampler=Sink(), **settings)
    module: Any = torch.nn.Linear(1, 1)
    with pytest.raises(ChannelMisuse, match=r"Linear cannot take part .* wrap a module or a state dict: model=StateDict\("):
        CheckpointEngineManager(model=module, sampler=Sink())


def test_a_delta_that_does_not_give_the_senders_tensor_is_noticed():
    sender, receiver = Kept(), Kept()
    old, new = some_weights(0), some_weights(0)
    new["embed"].view(-1)[5] = 7.0
    list(sender.recording(old.items(), 1))
    list(receiver.recording(old.items(), 1))
    receiver.tensors["embed"].view(-1)[6] += 1.0  # one bit of memory is wrong
    with pytest.raises(TransferCorrupted, match="embed: what the delta gives is not what the sender has"):
        list(receiver.applied(sender.changes(new.items(), 2), 2))


def test_an_adapter_is_complete_before_it_replaces_another_and_leaves_the_weights():
    source, sink = Source(some_weights()), Sink()
    manager = CheckpointEngineManager(model=source, sampler=sink)
    manager.sync_weights()
    report = manager.sync_weights("lora", adapter_name="maths")
    assert (report.mode, report.version, report.num_tensors) == ("lora", 2, 2)
    config, tensors, version = sink.adapters["maths"]
    assert (config, list(tensors), version) == ({"r": 2, "name": "maths"}, ["lora_A", "lora_B"], 2)
    with pytest.raises(ZeroDivisionError, match="no matrix B"):
        manager.sync_weights("lora", adapter_name="broken")
    assert list(sink.adapters) == ["maths"]
    sink.require_weights()
    assert sink.loaded_version == 1
    assert not manager.is_stale
    wrong: Any = (
        {"mode": "lora"},
        {"mode": "full", "adapter_name": "maths"},
        {"mode": "some"},
        {"mode": "full", "merge": True},
        {"mode": "lora", "adapter_name": "maths", "merge": True},
    )
    for arguments in wrong:
        with pytest.raises(ChannelMisuse, match=r"modes are 'full' and 'delta', .* and 'lora' with an adapter's name"):
            manager.sync_weights(**arguments)


def test_merged_weights_take_the_place_of_all_and_can_be_taken_back_by_a_delta():
    source, sink = Source(some_weights()), Sink()
    manager = CheckpointEngineManager(model=source, sampler=sink)
    manager.sync_weights("delta")
    report = manager.sync_weights("delta", adapter_name="maths", merge=True)
    assert (report.mode, report.version) == ("delta", 2)
    assert same_bits(sink.weights, {**source.weights, "embed": source.weights["embed"] + 1})
    assert manager.sync_weights("delta").mode == "delta"
    assert same_bits(sink.weights, source.weights)
    manager.sync_weights(adapter_name="maths", merge=True)
    assert torch.equal(sink.weights["embed"], source.weights["embed"] + 1)
    assert sink.adapters == {}
    assert sink.loaded_version == 4


@pytest.mark.parametrize(
    ("trainers", "samplers", "num_senders", "expected"),
    [
        ("aaaa", "aa", None, [0, 0]),  # one machine: one sends
        ("aabb", "bab", None, [2, 0, 2]),  # each machine has its own
        ("aabb", "cdec", None, [0, 2, 0, 0]),  # machines of samplers only take turns
        ("a", "bcd", None, [0, 0, 0]),
        ("aaaa", "aaa", 2, [0, 1, 0]),
    ],
)
def test_receivers_hear_of_a_sender_on_their_machine(trainers, samplers, num_senders, expected):
    able = [WorkerInfo(rank, host, rank, can_send=True) for rank, host in enumerate(trainers)]
    receivers = [WorkerInfo(rank, host, 100 + rank) for rank, host in enumerate(samplers)]
    assert senders_of(receivers, able, num_senders) == expected
