"""Packing: bins, packed rows, whole sets and streams; too-long rows, determinism, resuming."""

# Wrong types are handed in on purpose.
# pyright: reportArgumentType=false, reportOptionalSubscript=false

import json
import os
import pickle
import signal
from bisect import bisect_left, insort
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_data import (
    DataError,
    DataLoader,
    Dataset,
    DatasetError,
    FormatError,
    InputFeature,
    InputProcessor,
    IterablePackingDataset,
    LoaderStateError,
    LoaderTimeoutError,
    PackedFeature,
    PackingDataset,
    SequenceTooLongError,
    WorkerError,
    pack_lengths,
)
from twinkle_mesh import DeviceMesh

CAPACITY = 24
lengths_lists = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=80)


def features(lengths, first=0):
    """Rows that can be told apart: row i holds the token i."""
    return [InputFeature(input_ids=np.full(length, index)) for index, length in enumerate(lengths, start=first)]


def rows_of(packs):
    """The row of every sequence of every pack."""
    return [[int(feature.input_ids[0]) for feature in pack.features] for pack in packs]


def row_by_row(sizes, capacity):
    """Best-fit decreasing, one row after another; the latest of equally full bins. The bins' contents, sorted."""
    bins, open_bins = [], []
    for size in sorted(sizes, reverse=True):
        place = bisect_left(open_bins, (size, -1))
        later = [i for i in range(place, len(open_bins)) if open_bins[i][0] == open_bins[place][0]] if place < len(open_bins) else []
        if later:
            space, number = open_bins.pop(later[-1])
        else:
            space, number = capacity, len(bins)
            bins.append([])
        bins[number].append(size)
        if space > size:
            insort(open_bins, (space - size, number))
    return sorted(map(sorted, bins))


@settings(deadline=None, max_examples=40)
@given(lengths=lengths_lists, seed=st.none() | st.integers(0, 3))
def test_every_row_is_in_one_pack_and_no_pack_is_too_long(lengths, seed):
    packs = pack_lengths(lengths, CAPACITY, seed=seed)
    assert sorted(packs.rows.tolist()) == list(range(len(lengths)))
    sums = packs.sums(np.array(lengths))
    assert sums.max() <= CAPACITY
    assert sums.tolist() == [sum(lengths[row] for row in packs[index]) for index in range(len(packs))]
    assert np.sort(sums)[:2].sum() > CAPACITY or len(packs) == 1, "two packs would fit into one"


@settings(deadline=None, max_examples=40)
@given(lengths=lengths_lists)
def test_packing_whole_classes_of_lengths_equals_best_fit_decreasing_row_by_row(lengths):
    packs = pack_lengths(lengths, CAPACITY)
    assert len(packs) == len(row_by_row(lengths, CAPACITY))
    assert sorted(packs.sums(np.array(lengths)).tolist()) == sorted(map(sum, row_by_row(lengths, CAPACITY)))


def test_lognormal_lengths_fill_their_packs():
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 50_000), 1, 4096).astype(int)
    packs = pack_lengths(lengths, 4096, seed=1)
    assert lengths.sum() / (len(packs) * 4096) > 0.999


@pytest.mark.parametrize("lengths", [[3, 0], [3, 25]])
def test_a_length_that_no_pack_holds_names_its_row(lengths):
    with pytest.raises(DatasetError, match=f"row 1 has {lengths[1]} tokens; packs hold rows of 1 to 24"):
        pack_lengths(lengths, CAPACITY)


def test_a_packed_row_keeps_its_sequences_and_joins_their_arrays():
    one = InputFeature(input_ids=[5, 6, 7], labels=[-100, 6, 7], logprobs=[0, -1, -2], advantages=0.5, temperature=0.5)
    two = InputFeature(input_ids=[8, 9], position_ids=[0, 1], logprobs=[0, -3], advantages=[0, 1], completion_mask=[0, 1])
    row = PackedFeature(features=[one, two])
    assert len(row) == 5
    assert row.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert row.labels.tolist() == [-100, 6, 7, -100, 9]
    assert row.cu_seq_lens.tolist() == [0, 3, 5]
    assert row.cu_seq_lens.dtype == np.int32
    assert row.logprobs is not None
    assert row.logprobs.tolist() == [0, -1, -2, 0, -3]
    assert row.advantages is not None
    assert row.advantages.tolist() == [0.5, 0.5, 0.5, 0, 1]
    assert row.completion_mask is None, "one sequence has none"
    assert pickle.loads(pickle.dumps(row)) == row
    assert row != PackedFeature(features=[two, one])
    with pytest.raises(FormatError, match="is empty"):
        PackedFeature(features=[])
    with pytest.raises(FormatError, match=r"features\[0\] is a dict"):
        PackedFeature(features=[{}])


