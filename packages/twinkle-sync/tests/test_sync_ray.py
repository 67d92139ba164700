"""The manager between groups on a real Ray: two trainer ranks, two sampler ranks."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from twinkle_mesh import DeviceGroup
from twinkle_remote import RemoteError, WorkerDiedError, initialize, remote_class, remote_function, rendezvous
from twinkle_sync import ChannelMisuse, CheckpointEngineManager, TransferCorrupted, WeightReceiver, WeightSender, WeightsUnavailable


@remote_class()
class Trainer(WeightSender):
    """Holds half of each tensor on each of two ranks: exporting is collective, as in a tensor-parallel trainer."""

    def __init__(self) -> None:
        meeting = rendezvous()
        assert meeting is not None
        self.rank = meeting.rank
        store = dist.TCPStore(meeting.host, meeting.port, is_master=self.rank == 0, wait_for_workers=False, master_listen_fd=meeting.listen_fd)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=meeting.world_size)
        self.value = 0.0
        self.fail = ""
        self.exports = 0

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.exports += 1
        for index in range(4):
            shard = torch.full((100,), self.value + 10 * self.rank + index)
            parts = [torch.empty_like(shard) for _ in range(2)]
            dist.all_gather(parts, shard)
            if self.fail == "differ":
                parts[0] += self.rank
            elif self.fail and index == 2:
                if self.fail == "die":
                    os._exit(1)
                raise ZeroDivisionError("the export failed")
            yield f"w{index}", torch.cat(parts)

    @remote_function(dispatch="all", lazy_collect=False)
    def set(self, value: float, fail: str = "", every_rank_has_weights: bool = False) -> None:
        self.value, self.fail, self.every_rank_has_weights = value, fail, every_rank_has_weights

    @remote_function(dispatch="all", lazy_collect=False)
    def count_exports(self) -> int:
        return self.exports


@remote_class()
class Sampler(WeightReceiver):
    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.fail = ""
        self.group_id = 0

    def load_weights(self, tensors: Any, version: int) -> None:
        self.group_id = id(self._receive_transport)
        for name, tensor in tensors:
            if self.fail and name == "w2":
                if self.fail == "die":
                    os._exit(1)
                raise ArithmeticError("the loader failed")
            self.weights[name] = tensor

    @remote_function(dispatch="all", lazy_collect=False)
    def set(self, fail: str) -> None:
        self.fail = fail

    @remote_function(dispatch="all", lazy_collect=False)
    def look(self) -> tuple[dict[str, list[float]], int]:
        self.require_weights()
        return {name: [tensor[0].item(), tensor[-1].item()] for name, tensor in self.weights.items()}, self.group_id


def _expected(value: float) -> dict[str, list[float]]:
    return {f"w{index}": [value + index, value + 10 + index] for index in range(4)}


@pytest.fixture(scope="module")
def trainer():
    groups = [DeviceGroup(name, 2, "cpu") for name in ("trainer", "sampler")]
    with initialize("ray", groups=groups, threads_per_worker=1, call_timeout_s=100):
        yield _placed(Trainer, "trainer")


def _placed(cls: Any, group: str, **options: Any) -> Any:
    return cls(remote_group=group, **options)


def _manager(trainer: Any, sampler: Any, transport: str | None = None, **options: Any) -> CheckpointEngineManager:
    return CheckpointEngineManager(model=trainer, sampler=sampler, transport=transport, **{"bucket_size_bytes": 1024, "timeout_s": 20, **options})


@pytest.mark.timeout(240)
def test_weights_travel_through_the_object_store_and_a_failure_there_is_an_error_in_time(trainer):
    sampler = _placed(Sampler, "sampler")
    manager = _manager(trainer, sampler, "ray")
    for version, value in ((1, 3.0), (2, 4.0)):
        trainer.set(value)
        assert manager.sync_weights().version == version
        assert [weights for weights, _ in sampler.look()] == [_expected(value)] * 2
    trainer.set(8.0, "raise")
    with _within(15), pytest.raises(ZeroDivisionError, match="the export failed"):
        manager.sync_weights()
    with pytest.raises(WeightsUnavailable, match="ZeroDivisionError: the export failed"):
        sampler.look()
    trainer.set(9.0)
    manager.sync_weights()
    assert [weights for weights, _ in sampler.look()] == [_expected(9.0)] * 2


@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["gloo", *(pytest.param(name, marks=pytest.mark.full) for name in ("folder", "ray"))])
def test_two_trainer_ranks_send_to_a_sampler_rank_each_and_have_to_agree(trainer, transport):
    sampler = _placed(Sampler, "sampler", on_failure="restart")
    trainer.set(2.0)
    with pytest.raises(ChannelMisuse, match="num_senders is 2, and 1 of 2 ranks of the trainer have whole weights"):
        _manager(trainer, sampler, transport, num_senders=2).sync_weights()
    manager = _manager(trainer, sampler, transport, num_senders=2, timeout_s=200)
    modes: list[tuple[float, Any, str]] = [(3.0, "full", "full"), (4.0, "delta", "full"), (5.0, "delta", "delta")]
    for value, mode, sent in modes:
        trainer.set(value, every_rank_has_weights=True)
        assert manager.sync_weights(mode).mode == sent
        assert [weights for weights, _ in sampler.look()] == [_expected(value)] * 2
    trainer.set(6.0, "differ", every_rank_has_weights=True)  # the control: what rank 1 yields arrives, at one of the two
    with pytest.raises(TransferCorrupted, match="2 ranks of the sampler should have version 4"):
        manager.sync_weights()
    trainer.set(7.0, "raise", every_rank_has_weights=True)
    with _within(100), pytest.raises(ZeroDivisionError, match="the export failed"):
        manager.sync_weights()
    with pytest.raises(WeightsUnavailable, match="ZeroDivisionError: the export failed"):
        sampler.look()
    trainer.set(8.0, every_rank_has_weights=True)
    manager.sync_weights()
    # A sampler that is killed between two syncs: what takes its place is not part of the connection, and nobody waits for it there.
    os.kill(sampler.weight_receiver_info()[1].pid, signal.SIGKILL)
    with pytest.raises(RemoteError):
        _look_for_ever(sampler)
    with _within(100):
        manager.sync_weights()
    assert [weights for weights, _ in sampler.look()] == [_expected(8.0)] * 2
    trainer.set(9.0)


@pytest.mark.timeout(240)
def test_all_sampler_ranks_follow_all_trainer_ranks_and_every_failure_is_an_error_in_time(trainer):
    sampler = _placed(Sampler, "sampler")
    manager = _manager(trainer, sampler)
    before = trainer.count_exports()[0]
    channels = set()
    for version, value in ((1, 5.0), (2, 7.0)):
        trainer.set(value)
        report = manager.sync_weights()
        assert (report.version, report.num_tensors, report.size_bytes) == (version, 4, 3200)
        for weights, channel in sampler.look():
            assert weights == _expected(value)
            channels.add(channel)
    assert len(channels) <= 2  # one a process: the group was set up once
    assert [count - before for count in trainer.count_exports()] == [2, 2]
    assert sampler.weight_version() == 2

    # A trainer whose export fails: its own exception, and a sampler that refuses.
    trainer.set(8.0, "raise")
    with _within(15), pytest.raises(ZeroDivisionError, match="the export failed"):
        manager.sync_weights()
    assert manager.is_stale
    with pytest.raises(WeightsUnavailable, match="ZeroDivisionError: the export failed"):
        sampler.look()
    trainer.set(9.0)
    assert manager.sync_weights().version == 4
    assert [weights for weights, _ in sampler.look()] == [_expected(9.0)] * 2

    # Another manager takes the connection's place, and this one makes it anew.
    with _within(15):
        _manager(trainer, sampler).sync_weights()
        manager.sync_weights()
    before += 2

    # A loader that fails: the same, and the trainer is free again at once.
    sampler.set("raise")
    with _within(15), pytest.raises(ArithmeticError, match="the loader failed"):
        manager.sync_weights()
    assert [count - before for count in trainer.count_exports()] == [5, 5]
    sampler.set("")
    trainer.set(11.0)
    manager.sync_weights()
    assert [weights for weights, _ in sampler.look()] == [_expected(11.0)] * 2

    # Samplers that die, and then a trainer with new samplers.
    sampler.set("die")
    with _within(40), pytest.raises(WorkerDiedError):
        manager.sync_weights()
    assert manager.is_stale
    sampler = _placed(Sampler, "sampler")
    manager = _manager(trainer, sampler)
    manager.sync_weights()
    assert [weights for weights, _ in sampler.look()] == [_expected(11.0)] * 2
    trainer.set(1.0, "die")
    with _within(40), pytest.raises(WorkerDiedError):
        manager.sync_weights()


def _look_for_ever(sampler: Any) -> None:
    while True:
        sampler.look()


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds
