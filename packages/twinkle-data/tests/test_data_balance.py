"""Sharing work out among data ranks, and micro-batches by tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_data import (
    DataLoader,
    DatasetError,
    DeviceMeshSampler,
    InputFeature,
    PackingDataset,
    balanced_order,
    plan_micro_batches,
    sequence_costs,
)
from twinkle_mesh import DeviceMesh


def loads(costs, order, num_ranks):
    mesh = DeviceMesh.from_sizes(dp_size=num_ranks)
    return np.array([np.asarray(costs)[order[mesh.get_slice(len(order), rank)]].sum(0) for rank in range(num_ranks)])


@settings(deadline=None, max_examples=40)
@given(costs=st.lists(st.floats(0, 100), max_size=40), num_ranks=st.integers(1, 9))
def test_balancing_is_a_permutation_that_lowers_no_evenness(costs, num_ranks):
    order = balanced_order(costs, num_ranks)
    assert sorted(order.tolist()) == list(range(len(costs)))
    assert order.tolist() == balanced_order(costs, num_ranks).tolist()
    if len(costs) >= num_ranks:
        balanced, before = (loads(costs, rows, num_ranks) for rows in (order, np.arange(len(costs))))
        assert balanced.max() <= max(before.max(), np.sort(costs)[-1] + balanced.mean()) + 1e-6


def test_packs_of_lognormal_rows_cost_eight_ranks_the_same():
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 20_000), 1, 4096).astype(int)
    costs = PackingDataset(Lengths(lengths), 4096, lengths=lengths).row_costs("cost")
    mesh = DeviceMesh.from_sizes(dp_size=8)

    def ratios(given_costs):
        sampler = DeviceMeshSampler(len(costs), batch_size=64, device_mesh=mesh, slice_batches=False, costs=given_costs)
        each = [loads(costs, batch, 8) for batch in sampler]
        return [load.max() / load.mean() for load in each]

    assert max(ratios(costs)) < 1.02
    assert np.mean(ratios(None)) > 1.15, "the order of the packs balances nothing"


class Lengths(list):
    """Rows that nobody reads."""


def test_tokens_and_cost_are_balanced_at_once():
    lengths = np.clip(np.random.default_rng(1).lognormal(6, 1, 512), 1, 4096)
    both = np.stack([sequence_costs(lengths, "tokens"), sequence_costs(lengths, "cost")], axis=1)
    found = loads(both, balanced_order(both, 8), 8)
    assert (found.max(0) / found.mean(0)).max() < 1.02


def test_a_loader_balances_packs_by_itself_and_plain_rows_when_told(monkeypatch):
    lengths = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    rows = [InputFeature(input_ids=np.ones(n, int)) for n in lengths]
    mesh = DeviceMesh.from_sizes(dp_size=2)
    monkeypatch.setenv("WORLD_SIZE", "2")

    def tokens(dataset, **options):
        found = []
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            loader = DataLoader(dataset, batch_size=8, device_mesh=mesh, **options)
            found.append([sum(map(len, batch)) for batch in loader])
        return found

    first, second = tokens(rows, balance=lengths)
    assert first == second
    first, second = tokens(rows)
    assert first != second, "rows stay in their order"
    packed = PackingDataset(rows, 12)
    first, second = tokens(packed, balance="tokens")
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) <= 1
    tokens(packed)
    with pytest.raises(DatasetError, match="needs the lengths of all rows"):
        tokens(rows, balance="cost")
    with pytest.raises(DatasetError, match="balance is 'even'"):
        tokens(packed, balance="even")
    with pytest.raises(DatasetError, match="costs of 3 rows, and 32 rows"):
        tokens(rows, balance=[1, 2, 3])


def test_costs_that_are_none_are_refused():
    with pytest.raises(DatasetError, match="negative or not finite"):
        balanced_order([1, float("nan")], 2)
    with pytest.raises(DatasetError, match="there is no cost 'time'"):
        sequence_costs([1], "time")  # pyright: ignore[reportArgumentType]


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=40), padded=st.booleans(), data=st.data())
def test_micro_batches_hold_every_row_within_the_budget(lengths, padded, data):
    plan = plan_micro_batches(lengths, 16, padded=padded)
    count = data.draw(st.none() | st.integers(len(plan), len(lengths)))
    plan = plan_micro_batches(lengths, 16, padded=padded, count=count)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert count is None or len(plan) == count
    for rows in plan:
        own = [lengths[row] for row in rows]
        assert (len(own) * max(own) if padded else sum(own)) <= 16


def test_micro_batches_that_cannot_be_made_are_refused():
    with pytest.raises(DatasetError, match="row 1 has 9 tokens, a micro-batch at most 8"):
        plan_micro_batches([1, 9], 8)
    with pytest.raises(DatasetError, match="2 rows need 1 micro-batches of 8 tokens; 3 cannot be made"):
        plan_micro_batches([1, 2], 8, count=3)
    with pytest.raises(DatasetError, match="max_tokens is 0"):
        plan_micro_batches([1], 0)
