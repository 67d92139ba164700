"""Work on all rows: processes, progress, caching by content, skipped rows, streams, and turns."""

import json
import logging
import multiprocessing
import operator
import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_data import (
    Dataset,
    DatasetError,
    FormatError,
    InputFeature,
    IterableDataset,
    LoaderStateError,
    Template,
    WorkerError,
    mix,
    train_on_turns,
    turn_masks,
    turn_spans,
    with_turn_advantages,
)


def double(row):
    return 2 * row["a"]


# Worker processes import no test modules, so what they run is the standard library's.
number_of = operator.itemgetter("a")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"a": index} if index != 41 else {"b": index}) + "\n" for index in range(60)))
    return path


@pytest.mark.timeout(300)
def test_processes_give_the_rows_of_one_process_in_order(path):
    seen = []
    dataset = Dataset(path, lazy=True)
    good = dataset.filter(lambda row: "a" in row, lazy=False)
    several = good.map(number_of, num_proc=2, progress=lambda done, size: seen.append((done, size)))
    assert list(several) == [index for index in range(60) if index != 41]
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (59, 59)
    with pytest.raises(DatasetError, match=r"row 41 \(.*rows.jsonl, line 42\): itemgetter failed: no field 'a' \(the row has 'b'\)") as caught:
        dataset.map(number_of, num_proc=2)
    assert any("in a worker process" in note for note in caught.value.__notes__)
    skipping = dataset.map(number_of, num_proc=2, on_error="skip")
    assert (list(skipping), skipping.skipped.count) == (list(several), 1)
    assert skipping.where(41).endswith("line 43)")


