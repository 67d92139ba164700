"""Nothing is lost or told wrongly when something fails, changes or belongs to something else."""

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from typing import Any

import pytest

from twinkle_data import (
    DataLoader,
    Dataset,
    DatasetError,
    InputFeature,
    IterableDataset,
    IterablePackingDataset,
    LoaderStateError,
    LoaderTimeoutError,
    NoSignalError,
    RetrySampler,
    SampledSequence,
    SampleResponse,
    Template,
    concatenate,
    mix,
)
from twinkle_data._pipes import receive_message, send_message


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_failed_is_not_lost(num_workers, tmp_path):
    flag = tmp_path / "failing"
    flag.touch()

    def fail(row):
        if row == 5 and flag.exists():
            raise ValueError("flaky")
        return row

    loader = DataLoader(Dataset(range(10)).map(fail), batch_size=2, num_workers=num_workers)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [[0, 1], [2, 3]]
    with pytest.raises(DatasetError, match=r"row 5: .*flaky"):
        next(batches)
    state = loader.state_dict()
    flag.unlink()
    assert list(batches) == [[4, 5], [6, 7], [8, 9]]
    loader.load_state_dict(state)
    assert list(loader) == [[4, 5], [6, 7], [8, 9]]


def answers(rows):
    sequence = SampledSequence(tokens=[1], logprobs=[], stop_reason="stop", decoded="", new_input_feature=InputFeature(input_ids=[1]))
    return [SampleResponse(sequences=[sequence, sequence], prompt_token_ids=[row]) for row in rows]


class Flaky:
    """Rewards of two completions a prompt: prompt 1 has no signal; the calls in `fails` raise."""

    def __init__(self, fails):
        self.fails, self.calls = fails, 0

    def __call__(self, rows, responses):
        self.calls += 1
        if self.calls in self.fails:
            raise RuntimeError("flaky")
        return [reward for row in rows for reward in (0.0, float(row != 1))]


def drained(sampler, error):
    got = []
    for _ in range(20):
        try:
            batch = sampler.next()
        except error:
            continue
        if batch is None:
            return got
        got += [group.row for group in batch]
    raise AssertionError("it does not end")


@pytest.mark.parametrize("fails", [{1}, {2}, {3}, {1, 2, 4}])
def test_a_failing_reward_loses_neither_prompts_nor_groups(fails):
    loader = DataLoader(range(9), batch_size=2, drop_last=False)
    assert drained(RetrySampler(loader, answers, Flaky(fails), batch_size=2), RuntimeError) == [0, 2, 3, 4, 5, 6, 7, 8]


def test_a_state_saved_after_a_failure_has_what_waits():
    loader = DataLoader(range(9), batch_size=2, drop_last=False)
    sampler = RetrySampler(loader, answers, Flaky({2}), batch_size=2)
    with pytest.raises(RuntimeError):
        sampler.next()
    state = json.loads(json.dumps(sampler.state_dict()))
    other = RetrySampler(DataLoader(range(9), batch_size=2, drop_last=False), answers, Flaky(()), batch_size=2)
    other.load_state_dict(state)
    assert drained(other, RuntimeError) == [0, 2, 3, 4, 5, 6, 7, 8]
    wrongs: list[Any] = [None, {}, {**state, "fresh": 3}, {**state, "again": [1]}]
    for wrong in wrongs:
        with pytest.raises(LoaderStateError):
            other.load_state_dict(wrong)


