"""What several ranks do together, in real processes over gloo."""

import os
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from twinkle_mesh import DeviceMesh
from twinkle_train import (
    CrossEntropyLoss,
    InputError,
    LossOutput,
    MaxMetric,
    Metric,
    PeerError,
    ProcessGroupError,
    ReduceGroups,
    Totals,
    init_process_group,
    reduce_max,
    reduce_sum,
    reduce_totals,
)
from twinkle_train.testing import ReferenceTrainer, conformance, random_features, run_ranks


class DataParallel(ReferenceTrainer):
    """The reference on several ranks, each with its share of the rows: gradients are summed."""

    def __init__(self, path, *, equal_micro_batches=False, reduces=True):
        init_process_group("cpu", 60)
        super().__init__(path)
        self._groups = ReduceGroups(data=dist.group.WORLD)
        self._equal_micro_batches = equal_micro_batches
        self._reduces = reduces

    def _run(self, adapter_name, batches, compute_loss):
        if self._equal_micro_batches:
            # A collective in each micro-batch, as in expert parallel models: unequal numbers would hang.
            for _ in batches:
                dist.all_reduce(torch.zeros(1))
        return super()._run(adapter_name, batches, compute_loss)

    def _reduce_gradients(self, adapter_name):
        for parameter in self._model.parameters() if self._reduces else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def save(self, path, **options):
        if dist.get_rank() == 0:
            super().save(path, **options)
        dist.barrier()

    def _write_checkpoint(self, target, info, *, background):
        if dist.get_rank() == 0:
            super()._write_checkpoint(target, info, background=background)
        dist.barrier()


def _conform(path, saved, equal_micro_batches):
    trainer = DataParallel(path, equal_micro_batches=equal_micro_batches)
    mesh = DeviceMesh.from_sizes(dp_size=dist.get_world_size())
    conformance.run_all(trainer, ReferenceTrainer(path), saved, share_of=lambda n: mesh.get_slice(n, dist.get_rank()))


@pytest.mark.parametrize("equal_micro_batches", [False, True])
def test_a_data_parallel_trainer_conforms(checkpoint, tmp_path, equal_micro_batches):
    run_ranks(_conform, 2, checkpoint, tmp_path / "saved", equal_micro_batches)


def _unreduced(path):
    trainer = DataParallel(path, reduces=False)
    rank = dist.get_rank()
    rows = random_features()
    share = slice(3 * rank, 3 * rank + 3)
    # The loss is global all the same: only gradients tell.
    trainer.set_loss("cross_entropy")
    reference = ReferenceTrainer(path)
    reference.set_loss("cross_entropy")
    assert trainer.forward_backward(rows[share]).loss == pytest.approx(reference.forward_backward(rows).loss, abs=1e-6)
    with pytest.raises(AssertionError, match="gradients of cross_entropy"):
        conformance.check_loss_and_gradients(trainer, reference, rows, share=share)


def test_gradients_that_are_not_summed_over_data_ranks_fail_the_suite(checkpoint):
    run_ranks(_unreduced, 2, checkpoint)


def _unequal_rows(path):
    trainer = DataParallel(path, equal_micro_batches=True)
    rank = dist.get_rank()
    rows = random_features((5, 6, 7, 8, 9, 10, 11))
    mesh = DeviceMesh.from_sizes(dp_size=2)
    reference = ReferenceTrainer(path)
    share = mesh.get_slice(len(rows), rank)
    conformance.check_loss_and_gradients(trainer, reference, rows, share=share, micro_batch_size=1)
    conformance.check_logprobs(trainer, reference, rows, share=share, micro_batch_size=1)


def test_data_ranks_with_unequal_rows_neither_hang_nor_count_fillers(checkpoint):
    run_ranks(_unequal_rows, 2, checkpoint)


def _failing_loss(path):
    trainer = DataParallel(path)
    rank = dist.get_rank()
    calls = []

    def loss(inputs):
        calls.append(1)
        if rank == 1 and len(calls) == 1:
            raise ZeroDivisionError("only here")
        return CrossEntropyLoss()(inputs)

    rows = random_features([5, 6])[rank : rank + 1]
    trainer.set_loss(loss)
    for attempt in (lambda: trainer.forward_backward(rows), lambda: (trainer.forward(rows), trainer.calculate_loss())):
        calls.clear()
        start = time.monotonic()
        with pytest.raises(ZeroDivisionError if rank == 1 else PeerError):
            attempt()
        assert time.monotonic() - start < 20, "the other rank waited in a collective"
        trainer.zero_grad()
    # Nothing is out of step afterwards.
    return trainer.forward_backward(rows).loss


def test_a_loss_that_fails_on_one_rank_stops_all_and_none_hangs(checkpoint):
    first, second = run_ranks(_failing_loss, 2, checkpoint)
    assert first == second


def _unusable_rows(path):
    trainer = DataParallel(path, equal_micro_batches=True)
    rank = dist.get_rank()
    trainer.set_loss("cross_entropy")
    rows = random_features([5, 6])
    unusables: list[list[Any]] = [[], ["no row"]]
    for attempt in (trainer.forward, trainer.forward_only, trainer.forward_backward):
        for unusable in unusables:
            start = time.monotonic()
            with pytest.raises(InputError if rank == 1 else PeerError):
                attempt(unusable if rank == 1 else rows)
            assert time.monotonic() - start < 20, "the other rank waited in a collective"
    return trainer.forward_backward(rows[rank : rank + 1]).loss