@pytest.mark.timeout(300)
def test_a_worker_that_dies_and_work_that_cannot_travel_are_told():
    rows = Dataset([7] * 4)
    with pytest.raises(WorkerError, match="map: a worker process ended with exit code 7 before its work was done"):
        rows.map(os._exit, num_proc=2)
    with pytest.raises(WorkerError, match=r"map: no worker process finished a chunk within 0.5 s \(the first awaited row is 0\)"):
        Dataset([60] * 4).map(time.sleep, num_proc=2, timeout_s=0.5)
    with pytest.raises(DatasetError, match="map cannot be sent to other processes"):
        rows.map(lambda row: row, num_proc=2)
    with pytest.raises(DatasetError, match="num_proc is 0"):
        rows.map(double, num_proc=0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("truncation", ["split", pytest.param("drop", marks=pytest.mark.full)])
def test_encoding_in_processes_equals_encoding_here(make_tokenizer, truncation):
    rows = [{"messages": [{"role": "user", "content": "Hello " * n}, {"role": "assistant", "content": "Yes."}]} for n in range(1, 30)]
    template = Template(make_tokenizer("chatml"), max_length=40, truncation=truncation)
    here = list(Dataset(rows).encode(template))
    assert len(here) != len(rows)
    assert list(Dataset(rows).encode(template, num_proc=2)) == here == list(Dataset(rows).encode(template, lazy=False))


def test_skipped_rows_are_counted_and_warned_of(path, caplog):
    for lazy in (True, False):
        with caplog.at_level(logging.WARNING, "twinkle_data"):
            dataset = Dataset(path).map(double, on_error="skip", lazy=lazy)
            assert (len(dataset), dataset.skipped.count) == (59, 1)
        assert "1 row was skipped" in caplog.text
        caplog.clear()
    assert Dataset(path).skipped.count == 0
    with pytest.raises(DatasetError, match="on_error is 'ignore'"):
        Dataset(path).map(double, on_error="ignore")  # pyright: ignore[reportArgumentType]


class Factor:
    """Counts its calls in a file, so that they are seen whatever process they happen in."""

    def __init__(self, factor, log):
        self.factor, self.log = factor, log

    def __call__(self, row):
        with self.log.open("a") as file:
            file.write("x")
        return self.factor * row["a"]

    def fingerprint_parts(self):
        return self.factor


def test_a_cache_is_found_again_by_the_content_of_rows_and_work(tmp_path):
    log, cache = tmp_path / "log", tmp_path / "cache"
    log.write_text("")
    rows = [{"a": index} for index in range(5)]

    def calls(rows, factor):
        before = len(log.read_text())
        made = Dataset(rows).map(Factor(factor, log), cache_dir=cache)
        assert list(made) == [factor * row["a"] for row in rows]
        return len(log.read_text()) - before

    assert [calls(rows, 2), calls([dict(row) for row in rows], 2), calls(rows, 3), calls(rows[:4], 2), calls(rows, 3)] == [5, 0, 5, 4, 0]
    assert not list(cache.glob(".unfinished*"))


def make(factor, offset=0):
    def scale(row):
        return factor * row + offset

    return scale


def test_functions_are_told_apart_by_what_they_do(tmp_path):
    def kept(fn):
        Dataset([1, 2]).map(fn, cache_dir=tmp_path)
        return len(list(tmp_path.iterdir()))

    assert [kept(make(2)), kept(make(2)), kept(make(3)), kept(make(2, 1)), kept(lambda row: row), kept(lambda row: row + 1)] == [1, 1, 2, 3, 4, 5]
    lock = open(os.devnull)  # noqa: SIM115
    with lock, pytest.raises(DatasetError, match="cannot tell by its content whether a TextIOWrapper has changed"):
        kept(lambda row: lock)


def test_an_interrupted_or_damaged_cache_does_not_count(tmp_path):
    def fails(row):
        raise ValueError(row)

    with pytest.raises(DatasetError, match=r"row 0: .*fails failed"):
        Dataset([1]).map(fails, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    Dataset([1]).map(str, cache_dir=tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "rows.bin").write_bytes(b"")
    with pytest.raises(DatasetError, match="are damaged; delete the folder"):
        Dataset([1]).map(str, cache_dir=tmp_path)


class DoubleTogether(Factor):
    """Doubles; at the first row it waits until every process is there."""

    def __init__(self, everyone):
        self.everyone = everyone

    def __call__(self, row):
        if row["a"] == 0:
            self.everyone.wait(timeout=60)
        return 2 * row["a"]

    def fingerprint_parts(self):
        return "DoubleTogether"


def test_several_processes_may_fill_one_cache_entry_at_the_same_time(tmp_path):
    processes = multiprocessing.get_context("fork")
    rows = [{"a": index} for index in range(2000)]
    everyone = processes.Barrier(4)

    def work(results):
        results.put(list(Dataset(rows).map(DoubleTogether(everyone), cache_dir=tmp_path)))

    results = processes.SimpleQueue()
    workers = [processes.Process(target=work, args=(results,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    made = [results.get() for _ in workers]
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert made == [[2 * row["a"] for row in rows]] * 4
    assert len(list(tmp_path.iterdir())) == 1, "the entry, and nothing unfinished"
    # A barrier that nobody else comes to: the entry is read, not made again.
    assert list(Dataset(rows).map(DoubleTogether(processes.Barrier(2)), cache_dir=tmp_path)) == made[0]


def test_another_template_is_another_cache_entry(make_tokenizer, tmp_path):
    rows = Dataset([{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes."}]}] * 2)
    plain = rows.encode(Template(make_tokenizer("chatml")), cache_dir=tmp_path)
    assert list(plain) == list(rows.encode(Template(make_tokenizer("chatml")), cache_dir=tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    rows.encode(Template(make_tokenizer("chatml"), system="Be brief."), cache_dir=tmp_path)
    rows.encode(Template(make_tokenizer("llama3")), cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_progress_is_a_line_on_stderr(capsys):
    Dataset(range(3)).map(str, progress=True)
    assert "map: 3/3 rows, 100 %" in capsys.readouterr().err


def stream(path):
    numbers = IterableDataset(path).map(double, on_error="skip").filter(lambda number: number % 3 == 0)
    return mix(numbers.shuffle(7, seed=1), IterableDataset(lambda: iter(range(1000, 1030))), weights=[2, 1], seed=3, stop="all").skip(2).take(40)


def test_a_stream_goes_on_from_any_of_its_states(path):
    whole = list(stream(path).iterate())
    assert len(whole) == 40
    rows = [row for row, _ in whole]
    assert list(stream(path)) == rows
    for position, (_, state) in enumerate(whole, start=1):
        assert [row for row, _ in stream(path).iterate(json.loads(json.dumps(state)))] == rows[position:]


@settings(deadline=None)
@given(size=st.integers(0, 30), block=st.integers(1, 9), take=st.integers(0, 40), skip=st.integers(0, 9), cut=st.integers(0, 40))
def test_streams_of_any_size_resume(size, block, take, skip, cut):
    def made():
        return IterableDataset(lambda: range(size)).shuffle(block, seed=2).skip(skip).take(take)

    whole = list(made().iterate())
    assert len(whole) == min(take, max(0, size - skip))
    assert len({row for row, _ in whole}) == len(whole)
    if cut < len(whole):
        assert [row for row, _ in made().iterate(whole[cut][1])] == [row for row, _ in whole[cut + 1 :]]


def test_a_resumed_stream_runs_nothing_on_the_rows_before(tmp_path):
    calls = []
    path = tmp_path / "rows.jsonl"
    path.write_text("not JSON\n" * 9 + '{"a": 9}\n')
    rows = IterableDataset(path).map(lambda row: calls.append(row) or row["a"])
    assert [row for row, _ in rows.iterate({"stream": "files > map", "at": [9, 0]})] == [9]
    assert calls == [{"a": 9}]
    with pytest.raises(DatasetError, match=r"line 1: not valid JSON"):
        next(iter(rows))


def test_a_split_row_of_a_stream_is_resumed_in_its_middle(make_tokenizer):
    template = Template(make_tokenizer("chatml"), max_length=9, truncation="split")
    rows = IterableDataset(["Hello there, how are you today? " * 3] * 3).encode(template)
    whole = list(rows.iterate())
    assert len(whole) > 6
    for position, (_, state) in enumerate(whole, start=1):
        assert [row for row, _ in rows.iterate(state)] == [row for row, _ in whole[position:]]


def test_streams_refuse_what_they_cannot_do(path):
    with pytest.raises(DatasetError, match="a stream is made from a path"):
        IterableDataset({"a": 1})
    with pytest.raises(DatasetError, match="there is no file"):
        list(IterableDataset(path.with_name("absent.jsonl")))
    once = IterableDataset(iter([1, 2]))
    assert list(once) == [1, 2]
    with pytest.raises(DatasetError, match="can be read only once; give a function"):
        list(once)
    with pytest.raises(LoaderStateError, match="'x' does not tell the stream that it belongs to"):
        list(IterableDataset(path).iterate("x"))
    with pytest.raises(DatasetError, match=r"row 41 \(.*line 42\): double failed"):
        list(IterableDataset(path).map(double))


def test_turns_of_a_feature_are_masked_trained_and_weighed(make_tokenizer):
    template = Template(make_tokenizer("chatml"))
    contents = [("user", "Hello"), ("assistant", "Yes."), ("user", "Hello"), ("assistant", "The answer is 19.")]
    feature = template.encode([{"role": role, "content": text} for role, text in contents])
    assert [template.decode(feature.input_ids[start:stop]) for start, stop in turn_spans(feature)] == ["Yes.", "The answer is 19."]
    np.testing.assert_array_equal(turn_masks(feature).any(0), feature.completion_mask)
    last = train_on_turns(feature, [-1])
    assert template.decode(feature.input_ids[last.labels != -100]) == "The answer is 19."
    worth = with_turn_advantages(feature, [1.0, -2.0]).advantages
    assert [set(worth[mask]) for mask in turn_masks(feature)] == [{1.0}, {-2.0}]  # pyright: ignore[reportOptionalSubscript, reportIndexIssue]
    with pytest.raises(FormatError, match="turn 2 of a feature with 2 turns"):
        train_on_turns(feature, [2])
    with pytest.raises(FormatError, match="one a turn is needed"):
        with_turn_advantages(feature, [1.0])
    assert turn_masks(InputFeature(input_ids=[1, 2])).shape == (0, 2)