def test_too_few_groups_wait_for_the_next_call():
    sampler = RetrySampler(DataLoader(range(9), batch_size=2, drop_last=False), answers, Flaky(()), batch_size=2, max_rounds=1)
    with pytest.raises(NoSignalError, match="1 of 2 prompts"):
        sampler.next()
    assert drained(sampler, NoSignalError) == [0, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("reward", [float("nan"), None, "1"])
def test_a_reward_is_a_finite_number(reward):
    sampler = RetrySampler(DataLoader(range(4), batch_size=2), answers, lambda rows, _: [reward, 1.0] * len(rows), batch_size=2)
    with pytest.raises(DatasetError, match="a reward is a finite number"):
        sampler.next()


def stream():
    return IterableDataset(range(40))


STREAMS = {
    "plain": stream,
    "map": lambda: stream().map(int),
    "filter": lambda: stream().filter(bool),
    "take": lambda: stream().take(30),
    "skip": lambda: stream().skip(1),
    "skip more": lambda: stream().skip(2),
    "shuffle": lambda: stream().shuffle(8, seed=1),
    "another seed": lambda: stream().shuffle(8, seed=2),
    "another block": lambda: stream().shuffle(4, seed=1),
    "shuffled map": lambda: stream().map(int).shuffle(8, seed=1),
    "mix": lambda: mix(stream(), stream()),
    "weights": lambda: mix(stream(), stream(), weights=[9, 1]),
    "mix seed": lambda: mix(stream(), stream(), seed=1),
    "mix stop": lambda: mix(stream(), stream(), stop="all"),
    "mix of three": lambda: mix(stream(), stream(), stream()),
    "mixed shuffle": lambda: mix(stream().shuffle(8, seed=1), stream()),
}


def loader_of(name):
    return DataLoader(STREAMS[name](), batch_size=2)


@pytest.mark.parametrize("name", STREAMS)
def test_a_state_of_a_stream_is_taken_by_that_stream_alone(name):
    loader = loader_of(name)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    for other in STREAMS:
        if other != name:
            with pytest.raises(LoaderStateError, match="belongs to the stream"):
                loader_of(other).load_state_dict(state)
    again = loader_of(name)
    again.load_state_dict(state)
    assert list(again) == list(batches)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("damage", [None, 2.0, "x", True, [], [None], [0, 1], [0, "x"], [None, -1, 0], [[0], 1, 1], {"a": 1}, [None, None, "x"]])
def test_a_damaged_state_of_a_stream_is_refused(name, damage):
    made = STREAMS[name]()
    (_, state), *_ = made.iterate()
    if damage is None:  # states without the stream that they belong to
        with pytest.raises(LoaderStateError, match="does not tell the stream"):
            made.iterate(state["at"])
        return
    try:
        list(made.iterate({**state, "at": damage}))
    except LoaderStateError:
        return
    assert name == "plain" or damage == [0, 1], "only what has the form of a state may pass"


@pytest.mark.parametrize("wrong", [None, 3, "x", {}, {"epoch": 0.5}, {"epoch": None}, {"batch": "1"}, {"batch": True}])
def test_a_loader_refuses_what_is_no_state(wrong):
    packed = IterablePackingDataset([InputFeature(input_ids=[1])] * 4, 2)
    for loader in (DataLoader(range(8), batch_size=2), loader_of("plain"), DataLoader(packed, batch_size=1)):
        state = {**loader.state_dict(), **wrong} if isinstance(wrong, dict) and wrong else wrong
        with pytest.raises(LoaderStateError):
            loader.load_state_dict(state)


def bad_lines(tmp_path, *names):
    for number, name in enumerate(names):
        (tmp_path / name).write_text(f'{{"a": {number}}}\nbad\n')


def test_skipped_rows_of_several_files_are_counted_together(tmp_path):
    bad_lines(tmp_path, "x1.jsonl", "x2.jsonl")
    both = Dataset(tmp_path / "x?.jsonl", on_error="skip")
    assert (list(both), both.skipped.count, len(both.skipped.reasons)) == ([{"a": 0}, {"a": 1}], 2, 2)
    parts = [Dataset(tmp_path / f"x{number}.jsonl", on_error="skip") for number in (1, 2)]
    assert concatenate(*parts).skipped.count == 2


def test_a_stream_counts_the_latest_pass_through_all_of_its_steps(tmp_path):
    made = IterableDataset([1, "x", 2, "y"]).map(lambda row: row + 1, on_error="skip")
    assert (list(made), list(made), made.skipped.count) == ([2, 3], [2, 3], 2)
    for further in (made.take(9), made.shuffle(2), mix(made, made.map(str), stop="all").take(50), made.map(str)):
        list(further)
        assert further.skipped.count >= 2


@pytest.mark.parametrize("make", [Dataset, IterableDataset])
def test_a_line_that_cannot_be_parsed_is_skipped_by_the_work_on_it(tmp_path, make, make_tokenizer):
    bad_lines(tmp_path, "x1.jsonl", "x2.jsonl")
    options: dict[str, Any] = {"lazy": True} if make is Dataset else {}
    for source in (tmp_path / "x1.jsonl", tmp_path / "x?.jsonl"):
        rows = make(source, **options)
        kinds = [rows.map(dict, on_error="skip"), rows.shuffle().map(dict, on_error="skip")]
        if make is Dataset:
            kinds += [rows.map(dict, on_error="skip", lazy=False), rows.shuffle().map(dict, on_error="skip", lazy=False)]
        for kind in kinds:
            found = list(kind)
            assert kind.skipped.count == len(found) == (1 if "?" not in str(source) else 2)
        with pytest.raises(DatasetError, match="line 2: not valid JSON"):
            list(rows.map(dict))


def test_a_file_that_changes_under_a_lazy_dataset_is_noticed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"a": {number}}}\n' for number in range(5)))
    rows = Dataset(path, lazy=True)
    assert rows[0] == {"a": 0}
    path.write_text("".join(f'{{"a": {9 - number}}}\n' for number in range(5)))
    os.utime(path, ns=(1, 1))  # the clock of the file system may not have moved on
    with pytest.raises(DatasetError, match="has changed since its lines were counted"):
        rows[1]


