"""Sources beyond plain JSON lines, the lazy path, places of rows, mixtures, and forms of chat data."""

import json
import pickle

import pytest

from twinkle_data import Dataset, DatasetError, IterableDataset, Trajectory, concatenate, mix, prompt_dataset


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_json_files_hold_a_list_or_an_object_with_one(tmp_path):
    path = tmp_path / "rows.json"
    for text in ('[{"a": 1}, {"a": 2}]', '{"version": 3, "data": [{"a": 1}, {"a": 2}]}'):
        path.write_text(text)
        assert list(Dataset(path)) == [{"a": 1}, {"a": 2}]
    for text, message in (("3", "holds an int"), ('{"a": 1}', "with 0 lists"), ('[{"a": 1}, 2]', "row 2: an int"), ("{", "not valid JSON")):
        path.write_text(text)
        with pytest.raises(DatasetError, match=message):
            Dataset(path)


def test_csv_files_have_columns(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("a\tb\n1\t2\n")
    assert list(Dataset(path)) == [{"a": "1", "b": "2"}]
    for text, message in (("", "is empty"), ("a\ta\n", "a column name stands there twice"), ('a\tb\n"x\t', "not valid CSV")):
        path.write_text(text)
        with pytest.raises(DatasetError, match=message):
            Dataset(path)


def test_a_pattern_reads_all_files_in_order_and_names_their_lines(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(lines({"a": name}, {"a": 1}))
    for lazy in (False, True):
        dataset = Dataset(str(tmp_path / "*.jsonl"), lazy=lazy)
        assert [row["a"] for row in dataset] == ["a", 1, "b", 1]
        with pytest.raises(DatasetError, match=r"row 0 \(.*a.jsonl, line 1\): upper failed|row 1 \(.*a.jsonl, line 2\)"):
            list(dataset.map(lambda row: row["a"].upper()))
        assert dataset[2:].where(0).endswith("b.jsonl, line 1)")
    with pytest.raises(DatasetError, match="no file matches"):
        Dataset(str(tmp_path / "*.csv"))


def test_lazy_rows_are_read_from_their_file_and_travel_as_places_in_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines(*({"a": index, "pad": "x" * 1000} for index in range(500))))
    dataset = Dataset(path, lazy=True)
    packed = pickle.dumps(dataset)
    assert len(packed) < path.stat().st_size / 10
    assert [row["a"] for row in pickle.loads(packed)] == list(range(500))
    assert dataset[-1]["a"] == 499
    path.write_text(lines({"a": 7}))
    with pytest.raises(DatasetError, match="has changed since its lines were counted"):
        pickle.loads(packed)[0]


def test_lazy_errors_come_when_a_row_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines({"a": 1}) + "[]\n" + lines({"a": 2}))
    dataset = Dataset(path, lazy=True)
    assert (len(dataset), dataset[2]) == (3, {"a": 2})
    with pytest.raises(DatasetError, match="line 2: a list, not a JSON object"):
        dataset[1]
    assert list(dataset.map(lambda row: row["a"], on_error="skip")) == [1, 2]