def test_labels_never_cross_even_where_the_first_token_of_a_sequence_is_trained_on():
    batch = InputProcessor()([PackedFeature(features=features([2, 3]))])
    assert batch.targets.tolist() == [[0, 0, 1, 1, 0]]
    assert batch.loss_mask.tolist() == [[1, 0, 1, 1, 0]]


@settings(deadline=None, max_examples=25)
@given(lengths=lengths_lists, seed=st.integers(0, 3))
def test_a_packed_set_holds_every_row_once(lengths, seed):
    dataset = PackingDataset(dataset=Dataset(features(lengths)), max_length=CAPACITY, seed=seed)
    packs = list(dataset)
    assert sorted(row for rows in rows_of(packs) for row in rows) == list(range(len(lengths)))
    assert max(map(len, packs)) <= CAPACITY
    assert dataset.fill == pytest.approx(sum(lengths) / (CAPACITY * len(dataset)))
    np.testing.assert_allclose(dataset.row_costs("tokens"), [len(pack) for pack in packs])
    np.testing.assert_allclose(dataset.row_costs("cost"), [(pack.lengths**2).sum() for pack in packs])
    again = PackingDataset(features(lengths), CAPACITY, seed=seed, lengths=lengths)
    assert rows_of(again) == rows_of(packs)
    assert again.fingerprint == dataset.fingerprint


def test_packs_depend_on_the_seed_and_not_on_the_workers():
    lengths = np.random.default_rng(0).integers(1, CAPACITY, 700)
    base = Dataset(features(lengths))
    alone = rows_of(PackingDataset(base, CAPACITY))
    assert rows_of(PackingDataset(base, CAPACITY, num_workers=2)) == alone
    assert rows_of(PackingDataset(base, CAPACITY, seed=1)) != alone


@settings(deadline=None, max_examples=20)
@given(lengths=st.lists(st.integers(1, 3 * CAPACITY), min_size=1, max_size=12), streamed=st.booleans())
def test_rows_that_are_too_long_become_what_the_strategy_says(lengths, streamed):
    rows = [InputFeature(input_ids=np.arange(100 * i, 100 * i + n), logprobs=np.arange(n), position_ids=np.arange(n)) for i, n in enumerate(lengths)]

    def packed(how):
        packs = IterablePackingDataset(rows, CAPACITY, too_long=how, window=5) if streamed else PackingDataset(rows, CAPACITY, too_long=how)
        return sorted((feature for pack in packs for feature in pack.features), key=lambda feature: int(feature.input_ids[0]))

    pieces = packed("split")
    assert max(map(len, pieces)) <= CAPACITY
    np.testing.assert_array_equal(np.concatenate([piece.input_ids for piece in pieces]), np.concatenate([row.input_ids for row in rows]))
    for how, part in (("left", slice(-CAPACITY, None)), ("right", slice(0, CAPACITY))):
        for piece, row in zip(packed(how), rows, strict=True):
            np.testing.assert_array_equal(piece.input_ids, row.input_ids[part])
            np.testing.assert_array_equal(piece.logprobs[1:], row.logprobs[part][1:])
            assert piece.logprobs[0] == piece.position_ids[0] == 0
    if min(lengths) <= CAPACITY:
        assert packed("drop") == [row for row in rows if len(row) <= CAPACITY]
    if max(lengths) > CAPACITY:
        row = next(index for index, length in enumerate(lengths) if length > CAPACITY)
        with pytest.raises(SequenceTooLongError, match=f"row {row} has {lengths[row]} tokens, a pack at most 24: raise max_length, or set too_long"):
            packed("error")


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "nothing to pack"),
        (features([30]), {"too_long": "drop"}, "nothing to pack"),
        (features([3]), {"too_long": "cut"}, "too_long is 'cut'; it must be one of 'error', 'drop'"),
        (features([3]), {"max_length": 0}, "max_length is 0"),
        (features([3]), {"lengths": [3, 4]}, r"lengths has shape \(2,\), and the dataset 1 rows"),
        ([*features([3]), {"messages": []}], {}, "row 1 is a dict, and packing needs InputFeatures: encode"),
    ],
)
def test_what_cannot_be_packed_is_refused(rows, options, message):
    with pytest.raises(DataError, match=message):
        PackingDataset(rows, **{"max_length": CAPACITY, **options})


