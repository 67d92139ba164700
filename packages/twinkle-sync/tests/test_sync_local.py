"""The manager with trainer and sampler in one process."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from twinkle_remote import initialize, remote_class
from twinkle_sync import (
    ChannelMisuse,
    CheckpointEngineManager,
    CheckpointFolder,
    Deadline,
    StateDict,
    TransferCorrupted,
    WeightReceiver,
    WeightSender,
    WeightSink,
    WeightSource,
    WeightsUnavailable,
    make_transport,
)


@remote_class()
class Trainer(WeightSender):
    def __init__(self) -> None:
        self.weights = {"a": torch.zeros(40), "b": torch.ones(3, 3)}
        self.fail = False
        self.iterations = 0

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.iterations += 1
        yield "a", self.weights["a"]
        if self.fail:
            raise ZeroDivisionError("the export failed")
        yield "b", self.weights["b"]


@remote_class()
class Sampler(WeightReceiver):
    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.fail = False
        self.stop_early = False

    def load_weights(self, tensors, version) -> None:
        for name, tensor in tensors:
            if self.fail:
                raise ArithmeticError("the loader failed")
            self.weights[name] = tensor
            if self.stop_early:
                return

    def sample(self) -> float:
        self.require_weights()
        return sum(tensor.sum().item() for tensor in self.weights.values())


@pytest.fixture(autouse=True)
def _local():
    with initialize("local"):
        yield


def test_a_resumed_run_counts_versions_on():
    manager = CheckpointEngineManager(model=Trainer(), sampler=Sampler(), first_version=8)
    assert manager.version == 0
    assert [manager.sync_weights().version for _ in range(2)] == [8, 9]
    with pytest.raises(ChannelMisuse, match="first_version is 0"):
        CheckpointEngineManager(model=Trainer(), sampler=Sampler(), first_version=0)


def test_samplers_of_one_process_all_get_the_weights():
    trainer, one, two = Trainer(), Sampler(), Sampler()
    manager = CheckpointEngineManager(model=trainer, sampler=[one, two])
    for mode in ("full", "delta", "delta"):
        trainer.weights["a"] = trainer.weights["a"] + 1
        assert manager.sync_weights(mode).mode == "full"
        assert [one.sample(), two.sample()] == [trainer.weights["a"].sum().item() + 9] * 2
    two.fail = True
    with pytest.raises(ArithmeticError):
        manager.sync_weights()
    assert (one.weight_version(), manager.is_stale) == (4, True)
    with pytest.raises(WeightsUnavailable):
        two.sample()
    two.fail = False
    manager.sync_weights()
    assert one.weight_version() == two.weight_version() == 5


def test_managers_may_take_turns_and_a_transport_between_processes_is_refused_in_one():
    trainer, sampler = Trainer(), Sampler()
    managers = [CheckpointEngineManager(model=trainer, sampler=sampler) for _ in range(2)]
    assert [manager.sync_weights().version for manager in managers * 2] == [1, 1, 2, 2]
    with pytest.raises(ChannelMisuse, match="transport='gloo' is between processes, and trainer and samplers share one here"):
        CheckpointEngineManager(model=trainer, sampler=sampler, transport="gloo").sync_weights()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fail", [False, True])
def test_who_asks_while_another_thread_loads_hears_how_it_ended(fail):
    class Slow(Sampler):
        def load_weights(self, tensors, version) -> None:
            asking.submit(self.weight_version).add_done_callback(done.append)
            time.sleep(0.2)
            early.extend(done)
            super().load_weights(tensors, version)

    early: list[Future[int]] = []
    done: list[Future[int]] = []
    sampler = Slow()
    sampler.fail = fail
    with ThreadPoolExecutor(1) as asking:
        if fail:
            with pytest.raises(ArithmeticError):
                CheckpointEngineManager(model=Trainer(), sampler=sampler).sync_weights()
        else:
            CheckpointEngineManager(model=Trainer(), sampler=sampler).sync_weights()
    assert early == []  # it waited
    if fail:
        with pytest.raises(WeightsUnavailable, match="the loader failed"):
            done[0].result()
    else:
        assert done[0].result() == 1


def test_weights_arrive_and_versions_count_up():
    trainer, sampler = Trainer(), Sampler()
    assert isinstance(trainer, WeightSource)
    assert isinstance(sampler, WeightSink)
    manager = CheckpointEngineManager(model=trainer, sampler=sampler, bucket_size_bytes=64)
    assert (manager.version, manager.is_stale, sampler.weight_version()) == (0, True, 0)
    first = manager.sync_weights()
    assert (first.version, first.num_tensors, first.size_bytes) == (1, 2, 4 * 49)
    assert sampler.sample() == 9.0
    trainer.weights["a"] += 1
    second = manager.sync_weights()
    assert sampler.sample() == 49.0
    assert (second.version, manager.version, sampler.weight_version(), manager.is_stale) == (2, 2, 2, False)
    assert second.digest != first.digest
    assert manager.sync_weights().digest == second.digest


def test_what_the_sampler_got_does_not_follow_the_trainers_memory():
    trainer, sampler = Trainer(), Sampler()
    CheckpointEngineManager(model=trainer, sampler=sampler).sync_weights()
    trainer.weights["a"] += 1
    assert sampler.sample() == 9.0


def test_a_source_that_raises_passes_its_own_exception_and_the_sampler_refuses_until_a_sync_succeeds():
    trainer, sampler = Trainer(), Sampler()
    manager = CheckpointEngineManager(model=trainer, sampler=sampler, bucket_size_bytes=64)
    manager.sync_weights()
    trainer.fail = True
    with pytest.raises(ZeroDivisionError, match="the export failed"):
        manager.sync_weights()
    assert manager.is_stale
    assert manager.version == 1
    with pytest.raises(WeightsUnavailable, match=r"version 2 .*the export failed.*call sync_weights\(\) until it succeeds"):
        sampler.sample()
    with pytest.raises(WeightsUnavailable):
        sampler.weight_version()
    trainer.fail = False
    assert manager.sync_weights().version == 3
    assert sampler.sample() == 9.0


def test_a_loader_that_raises_or_stops_early_leaves_the_sampler_refusing():
    trainer, sampler = Trainer(), Sampler()
    manager = CheckpointEngineManager(model=trainer, sampler=sampler, bucket_size_bytes=64)
    sampler.fail = True
    with pytest.raises(ArithmeticError, match="the loader failed"):
        manager.sync_weights()
    with pytest.raises(WeightsUnavailable, match="the loader failed"):
        sampler.sample()
    sampler.fail, sampler.stop_early = False, True
    with pytest.raises(TransferCorrupted, match="before it had read all tensors"):
        manager.sync_weights()
    with pytest.raises(WeightsUnavailable):
        sampler.sample()
    sampler.stop_early = False
    manager.sync_weights()
    assert sampler.sample() == 9.0


def test_a_source_that_raises_after_the_loader_has_does_not_hide_the_loaders_error():
    class FailsLate(Trainer):
        def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from super().iter_weights()
            raise ZeroDivisionError("the export failed")

    sampler = Sampler()
    sampler.fail = True
    with pytest.raises(ArithmeticError, match="the loader failed"):
        CheckpointEngineManager(model=FailsLate(), sampler=sampler, bucket_size_bytes=64).sync_weights()


def test_weights_are_exported_once_for_each_sync():
    trainer = Trainer()
    manager = CheckpointEngineManager(model=trainer, sampler=Sampler())
    manager.sync_weights()
    manager.sync_weights()
    assert trainer.iterations == 2


def test_two_managers_can_serve_one_trainer_in_turn():
    trainer, first, second = Trainer(), Sampler(), Sampler()
    CheckpointEngineManager(model=trainer, sampler=first).sync_weights()
    CheckpointEngineManager(model=trainer, sampler=second).sync_weights()
    assert first.sample() == second.sample() == 9.0


def test_a_checkpoint_folder_is_a_source(tmp_path):
    save_file({"b": torch.ones(3, 3), "a": torch.full((4,), 2.0)}, tmp_path / "model.safetensors")
    sampler = Sampler()
    report = CheckpointEngineManager(model=CheckpointFolder(tmp_path), sampler=sampler).sync_weights()
    assert report.num_tensors == 2
    assert sampler.sample() == 17.0
    with pytest.raises(ChannelMisuse, match=r"has no \*.safetensors file"):
        CheckpointFolder(tmp_path / "nothing")


def test_misuse_is_an_early_error_that_says_what_to_do():
    with pytest.raises(ChannelMisuse, match="model=Sampler cannot take part in a weight transfer: its class must inherit WeightSender"):
        CheckpointEngineManager(model=Sampler(), sampler=Sampler())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ChannelMisuse, match=r"sampler=Trainer .* must inherit WeightReceiver"):
        CheckpointEngineManager(model=Trainer(), sampler=Trainer())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ChannelMisuse, match="timeout_s is 0"):
        CheckpointEngineManager(model=Trainer(), sampler=Sampler(), timeout_s=0)
    with pytest.raises(ChannelMisuse, match=r"no transport is called 'pigeon'; known are \['cuda_ipc', 'folder', 'gloo', 'memory', 'nccl', 'ray'\]"):
        make_transport("pigeon")
    transport = make_transport("memory")
    with pytest.raises(ChannelMisuse, match="the memory transport does not leave it, use gloo"):
        transport.connect("memory-none", 1, 2, Deadline(1))


def test_a_module_and_a_state_dict_are_sources_and_a_shared_weight_comes_once():
    table = torch.nn.Embedding(5, 4)
    module = torch.nn.Sequential(table, torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
    module[1].weight = table.weight
    sampler = Sampler()
    CheckpointEngineManager(model=StateDict(module), sampler=sampler, bucket_size_bytes=64).sync_weights()
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items() if name != "1.weight"}
    assert list(sampler.weights) == list(expected)
    assert all(torch.equal(sampler.weights[name], tensor) for name, tensor in expected.items())
    source = StateDict(module)
    with torch.no_grad():
        table.weight += 1  # what is sent are the weights of that moment
    assert torch.equal(dict(source.iter_weights())["0.weight"], expected["0.weight"] + 1)
    assert [(spec.name, spec.shape) for spec in source.weight_specs()] == [(name, tuple(tensor.shape)) for name, tensor in expected.items()]
    assert [name for name, _ in StateDict({"b": torch.ones(1), "a": torch.ones(2)}).iter_weights()] == ["b", "a"]