@pytest.mark.full  # loading the library takes longer than all else in this file
def test_parquet_and_saved_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "splits")
    for path in (tmp_path / "rows.parquet", tmp_path / "saved", str(tmp_path / "splits" / "test")):
        assert [message.content for message in Dataset(path).conversations()[0].messages] == ["a", "b"]
    with pytest.raises(DatasetError, match="has the splits 'train', 'test': choose one"):
        Dataset(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text(lines(*rows))
    assert len(Dataset.from_hub(str(tmp_path / "files"), split="train")) == 1
    with pytest.raises(DatasetError, match=r"is none that datasets.save_to_disk wrote"):
        Dataset(tmp_path / "files")


def test_a_mixture_draws_by_weight_and_is_the_same_for_a_seed():
    many, few = Dataset(range(3000)), Dataset(range(10_000, 11_000))
    mixed = mix(many, few, weights=[3, 1], seed=5)
    assert list(mixed) == list(mix(many, few, weights=[0.75, 0.25], seed=5)) != list(mix(many, few, weights=[3, 1], seed=6))
    share = sum(row >= 10_000 for row in mixed) / len(mixed)
    assert abs(share - 0.25) < 0.04, "four standard errors of 3,000 draws are 0.03"
    assert [row for row in mixed if row < 10_000] == list(range(sum(row < 10_000 for row in mixed)))
    everything = list(mix(many, Dataset([-1]), stop="all"))
    assert set(everything) == {*range(3000), -1}
    for stop in ("first", "all"):  # a set and a stream are mixed alike
        kinds = [[kind(range(5)), kind(range(100, 103))] for kind in (Dataset, IterableDataset)]
        as_set, as_stream = (list(mix(*parts, weights=[1, 2], seed=3, stop=stop)) for parts in kinds)
        assert as_set == as_stream
    for bad in ([1], [1, 0], [1, float("inf")]):
        with pytest.raises(DatasetError, match="one weight above zero for each"):
            mix(many, few, weights=bad)
    with pytest.raises(DatasetError, match="dataset 1 has no rows"):
        mix(many, Dataset([]))


def test_concatenate_and_shuffle_keep_every_row():
    both = concatenate(Dataset(["a", "b"]), Dataset([]), Dataset(["c"]))
    assert list(both) == ["a", "b", "c"]
    assert sorted(both.shuffle(3)) == ["a", "b", "c"]
    assert list(Dataset(range(99)).shuffle(3)) == list(Dataset(range(99)).shuffle(3)) != list(range(99))


QUESTION, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
FORMS = {
    "messages": {"messages": [QUESTION, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
    "alpaca": {"instruction": "Q", "input": "", "output": "A"},
    "prompt_completion": {"prompt": "Q", "completion": [ANSWER]},
    "question_answer": {"problem": "Q", "solution": "A"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_the_same_conversation(form):
    dataset = Dataset([{**FORMS[form], "id": 7}])
    row = dataset.conversations()[0]
    assert [(message.role, message.content) for message in row.messages] == [("user", "Q"), ("assistant", "A")]
    assert row.user_data["id"] == 7
    report = dataset.inspect()
    assert (report.schema, report.num_problems, report.roles) == (form, 0, {"user": 1, "assistant": 1})
    assert form in str(report)
    assert dataset.conversations(schema=form)[0] == row


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q", "chosen": "A", "rejected": "B"},
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "B"}]},
        {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, {"role": "assistant", "content": "B"}]},
        {"prompt": "Q", "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, {"role": "assistant", "content": "B"}]},
    ],
)
def test_preference_pairs_in_every_form(row):
    pair = Dataset([{**row, "margin": 2}]).conversations()[0]
    sides = [[message.content for message in side.messages] for side in (pair.chosen, pair.rejected)]
    assert (sides, pair.user_data) == ([["Q", "A"], ["Q", "B"]], {"margin": 2})


def test_forms_with_more_in_them():
    sharegpt = {
        "system": "S",
        "conversations": [
            {"from": "human", "value": "Q"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "A"},
        ],
        "tools": '[{"name": "add"}]',
    }
    row = Dataset([sharegpt]).conversations()[0]
    assert [message.role for message in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert (row.messages[2].tool_calls[0].name, row.tools) == ("add", ({"name": "add"},))
    alpaca = {"instruction": "I", "input": "X", "output": "A", "history": [["q", "a"]]}
    assert [message.content for message in Dataset([alpaca]).conversations()[0].messages] == ["q", "a", "I\n\nX", "A"]
    weighted = {"messages": [QUESTION, {**ANSWER, "weight": 0}, QUESTION, {**ANSWER, "reasoning": "R"}]}
    messages = Dataset([weighted]).conversations()[0].messages
    assert (messages[1].loss, messages[3].reasoning_content) == (False, "R")


def test_a_report_tells_forms_fields_and_problems():
    rows = [*FORMS.values(), {"messages": [{"role": "bot9", "content": "x"}]}, {"x": 1}, {"text": "plain"}]
    report = Dataset(rows).inspect(limit=None)
    assert (report.num_rows, report.schema, report.num_problems) == (8, None, 2)
    assert report.schemas["unknown"] == 1
    assert report.fields["messages"] == {"list": 2}
    assert "row 5: messages[0].role is 'bot9'" in report.problems[0]
    assert "2 rows cannot be made a conversation" in str(report)


def test_prompt_sets_are_prompts_with_answers(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines({"question": "1 + 1?", "answer": 2, "level": "easy"}, {"problem": "x", "solution": "y"}, {"problem": "x"}))
    dataset = prompt_dataset(path, system="Be brief.")
    assert isinstance(dataset[0], Trajectory)
    assert [message.role for message in dataset[0].messages] == ["system", "user"]
    assert dataset[0].user_data == {"question": "1 + 1?", "answer": 2, "level": "easy"}
    assert dataset[1].user_data["answer"] == "y"
    with pytest.raises(DatasetError, match=r"row 2 \(.*prompts.jsonl, line 3\): no field 'answer' or 'solution'"):
        dataset[2]
    assert "answer" not in prompt_dataset(path, require_answer=False)[2].user_data
    with pytest.raises(DatasetError, match="ends with an assistant turn"):
        prompt_dataset([{"messages": [QUESTION, ANSWER], "answer": "A"}])[0]
    assert prompt_dataset([{"p": "x", "r": 3}], prompt="p", answer="r")[0].user_data["answer"] == 3