def test_a_row_that_changes_after_packing_is_an_error():
    rows = features([3, 4])
    dataset = PackingDataset(rows, CAPACITY)
    rows[1] = InputFeature(input_ids=[1])
    with pytest.raises(DatasetError, match="row 1 has 1 tokens, and had 4 when it was packed"):
        list(dataset)


def failing(kind):
    """Rows of which number 300 does something bad to the process that reads it."""

    def read(index):
        if index == 300:
            kind()
        return InputFeature(input_ids=[1, 2])

    return Dataset(range(600)).map(read)


def test_a_packing_worker_that_is_killed_raises_and_does_not_hang():
    with pytest.raises(WorkerError, match=r"was ended by SIGKILL.* while it was working on range\(256, 512\)"):
        PackingDataset(failing(lambda: os.kill(os.getpid(), signal.SIGKILL)), CAPACITY, num_workers=2)


def test_a_packing_worker_that_crashes_shows_its_stack():
    with pytest.raises(WorkerError, match=r"SIGSEGV(.|\n)*Fatal Python error: Segmentation fault(.|\n)*test_data_packing.py"):
        PackingDataset(failing(lambda: os.kill(os.getpid(), signal.SIGSEGV)), CAPACITY, num_workers=2)


def test_a_packing_worker_that_is_silent_ends_with_the_deadline():
    with pytest.raises(LoaderTimeoutError, match=r"the length of rows was not there after 1 s: worker 1 .* raise worker_timeout_s"):
        PackingDataset(failing(signal.pause), CAPACITY, num_workers=2, worker_timeout_s=1)


def test_a_packing_workers_error_keeps_its_type_row_and_traceback():
    def fail():
        raise KeyError("price")

    with pytest.raises(DatasetError, match=r"row 300: .* failed: KeyError: 'price'") as caught:
        PackingDataset(failing(fail), CAPACITY, num_workers=2)
    assert 'raise KeyError("price")' in caught.value.__notes__[0]


# Streams


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 2 * CAPACITY), max_size=60), window=st.integers(1, 9), data=st.data())
def test_a_packed_stream_holds_every_token_once_and_resumes_anywhere(lengths, window, data):
    rows = features(lengths)
    options = {"max_length": CAPACITY, "window": window, "too_long": "split", "seed": 3}
    source = data.draw(st.sampled_from([rows, lambda: iter(rows), lambda: rows, Seekable(rows)]))
    whole = list(IterablePackingDataset(source, **options))
    assert all(len(pack) <= CAPACITY for pack in whole)
    tokens = np.sort(np.concatenate([pack.input_ids for pack in whole])) if whole else np.array([])
    np.testing.assert_array_equal(tokens, np.repeat(np.arange(len(lengths)), lengths))
    stop = data.draw(st.integers(0, len(whole)))
    seen = list(islice(IterablePackingDataset(source, **options).iterate(), stop))
    state = json.loads(json.dumps(seen[-1][1])) if seen else None
    assert [pack for pack, _ in seen] + [pack for pack, _ in IterablePackingDataset(source, **options).iterate(state)] == whole


class Seekable:
    """A stream that can go to a row, and says how many it was asked for."""

    def __init__(self, rows):
        self.rows, self.read = rows, 0

    def iterate(self, state=None):
        for row in range(int(state or 0), len(self.rows)):
            self.read += 1
            yield self.rows[row], str(row + 1)


