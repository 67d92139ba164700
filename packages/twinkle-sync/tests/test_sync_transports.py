"""What every transport between processes must do: one sender, two receivers, real processes."""

import pytest
import torch

from twinkle_sync import ChannelMisuse, PeerFailed, SyncError, TransferCorrupted, TransferTimeout, make_transport

full = pytest.mark.full
others = [pytest.param("ray", marks=full), *(pytest.param(name, marks=[full, pytest.mark.gpu]) for name in ("cuda_ipc", "nccl"))]
most = pytest.mark.parametrize("transport", ["gloo", "folder", *others])
gloo_by_default = pytest.mark.parametrize("transport", ["gloo", pytest.param("folder", marks=full), *others])


@most
def test_all_receivers_get_every_version_over_one_connection(run_ranks, transport):
    sender, *receivers = run_ranks("three_syncs", transport=transport)
    assert sender.error is None
    for receiver in receivers:
        results, groups, has_default_group = receiver.value
        assert [equal for _, equal in results] == [True] * 3
        assert [receipt.version for receipt, _ in results] == [1, 2, 3]
        assert len({receipt.digest for receipt, _ in results}) == 3
        assert groups == 1
        assert not has_default_group
    assert receivers[0].value[0] == receivers[1].value[0]


@pytest.mark.parametrize("transport", ["gloo"])
def test_a_transfer_needs_two_buckets_of_memory_on_either_side(run_ranks, transport):
    sender, receiver = run_ranks("peak_memory", 2, transport=transport, bucket_size_bytes=24 << 20)
    assert 0.9 < sender.value < 2.3
    assert 0.9 < receiver.value < 2.3


def test_the_default_process_group_is_left_alone(run_ranks, tmp_path):
    outcomes = run_ranks("beside_a_default_group", store_file=str(tmp_path / "store"))
    assert [outcome.value for outcome in outcomes] == [(9.0, True)] * 3


def test_parts_of_a_tensor_are_sent_whole(run_ranks, tmp_path):
    outcomes = run_ranks("parts_of_a_tensor", 2, store_file=str(tmp_path / "store"))
    assert [outcome.value for outcome in outcomes] == [([("w", (6, 4)), ("b", (2,))], True, "Tensor")] * 2


@most
def test_a_source_that_raises_tells_the_receivers_and_the_next_sync_works(run_ranks, transport):
    sender, *receivers = run_ranks("source_raises_then_recovers", transport=transport)
    assert sender.value == ("RuntimeError: the trainer's export failed", False, True)
    for receiver in receivers:
        first, refused, equal = receiver.value
        assert first.startswith("PeerFailed")
        assert refused
        assert equal


@most
def test_a_lost_bucket_is_noticed_and_nobody_hangs(run_ranks, transport):
    sender, *receivers = run_ranks("lost_bucket", deadline_s=30, transport=transport)
    assert all(outcome.seconds < 15 for outcome in (sender, *receivers))
    assert isinstance(sender.error, SyncError)
    errors = [receiver.error for receiver in receivers]
    assert all(isinstance(error, SyncError) for error in errors)
    assert any(isinstance(error, TransferCorrupted) and "was lost" in str(error) for error in errors)


@gloo_by_default
def test_a_lost_end_is_an_error_at_the_deadline_that_names_the_message(run_ranks, transport):
    _, *receivers = run_ranks("lost_end", deadline_s=30, transport=transport)
    for receiver in receivers:
        assert isinstance(receiver.error, TransferTimeout | PeerFailed)
        assert "message 4" in str(receiver.error)
        assert receiver.seconds < 15
    assert any(isinstance(receiver.error, TransferTimeout) for receiver in receivers)


@gloo_by_default
def test_a_receiver_that_dies_is_an_error_for_the_sender(run_ranks, transport):
    sender, survivor, dead = run_ranks("receiver_dies", deadline_s=30, transport=transport)
    assert dead.exitcode == 3
    assert isinstance(sender.error, SyncError)
    assert isinstance(survivor.error, SyncError)
    assert max(sender.seconds, survivor.seconds) < 15


@gloo_by_default
def test_a_sender_that_dies_is_an_error_for_the_receivers(run_ranks, transport):
    dead, *receivers = run_ranks("sender_dies", deadline_s=30, transport=transport)
    assert dead.exitcode == 3
    for receiver in receivers:
        assert isinstance(receiver.error, SyncError)
        assert receiver.seconds < 15


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")
def test_a_transport_of_gpus_says_so_without_one(transport):
    with pytest.raises(ChannelMisuse, match=f"the transport {transport} needs a CUDA device in this process; use gloo"):
        make_transport(transport)


@gloo_by_default
@pytest.mark.parametrize("scenario", ["one_never_comes", "receiver_is_slow", pytest.param("sender_is_slow", marks=full)])
def test_every_wait_ends_at_the_deadline(run_ranks, scenario, transport):
    outcomes = run_ranks(scenario, deadline_s=30, transport=transport)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert len(errors) >= 2
    assert all(isinstance(error, SyncError) for error in errors)
    assert any(isinstance(error, TransferTimeout) for error in errors)
    assert all(outcome.seconds < 15 for outcome in outcomes)
