"""What cannot be honoured is refused by an error of this package that says what to do, never by a raw one from below."""

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportCallIssue=false

import gzip
import os
import resource
import signal
import threading

import numpy as np
import pytest

from twinkle_data import (
    DataLoader,
    Dataset,
    DatasetError,
    FormatError,
    InputFeature,
    InputProcessor,
    IterableDataset,
    IterablePackingDataset,
    PackingDataset,
    RetrySampler,
    SampledSequence,
    SamplingParams,
    Template,
    append_context,
    append_sample,
    concatenate,
    mix,
    pack_lengths,
    plan_micro_batches,
)

ROWS = Dataset([10, 11, 12])
FEATURE = InputFeature(input_ids=[1, 2])
REFUSED = {
    "boolean index": lambda: ROWS[True],
    "index between": lambda: ROWS[1.5],
    "index of text": lambda: ROWS["a"],
    "mask": lambda: ROWS.select([True, False, True]),
    "numpy mask": lambda: ROWS.select(np.array([True, False, True])),
    "fractions": lambda: ROWS.select([0.7, 1.9]),
    "shuffle": lambda: ROWS.shuffle(-1),
    "split": lambda: ROWS.split(held_out=0.5, seed=-1),
    "num_proc": lambda: ROWS.map(str, num_proc=1.5),
    "limit": lambda: ROWS.inspect(limit=-1),
    "concatenate": lambda: concatenate(ROWS, [1]),
    "loader seed": lambda: DataLoader(ROWS, batch_size=1, shuffle=True, seed=-1),
    "batch_size": lambda: DataLoader(ROWS, batch_size="2"),
    "stream batch_size": lambda: DataLoader(IterableDataset([1]), batch_size="2"),
    "num_epochs": lambda: DataLoader(IterableDataset([1]), batch_size=1, num_epochs=0),
    "negative epochs": lambda: DataLoader(IterableDataset([1]), batch_size=1, num_epochs=-3),
    "num_workers": lambda: DataLoader(ROWS, batch_size=1, num_workers="1"),
    "min_batch_size": lambda: DataLoader(ROWS, batch_size=2, min_batch_size=1.5),
    "timeout": lambda: DataLoader(ROWS, batch_size=1, num_workers=1, worker_timeout_s="1"),
    "take": lambda: IterableDataset([1]).take(-1),
    "skip": lambda: IterableDataset([1]).skip(2.5),
    "block": lambda: IterableDataset([1]).shuffle(1.5),
    "stream seed": lambda: IterableDataset([1]).shuffle(2, seed=-1),
    "weights": lambda: mix(ROWS, ROWS, weights=["a", "b"]),
    "mix seed": lambda: mix(ROWS, ROWS, seed=-1),
    "pack length": lambda: PackingDataset([FEATURE], max_length="8"),
    "pack seed": lambda: PackingDataset([FEATURE], max_length=8, seed=-1),
    "window": lambda: IterablePackingDataset([FEATURE], 8, window=1.5),
    "retry": lambda: RetrySampler(DataLoader(ROWS, batch_size=1), list, list, batch_size="2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_settings_are_refused(name):
    with pytest.raises(DatasetError):
        REFUSED[name]()


def test_numbers_of_numpy_are_numbers():
    assert ROWS[np.int64(1)] == 11
    assert list(ROWS.select(np.array([2, 0]))) == list(ROWS.select(iter([2, 0]))) == [12, 10]
    assert len(ROWS.select([])) == 0
    temperature = InputFeature(input_ids=[1], temperature=np.float32(0.5)).temperature
    assert (type(temperature), temperature) == (float, 0.5)
    params = SamplingParams(temperature=np.float32(0.5), stop_token_ids=np.array([3]))
    assert (type(params.temperature), params.stop_token_ids) == (float, (3,))


@pytest.mark.parametrize(
    "setting", [{"stop": None}, {"stop_token_ids": None}, {"stop_token_ids": [1.5]}, {"stop_token_ids": "12"}, {"temperature": True}]
)
def test_wrong_sampling_parameters_are_refused(setting):
    (name,) = setting
    with pytest.raises(FormatError, match=rf"SamplingParams\.{name} is"):
        SamplingParams(**setting)


@pytest.mark.parametrize("tokens", [[1.5], ["1"], [True], [[1]], [[1], [2, 3]], [None]])
def test_sampled_tokens_are_whole_numbers(tokens):
    for append in (append_sample, append_context):
        with pytest.raises(FormatError):
            append(FEATURE, tokens)
    with pytest.raises(FormatError, match="tokens are whole numbers"):
        SampledSequence(tokens=tokens, logprobs=[], stop_reason="stop", decoded="", new_input_feature=FEATURE)


def test_unpaired_preferences_are_refused():
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "A"}]
    for row in ({"prompt": "q", "completion": "A"}, {"messages": turns}):
        with pytest.raises(DatasetError, match=r"row 0: 'label' is False: .*KTO"):
            Dataset([{**row, "label": False}]).conversations()[0]
        assert Dataset([{**row, "label": "spam"}]).conversations()[0].user_data == {"label": "spam"}


