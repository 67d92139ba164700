from typing import Any

import numpy as np
import pytest
import torch

from twinkle_data import InputFeature, InputProcessor, ModelOutput
from twinkle_mesh import DeviceMesh
from twinkle_train import (
    ConfigError,
    InputError,
    collect_model_output,
    loss_input_from_batch,
    num_micro_batches,
    split_micro_batches,
    unshift_rows,
)
from twinkle_train._micro_batches import split_by_tokens, split_rows


def rows(count: int) -> list[InputFeature]:
    return [InputFeature(input_ids=np.arange(2, 5 + index)) for index in range(count)]


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("size", [None, 1, 2, 3, 8])
def test_rows_are_split_in_order_and_none_is_lost(count, size):
    features = rows(count)
    parts = split_micro_batches(features, size)
    assert [feature for part in parts for feature in part] == features
    assert len(parts) == num_micro_batches(count, size)
    assert all(1 <= len(part) <= (size or count) for part in parts)


@pytest.mark.parametrize(("total", "data_ranks", "size"), [(7, 2, 1), (7, 2, 2), (9, 4, 1), (5, 4, 2), (8, 2, 2), (10, 3, None)])
def test_data_ranks_with_unequal_rows_run_equally_many_micro_batches(total, data_ranks, size):
    features = rows(total)
    mesh = DeviceMesh.from_sizes(dp_size=data_ranks)
    shares = [features[mesh.get_slice(total, rank)] for rank in range(data_ranks)]
    count = max(num_micro_batches(len(share), size) for share in shares)
    for share in shares:
        parts = split_micro_batches(share, size, count=count)
        assert len(parts) == count
        flat = [feature for part in parts for feature in part]
        assert flat[: len(share)] == share
        for filler in flat[len(share) :]:
            assert not InputProcessor()([filler]).loss_mask.any(), "a filler would be trained on"


def test_wrong_sizes_and_no_rows_are_refused():
    with pytest.raises(ConfigError, match="micro_batch_size"):
        split_micro_batches(rows(2), 0)
    with pytest.raises(InputError, match="no rows"):
        split_micro_batches([])
    with pytest.raises(ConfigError, match="cannot hold"):
        split_micro_batches(rows(4), 1, count=2)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("count", [None, 7, 11])
def test_rows_by_a_budget_of_tokens_stay_within_it_and_come_back_in_order(padded, count):
    features = rows(9)  # of 3 to 11 tokens
    parts, order = split_by_tokens(features, 14, padded=padded, count=count)
    assert count is None or len(parts) == count
    flat = [feature for part in parts for feature in part]
    assert sorted(order) == list(range(len(flat)))
    for index, feature in zip(order, flat, strict=True):
        if index < 9:
            assert feature is features[index]
        else:
            assert not InputProcessor()([feature]).loss_mask.any(), "a filler would be trained on"
    for part in parts:
        lengths = [len(feature) for feature in part]
        assert (len(part) * max(lengths) if padded else sum(lengths)) <= 14
    batches = [InputProcessor()(part) for part in parts]
    back = split_rows(batches, [torch.as_tensor(batch.input_ids) for batch in batches], 9, order)
    assert all(np.array_equal(mine, feature.input_ids) for mine, feature in zip(back, features, strict=True))


def test_budgets_that_cannot_be_kept_are_refused():
    with pytest.raises(InputError, match=r"inputs\[2\] has 5 tokens, and a micro-batch at most micro_batch_tokens=4"):
        split_by_tokens(rows(3), 4, padded=True)
    with pytest.raises(ConfigError, match="micro_batch_tokens must be >= 1"):
        split_by_tokens(rows(3), 0, padded=True)
    with pytest.raises(InputError, match="no rows"):
        split_by_tokens([], 4, padded=True)


def test_fields_that_only_some_rows_have_are_refused_even_across_micro_batches():
    with_logprobs = InputFeature(input_ids=[1, 2, 3], logprobs=[0, -1, -1])
    with pytest.raises(InputError, match="row 1 has no logprobs"):
        split_micro_batches([with_logprobs, *rows(1)], 1)


def test_the_loss_sees_shifted_values_and_outputs_come_back_aligned():
    features = [
        InputFeature(
            input_ids=[5, 6, 7, 8],
            labels=[-100, -100, 7, 8],
            loss_weights=[1, 1, 1, 0.5],
            logprobs=[0, 0, -0.7, -0.8],
            ref_logprobs=[0, 0, -1.7, -1.8],
            advantages=2.0,
            temperature=0.5,
        ),
        InputFeature(input_ids=[5, 6], labels=[-100, 6], logprobs=[0, -0.6], ref_logprobs=[0, -1.6], advantages=[0.0, 3.0], temperature=0.5),
    ]
    batch = InputProcessor()(features)
    logprobs_BT = torch.arange(8.0).reshape(2, 4)
    inputs: Any = loss_input_from_batch(batch, logprobs_BT, None)
    assert inputs.mask_BT.tolist() == [[0, 1, 0.5, 0], [1, 0, 0, 0]]
    np.testing.assert_allclose(inputs.old_logprobs_BT[inputs.mask_BT > 0], [-0.7, -0.8, -0.6], rtol=1e-6)
    np.testing.assert_allclose(inputs.ref_logprobs_BT[inputs.mask_BT > 0], [-1.7, -1.8, -1.6], rtol=1e-6)
    assert inputs.advantages_BT[inputs.mask_BT > 0].tolist() == [2, 2, 3]
    assert inputs.temperature_BT[0].tolist() == [0.5] * 4
    first, second = unshift_rows([batch], [logprobs_BT], 2)
    assert first.tolist() == [0, 0, 1, 2]
    assert second.tolist() == [0, 4]
    # Values of the tokens themselves are not shifted, and may have axes of their own.
    (only,) = split_rows([batch], [torch.stack([logprobs_BT, -logprobs_BT], -1)], 1)
    assert only.tolist() == [[0, 0], [1, -1], [2, -2], [3, -3]]


def test_negative_loss_weights_are_refused():
    batch = InputProcessor()([InputFeature(input_ids=[1, 2], loss_weights=[1, -1])])
    with pytest.raises(InputError, match="negative"):
        loss_input_from_batch(batch, torch.zeros(1, 2))


def test_outputs_of_a_mesh_are_joined_once_a_data_group_in_data_order():
    mesh = DeviceMesh.from_sizes(dp_size=2, pp_size=2, tp_size=2)
    results = []
    for rank in range(8):
        last = mesh.is_last_stage(rank)
        mine = [np.full(3, 10 * mesh.data_rank(rank) + i, np.float32) for i in range(2)]
        results.append(ModelOutput(loss=1.5, loss_weight=12.0, logprobs=mine if last else None, entropy=None, metrics={"entropy": 2.0}))
    output: Any = collect_model_output(results, mesh)
    assert [row[0] for row in output.logprobs] == [0, 1, 10, 11]
    assert (output.loss, output.loss_weight, output.metrics, output.entropy) == (1.5, 12.0, {"entropy": 2.0}, None)


def test_outputs_that_some_data_ranks_lack_are_refused():
    some = ModelOutput(logprobs=[np.zeros(2, np.float32)])
    with pytest.raises(InputError, match="1 of 2 data ranks returned no logprobs"):
        collect_model_output([some, ModelOutput()], DeviceMesh.from_sizes(dp_size=2))
    with pytest.raises(InputError, match="2 results for a mesh of 4"):
        collect_model_output([some, some], DeviceMesh.from_sizes(dp_size=4))
    joined: Any = collect_model_output([some, some], None)
    assert len(joined.logprobs) == 2