def test_a_stream_fills_its_packs_and_none_of_its_rows_waits_for_ever():
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 12_000), 1, 4096).astype(int)
    rows = features(lengths)
    packs = list(IterablePackingDataset(rows, 4096))
    assert sum(map(len, packs)) / (4096 * len(packs)) > 0.998
    order = [max(rows) for rows in rows_of(packs)]
    latest = np.maximum.accumulate(order)
    late = [latest[place] - min(rows) for place, rows in enumerate(rows_of(packs))]
    assert max(late) < 8 * 1000


def test_resuming_a_stream_reads_only_what_was_in_the_window():
    source = Seekable(features(np.random.default_rng(0).integers(1, 9, 20_000)))
    packs = IterablePackingDataset(source, CAPACITY, window=50).iterate()
    state = [next(packs)[1] for _ in range(3000)][-1]
    assert state["next_row"] > 10_000
    source.read = 0
    assert next(IterablePackingDataset(source, CAPACITY, window=50).iterate(state)) == next(packs)
    assert source.read < 1000


def test_what_cannot_be_streamed_or_resumed_is_refused():
    with pytest.raises(DatasetError, match="an iterator can be read only once"):
        IterablePackingDataset(iter([]), CAPACITY)
    with pytest.raises(DatasetError, match="not int"):
        IterablePackingDataset(3, CAPACITY)
    with pytest.raises(DatasetError, match="window is 0"):
        IterablePackingDataset([], CAPACITY, window=0)
    with pytest.raises(FormatError, match="row 1 is a str, and packing needs InputFeatures"):
        list(IterablePackingDataset([*features([2]), "text"], CAPACITY))
    stream = IterablePackingDataset(features([3]), CAPACITY)
    ((_, state),) = stream.iterate()
    with pytest.raises(LoaderStateError, match="window_size was 7, is 1000"):
        stream.iterate({**state, "window_size": 7})
    with pytest.raises(LoaderStateError, match="damaged"):
        stream.iterate({**state, "given": -1})
    with pytest.raises(LoaderStateError, match="is a str, not what state_dict"):
        stream.iterate("7")
    with pytest.raises(LoaderStateError, match="'x' is no number of rows"):
        stream.iterate({**state, "first_state": "x"}).__next__()


# On a mesh


@pytest.mark.parametrize("streamed", [False, True])
def test_packs_resume_with_another_number_of_data_ranks(monkeypatch, streamed):
    lengths = np.random.default_rng(0).integers(1, CAPACITY, 300)

    def loaders(num_ranks):
        made = []
        for rank in range(num_ranks):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
            base = features(lengths)
            rows = IterablePackingDataset(base, CAPACITY, window=40) if streamed else PackingDataset(base, CAPACITY)
            mesh = DeviceMesh.from_sizes(dp_size=num_ranks)
            made.append(DataLoader(rows, batch_size=12, device_mesh=mesh, shuffle=not streamed, drop_last=False, min_batch_size=4))
        return made

    def batches(ranks, monkeypatch):
        found = []
        iterators = [iter(loader) for loader in ranks]
        while True:
            parts = []
            for rank, iterator in enumerate(iterators):
                monkeypatch.setenv("RANK", str(rank))
                parts.append(next(iterator, None))
            if parts[0] is None:
                return found
            found.append(sorted(rows for part in parts for rows in rows_of(part)))

    whole = batches(loaders(1), monkeypatch)
    assert batches(loaders(4), monkeypatch) == whole
    two = loaders(2)
    iterators = [iter(loader) for loader in two]
    for _ in range(3):
        for rank, iterator in enumerate(iterators):
            monkeypatch.setenv("RANK", str(rank))
            next(iterator)
    three = loaders(3)
    for loader in three:
        loader.load_state_dict(json.loads(json.dumps(two[0].state_dict())))
    assert batches(three, monkeypatch) == whole[3:]


def test_a_position_of_other_packs_is_refused():
    state = DataLoader(PackingDataset(features([3] * 40), CAPACITY), batch_size=2).state_dict()
    with pytest.raises(LoaderStateError, match="data_id was"):
        DataLoader(PackingDataset(features([3] * 40), CAPACITY, seed=1), batch_size=2).load_state_dict(state)