def test_the_last_byte_of_a_file_that_was_cut_off_is_seen(tmp_path):
    path = tmp_path / "rows.jsonl"
    for lazy in (False, True):
        path.write_text('{"a": 1}\n{')
        with pytest.raises(DatasetError, match=r"line 2: not valid JSON.*cut off here"):
            list(Dataset(path, lazy=lazy))
        path.write_text('{"a": 1}\n\n')
        assert len(Dataset(path, lazy=lazy)) == 1


class Ending(Sequence):
    """A source that raises StopIteration for a row."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise StopIteration
        return index


def test_a_source_that_raises_stop_iteration_does_not_end_the_data():
    for rows in (
        Dataset(Ending()),
        IterableDataset(Ending()),
        DataLoader(Ending(), batch_size=1),
        DataLoader(Dataset(Ending()).map(str), batch_size=1),
    ):
        with pytest.raises(DatasetError, match="row 2: the source raised StopIteration"):
            list(rows)


def test_errors_of_many_skipped_rows_cost_no_more_than_the_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"a": {number}}}\n' for number in range(2000)))
    kept = Dataset(path, lazy=True).filter(lambda row: True)
    assert len(kept) == 2000
    assert kept._rows.places is kept._rows.places, "computed once, not for each error"


def test_a_template_is_not_needed_for_what_fails_before_it(make_tokenizer):
    template = Template(make_tokenizer("chatml"))
    rows = IterableDataset([{"text": "ok"}, {"text": 5}]).encode(template, on_error="skip")
    assert (len(list(rows)), rows.skipped.count) == (1, 1)


@pytest.mark.timeout(120)
def test_a_worker_that_is_stopped_in_the_middle_of_a_message_is_told_after_the_deadline():
    rows = Dataset(range(10)).map(lambda row: (os.getpid(), bytes(20_000_000)))
    batches = iter(DataLoader(rows, batch_size=1, num_workers=1, prefetch_batches=1, worker_timeout_s=2))
    ((process, _),) = next(batches)
    time.sleep(1)  # it writes the next one now, more than a pipe holds
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(LoaderTimeoutError, match="was not there after 2 s"):
        next(batches)


@pytest.mark.timeout(120)
def test_messages_of_pipes_keep_their_deadlines():
    ours, theirs = Pipe()
    os.set_blocking(ours.fileno(), False)
    never, _kept = os.pipe()  # a sentinel of a process that lives
    big = bytes(range(256)) * 10_000
    with pytest.raises(TimeoutError):
        send_message(ours, big, time.monotonic() + 0.2)
    ours, theirs = Pipe()
    writer = threading.Thread(target=send_message, args=(theirs, big), daemon=True)
    writer.start()
    assert receive_message(ours, never, time.monotonic() + 60) == big
    writer.join(60)
    os.write(theirs.fileno(), (1000).to_bytes(8, "little") + b"only the beginning")
    with pytest.raises(TimeoutError):
        receive_message(ours, never, time.monotonic() + 0.2)
    theirs.close()
    with pytest.raises(EOFError):
        receive_message(ours, never, time.monotonic() + 60)