@pytest.mark.parametrize("library", ["pandas", "pyarrow"])
def test_tables_whose_brackets_take_columns_are_refused(library):
    module = pytest.importorskip(library)
    table = module.table({"a": [1, 2]}) if library == "pyarrow" else module.DataFrame({"a": [1, 2]})
    with pytest.raises(DatasetError, match=r"is no sequence of rows; give its \.to_"):
        Dataset(table)
    with pytest.raises(DatasetError, match=r"is no sequence of rows|not from Table"):
        list(IterableDataset(table))


@pytest.mark.parametrize("cut", ["magic", "half", "checksum"])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_a_damaged_gzip_file_is_an_error_that_names_it(tmp_path, suffix, cut):
    content = {"jsonl": b'{"a": 1}\n' * 1000, "json": b"[" + b'{"a": 1},' * 1000 + b'{"a": 1}]', "csv": b"a,b\n" + b"1,2\n" * 1000}[suffix]
    packed = gzip.compress(content)
    path = tmp_path / f"rows.{suffix}.gz"
    path.write_bytes({"magic": packed[:2], "half": packed[: len(packed) // 2], "checksum": packed[:-6] + b"xxxxxx"}[cut])
    for read in (Dataset, lambda source: Dataset(source, lazy=True), lambda source: list(IterableDataset(source))):
        with pytest.raises(DatasetError, match=r"cannot read .*rows"):
            read(path)


def double(row):
    return row * 2


@pytest.mark.parametrize("damage", [lambda text: b"", lambda text: text[: len(text) // 2], None])
@pytest.mark.parametrize("name", ["meta.json", "stops.npy", "indices.npy", "rows.bin"])
def test_a_damaged_cache_is_told(tmp_path, name, damage):
    def work():
        return list(Dataset(range(50)).map(double, cache_dir=tmp_path))

    assert work() == list(range(0, 100, 2))
    (folder,) = tmp_path.iterdir()
    path = folder / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DatasetError, match="are damaged; delete the folder"):
        work()


def test_cached_rows_that_are_overwritten_are_told(tmp_path):
    rows = Dataset(range(50)).map(double, cache_dir=tmp_path)
    (path,) = tmp_path.glob("*/rows.bin")
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(DatasetError, match="are damaged"):
        rows[3]


def test_a_full_disk_and_results_that_cannot_be_kept_are_told(tmp_path):
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        with pytest.raises(DatasetError, match="cannot write to cache_dir"):
            Dataset(["x" * 100] * 1000).map(double, cache_dir=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(tmp_path) == [], "nothing unfinished stays"
    with pytest.raises(DatasetError, match="cannot be kept in cache_dir"):
        Dataset([1]).map(lambda row: (row for _ in range(row)), cache_dir=tmp_path)


@pytest.mark.timeout(120)
def test_results_and_rows_that_cannot_travel_between_processes_are_told():
    with pytest.raises(DatasetError, match="the results cannot be sent from a worker process"):
        # Python's own function, which the processes can import; its result does not pickle.
        Dataset([{"a": 1}, {"a": 2}]).map(dict.keys, num_proc=2)
    with pytest.raises(DatasetError, match="map: the rows from 0 on cannot be sent to other processes"):
        Dataset([threading.Lock(), threading.Lock()]).map(repr, num_proc=2)


def test_a_typo_in_an_option_is_told_before_any_row_is_read():
    def rows():
        pytest.fail("the rows were read")
        yield {}

    for attempt in (ROWS.conversations, lambda name: ROWS.encode(None, schema=name), lambda name: IterableDataset(rows).conversations(name)):
        for name in ("sharegp", ""):
            with pytest.raises(FormatError, match=f"there is no schema {name!r}; the schemas are preference, messages, sharegpt"):
                attempt(name)
    with pytest.raises(DatasetError, match="balance is 'token'; it must be 'auto', 'tokens', 'cost'"):
        DataLoader(ROWS, batch_size=1, balance="token")


def test_a_field_that_is_null_is_told_as_such():
    with pytest.raises(DatasetError, match=r"cannot tell .* \(its fields are 'instruction', 'output' \(null\)\)"):
        Dataset([{"instruction": "Add.", "output": None}]).conversations()[0]


def test_datasets_and_loaders_say_what_they_hold():
    assert repr(ROWS) == "<Dataset of 3 rows>"
    assert repr(ROWS.select([1])) == "<Dataset of 1 row>"
    assert repr(PackingDataset(Dataset([FEATURE]), max_length=8)) == "<PackingDataset of 1 row>"

    def odd(row):
        looked.append(row)
        return row % 2

    looked = []
    odds = ROWS.filter(odd).map(str)
    assert repr(odds) == "<Dataset>"
    assert looked == []  # to be shown, nothing is worked out
    assert len(odds) == 1
    assert repr(odds) == "<Dataset of 1 row>"
    assert repr(DataLoader(ROWS, batch_size=2)) == "<DataLoader: batches of 2 from <Dataset of 3 rows>>"
    assert repr(DataLoader(IterableDataset([1]), batch_size=2)).startswith("<DataLoader: batches of 2 from <")


def test_files_of_another_layout_than_their_name_says(tmp_path):
    lines, one = tmp_path / "rows.json", tmp_path / "rows.jsonl"
    lines.write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(DatasetError, match=r"it seems to hold one object a line: such a file is called \.jsonl"):
        Dataset(lines)
    for text, told in (
        ('[{"a": 1}]\n', "a list, not a JSON object; a file with one list"),
        ('[\n{"a": 1}\n]\n', "over several lines is a .json file"),
    ):
        one.write_text(text)
        with pytest.raises(DatasetError, match=told):
            Dataset(one)


def test_names_of_files_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    for kind in (Dataset, IterableDataset):
        for names in ([str(path)], [path], (str(path), "b")):
            with pytest.raises(DatasetError, match="this is a list of names of files"):
                kind(names)
    assert list(Dataset(["about rows.jsonl"])) == ["about rows.jsonl"]


def test_splits_are_to_be_chosen():
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list([{"a": 1}]))
    for kind in (Dataset, IterableDataset):
        with pytest.raises(DatasetError, match=r"this is a DatasetDict of the splits 'train': give one of them, e.g. splits\['train'\]"):
            kind(splits)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: pack_lengths([1.5, 2], 4),
        lambda: pack_lengths([[1, 2]], 4),
        lambda: pack_lengths([1], 1.5),
        lambda: plan_micro_batches([1, 2], 2.5),
        lambda: plan_micro_batches([1, 2], 4, count=1.5),
        lambda: PackingDataset([FEATURE], 8, lengths=[2.9]),
        lambda: InputProcessor(alignment=1.5),
        lambda: InputProcessor(sequence_alignment="2"),
        lambda: InputProcessor(pad_token_id=None),
        lambda: Template("nowhere", max_length=10.5),
    ],
)
def test_numbers_that_are_not_whole_are_refused(attempt):
    with pytest.raises((DatasetError, FormatError), match=r"whole number|token of the vocabulary"):
        attempt()
