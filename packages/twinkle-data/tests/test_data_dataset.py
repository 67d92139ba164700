"""Dataset: sources, lazy and eager transforms, splits, and errors that name the row."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_data import Dataset, DatasetError, Template, Trajectory, task_dataset


class Counting:
    """A function that counts its calls."""

    def __init__(self, fn):
        self.fn, self.calls = fn, 0

    def __call__(self, row):
        self.calls += 1
        return self.fn(row)


@pytest.mark.parametrize(
    "source",
    [[1, 2, 3], (1, 2, 3), range(1, 4), iter([1, 2, 3]), lambda: [1, 2, 3], lambda: (i for i in (1, 2, 3)), Dataset([1, 2, 3])],
)
def test_every_kind_of_source_gives_its_rows(source):
    dataset = Dataset(source)
    assert list(dataset) == [1, 2, 3]
    assert (len(dataset), dataset[0], dataset[-1], list(dataset[1:])) == (3, 1, 3, [2, 3])
    with pytest.raises(IndexError, match="row 3 of a dataset with 3 rows"):
        dataset[3]


@pytest.mark.full  # loading the library takes longer than all else in this file
def test_a_hugging_face_dataset_is_a_source():
    datasets = pytest.importorskip("datasets")
    assert Dataset(datasets.Dataset.from_list([{"a": 1}, {"a": 2}])).map(lambda row: row["a"])[1] == 2


def test_jsonl_rows_are_read_and_bad_lines_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"a": "\u00e9"}) + "\n\n" + json.dumps({"a": 2}) + "\n", encoding="utf-8")
    assert list(Dataset(path)) == list(Dataset(str(path))) == [{"a": "\u00e9"}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DatasetError, match="line 2: not valid JSON"):
        Dataset(path)
    path.write_text("[1]\n")
    with pytest.raises(DatasetError, match="line 1: a list, not a JSON object"):
        Dataset(path)
    path.write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(DatasetError, match="line 2: not UTF-8"):
        Dataset(path)
    with pytest.raises(DatasetError, match="there is no file"):
        Dataset(tmp_path / "absent.jsonl")
    with pytest.raises(DatasetError, match=r"not a \.jsonl file, nor one of"):
        Dataset(tmp_path / "rows.xlsx")


@pytest.mark.parametrize("source", [3, {"a": [1]}])
def test_a_source_without_rows_is_refused(source):
    with pytest.raises(DatasetError, match=r"a mapping has no rows|is made from a sequence"):
        Dataset(source)


@given(rows=st.lists(st.integers(-9, 9), max_size=20), lazy=st.booleans())
def test_map_and_filter_are_those_of_lists(rows, lazy):
    dataset = Dataset(rows).map(lambda row: 3 * row, lazy=lazy).filter(lambda row: row % 2 == 0, lazy=lazy).map(str, lazy=lazy)
    assert list(dataset) == [str(3 * row) for row in rows if row % 2 == 0]


def test_lazy_transforms_touch_only_the_rows_that_are_read():
    lazy, eager = Counting(str), Counting(str)
    dataset = Dataset(range(1000)).map(lazy)
    assert (len(dataset), dataset[7], lazy.calls) == (1000, "7", 1)
    Dataset(range(10)).map(eager, lazy=False)
    assert eager.calls == 10


def test_a_function_that_fails_is_reported_with_row_and_field():
    rows = Dataset([{"question": "a", "answer": "b"}, {"question": "a"}])
    with pytest.raises(DatasetError, match=r"row 1: .*lambda.* failed: no field 'answer' \(the row has 'question'\)"):
        list(rows.map(lambda row: row["answer"]))
    with pytest.raises(DatasetError, match=r"row 0: int failed: TypeError") as caught:
        rows.map(int, lazy=False)
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(DatasetError, match="row 1: "):
        len(rows.filter(lambda row: row["answer"]))


def test_encode_takes_trajectories_and_mappings_and_names_what_is_wrong(make_tokenizer):
    template = Template(make_tokenizer("chatml"))
    messages = [{"role": "user", "content": "Hello"}]
    encoded = Dataset([Trajectory(messages=messages), {"messages": messages, "answer": "19"}]).encode(template, add_generation_prompt=True)
    assert encoded[0].input_ids.tolist() == encoded[1].input_ids.tolist()
    assert encoded[1].user_data == {"answer": "19"}
    with pytest.raises(DatasetError, match=r"row 1: cannot tell what form of chat data this is \(its fields are 'question'\): question_answer lacks"):
        list(Dataset([{"messages": messages}, {"question": "a"}]).encode(template))
    with pytest.raises(DatasetError, match=r"row 0: messages\[0\]: no field 'content' \(the message has 'role'\)"):
        Dataset([{"messages": [{"role": "user"}]}]).encode(template)[0]
    with pytest.raises(DatasetError, match=r"row 1: no field 'messages' \(the row has 'question'\)"):
        list(Dataset([{"messages": messages}, {"question": "a"}]).encode(template, schema="messages"))
    with pytest.raises(DatasetError, match=r"row 0: cannot tell what form .* an int"):
        Dataset([3]).encode(template, lazy=False)


def test_encode_drops_or_reports_rows_that_are_too_long(make_tokenizer):
    rows = Dataset([{"messages": [{"role": "user", "content": text}]} for text in ("Yes", "Hello there, how are you today?" * 4, "x")])
    dropping = Template(make_tokenizer("chatml"), max_length=12, truncation="drop")
    assert len(rows.encode(dropping)) == len(rows.encode(dropping, lazy=False)) == 2
    with pytest.raises(DatasetError, match=r"row 1: \d+ tokens, max_length is 12"):
        list(rows.encode(Template(make_tokenizer("chatml"), max_length=12)))


@given(size=st.integers(0, 40), share=st.floats(0.05, 0.95), seed=st.integers(0, 99))
def test_a_random_split_partitions_the_rows(size, share, seed):
    rest, held_out = Dataset(range(size)).split(held_out=share, seed=seed)
    assert sorted([*rest, *held_out]) == list(range(size))
    assert len(held_out) == round(share * size)


def test_a_split_by_key_never_parts_equal_keys():
    rest, held_out = Dataset([i % 500 for i in range(2000)]).split(held_out=0.25, key=str)
    assert not set(rest) & set(held_out)
    assert len(rest) + len(held_out) == 2000
    # 500 keys at 1/4: the standard error is 0.019, four of them are allowed.
    assert abs(len(held_out) / 2000 - 0.25) < 0.08
    assert list(Dataset(range(500)).split(held_out=0.25, key=str)[1]) == sorted(set(held_out))


def test_split_and_select_refuse_what_is_out_of_range():
    with pytest.raises(DatasetError, match="must lie between 0 and 1"):
        Dataset([1]).split(held_out=1)
    with pytest.raises(IndexError, match="indices 0 to 2 on a dataset with 2 rows"):
        Dataset([1, 2]).select([0, 2])
    assert list(Dataset([1, 2]).select([-1, 0, 0])) == [2, 1, 1]


def test_a_reasoning_task_gives_prompts_with_their_answers():
    rows = task_dataset("chain_sum", size=4, seed=3)
    assert len(rows) == 4
    assert [message.role for message in rows[0].messages] == ["user"]
    assert set(rows[0].user_data) == {"question", "answer", "metadata"}
    assert rows[2] == task_dataset("chain_sum", size=9, seed=3)[2]


def test_unknown_tasks_and_options_are_named():
    with pytest.raises(DatasetError, match="no task 'chain_sums'; did you mean 'chain_sum'"):
        task_dataset("chain_sums")
    with pytest.raises(DatasetError, match=r"'chain_sum' refuses the options .*num_words"):
        task_dataset("chain_sum", num_words=3)
    with pytest.raises(DatasetError, match="refuses the options"):
        task_dataset("chain_sum", min_terms=5, max_terms=2)