def test_rows_that_one_rank_cannot_use_stop_all_and_none_hangs(checkpoint):
    first, second = run_ranks(_unusable_rows, 2, checkpoint)
    assert first == second


def _pipelines():
    """Four ranks: two data ranks (even, odd), two stages (0 and 1 first, 2 and 3 last)."""
    init_process_group("cpu", 60)
    rank = dist.get_rank()
    pipelines: list[Any] = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    data: list[Any] = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return rank, ReduceGroups(data=data[rank // 2], pipeline=pipelines[rank % 2], last_stage=rank % 2 + 2)


def _reduce():
    rank, groups = _pipelines()
    local = None
    if groups.is_last_stage:
        part = rank - 1.0
        local = Totals(loss_sum=part, weight=2 * part, metrics={"mean": Metric(part, part * part), "max": MaxMetric(-part), "a": Metric(1.0, 4.0)})
    totals = reduce_totals(local, groups)
    return totals, reduce_sum([rank, 1.0], groups), reduce_max([rank], groups)


def test_totals_are_reduced_over_data_ranks_and_known_to_all_stages():
    results = run_ranks(_reduce, 4)
    for rank, (totals, summed, largest) in enumerate(results):
        assert (totals.loss_sum, totals.weight, totals.loss) == (3.0, 6.0, 0.5)
        assert totals.metric_values() == {"mean": pytest.approx(3 / 5), "max": -1.0, "a": 0.25}
        peer = rank ^ 1
        assert summed == [rank + peer, 2.0]
        assert largest == [max(rank, peer)]


def _reduce_failing():
    rank, groups = _pipelines()
    error = KeyError("here") if rank == 3 else None
    with pytest.raises(KeyError if rank == 3 else PeerError):
        reduce_totals(Totals() if groups.is_last_stage else None, groups, error=error)
    metrics = {"a": Metric(1.0, 1.0)} if rank == 2 else {"a": MaxMetric(1.0)}
    with pytest.raises(PeerError, match="different metrics"):
        reduce_totals(Totals(metrics=metrics) if groups.is_last_stage else None, groups)
    return reduce_totals(Totals(1.0, 1.0) if groups.is_last_stage else None, groups).loss_sum


def test_a_failure_on_one_last_stage_reaches_every_rank():
    assert run_ranks(_reduce_failing, 4) == [2.0] * 4


def test_totals_of_one_process_need_no_process_group():
    output = LossOutput(torch.tensor(3.0), torch.tensor(2.0), {"x": Metric(torch.tensor(1.0), torch.tensor(4.0)), "y": MaxMetric(torch.tensor(2.0))})
    totals = reduce_totals(Totals.of([output, output]), ReduceGroups())
    assert (totals.loss, totals.weight, totals.metric_values()) == (1.5, 4.0, {"x": 0.25, "y": 2.0})
    assert np.isnan(Totals().loss)
    with pytest.raises(KeyError):
        reduce_totals(None, ReduceGroups(), error=KeyError("x"))


def _twice():
    init_process_group("cpu", 60)
    first = dist.group.WORLD
    init_process_group("cpu", 60)
    assert dist.group.WORLD is first
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_backend(), dist.get_world_size(), total.item()


def test_ranks_of_a_launcher_meet_and_meeting_again_does_nothing():
    assert run_ranks(_twice, 3) == [("gloo", 3, 6.0)] * 3


def _alone():
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    return _twice()


def test_one_process_without_a_launcher_is_a_group_of_one():
    assert run_ranks(_alone, 1) == [("gloo", 1, 1.0)]


def _too_few():
    os.environ["WORLD_SIZE"] = "2"
    start = time.monotonic()
    with pytest.raises(ProcessGroupError, match=r"did not meet at .* within 1 s"):
        init_process_group("cpu", 1)
    return time.monotonic() - start


def test_a_rank_that_never_comes_is_an_error_after_the_timeout():
    assert run_ranks(_too_few, 1)[0] < 20


def _refusals():
    for device_type, message in (("npu", "known are cpu, cuda"), ("cuda", "no CUDA device")):
        if device_type == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(ProcessGroupError, match=message):
            init_process_group(device_type, 10)
    with pytest.raises(ProcessGroupError, match="timeout_s"):
        init_process_group("cpu", 0)
    init_process_group("cpu", 10)
    with pytest.raises(ProcessGroupError, match="'gloo' exists already"):
        init_process_group("cuda", 10)


def test_device_types_that_do_not_fit_are_refused():
    run_ranks(_refusals, 1)


def _die():
    os._exit(3)


def _raise_on_one():
    if os.environ["RANK"] == "1":
        raise KeyError("only rank 1")
    return 0


def _sleep():
    time.sleep(60)


def test_ranks_that_fail_die_or_hang_are_told_apart():
    with pytest.raises(AssertionError, match=r"rank 0 ended without a result, with exit code 3"):
        run_ranks(_die, 1)
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*KeyError: 'only rank 1'") as failed:
        run_ranks(_raise_on_one, 2)
    assert "rank 0" not in str(failed.value)
    start = time.monotonic()
    with pytest.raises(AssertionError, match="rank 0 had no result after 1 s"):
        run_ranks(_sleep, 1, timeout_s=1)
    assert time.monotonic() - start < 20
    with pytest.raises(ValueError, match="top level of a file"):
        run_ranks(lambda: None, 1)


def test_ranks_do_not_inherit_the_callers_process_group():
    created = not dist.is_initialized()  # another package's tests may have left theirs in this process
    if created:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert run_ranks(_alone, 1) == [("gloo", 1, 1.0)]
    finally:
        if created:
            dist.destroy_process_group()
