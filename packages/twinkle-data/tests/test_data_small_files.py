"""Twenty small files as they are found: each loads, or gives an error that names the line and what is wrong."""

import gzip
import json

import pytest

from twinkle_data import Dataset, DatasetError, Template

TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes."}]
ROW = json.dumps({"messages": TALK})


def with_turns(*turns):
    return (json.dumps({"messages": list(turns)}) + "\n").encode()


def said(dataset, index=0):
    return [message.content for message in dataset.conversations()[index].messages]


@pytest.fixture
def write(tmp_path):
    def save(content, name="rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return save


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + ROW.encode() + b"\n" + ROW.encode(),  # byte order mark, no line end after the last row
        f"{ROW}\r\n{ROW}\r\n".encode(),  # CRLF
        f"\n{ROW}\n\n  \t\r\n\n{ROW}\n\r\n".encode(),  # empty lines
        gzip.compress(f"{ROW}\n{ROW}\n".encode()),  # packed, though not by its name
    ],
    ids=["bom", "crlf", "empty lines", "gzip"],
)
def test_files_that_load_as_they_are(write, content, lazy):
    dataset = Dataset(write(content), lazy=lazy)
    assert [said(dataset, index) for index in range(len(dataset))] == [["Hello", "Yes."]] * 2


@pytest.mark.parametrize("lazy", [False, True])
def test_one_line_of_20_mb(write, lazy):
    text = "All of it. " * (20 * 2**20 // 11)
    dataset = Dataset(write(with_turns({"role": "user", "content": text}, TALK[1]) + ROW.encode()), lazy=lazy)
    assert [len(said(dataset)[0]), said(dataset, 1)] == [len(text), ["Hello", "Yes."]]


def test_nested_nulls(write):
    padded = [{**turn, "name": None, "tool_calls": None, "weight": None} for turn in TALK]
    rows = [{"messages": padded, "tools": None, "extra": {"a": None}}, {"messages": [{"role": "user", "content": None}]}, {"messages": None}]
    dataset = Dataset(write("\n".join(map(json.dumps, rows)).encode())).conversations()
    assert [message.content for message in dataset[0].messages] == ["Hello", "Yes."]
    assert dataset[0].user_data == {"extra": {"a": None}}
    with pytest.raises(DatasetError, match=r"row 1 \(.*rows.jsonl, line 2\): messages\[0\]: field 'content' is null"):
        dataset[1]
    with pytest.raises(DatasetError, match=r"row 2 .*line 3\): cannot tell what form"):
        dataset[2]


def test_mixed_schemas(write):
    sharegpt = {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Yes."}]}
    dataset = Dataset(write(f"{ROW}\n{json.dumps(sharegpt)}\n".encode()))
    assert [said(dataset, index) for index in (0, 1)] == [["Hello", "Yes."]] * 2
    assert dataset.inspect().schemas == {"messages": 1, "sharegpt": 1}
    with pytest.raises(DatasetError, match=r"row 1 .*line 2\): no field 'messages' \(the row has 'conversations'\)"):
        list(dataset.conversations(schema="messages"))


def test_emoji_and_combining_characters(write, make_tokenizer):
    text = "e\u0301 \U0001f469\u200d\U0001f52c \u6f22\u5b57 caf\u00e9"
    feature = Dataset(write(with_turns({"role": "user", "content": text}, TALK[1]))).encode(template := Template(make_tokenizer("chatml")))[0]
    assert text in template.decode(feature.input_ids)


def test_lone_surrogates(write):
    line = b'{"messages": [{"role": "user", "content": "a \\ud83d b"}, {"role": "assistant", "content": "Yes."}]}\n'
    with pytest.raises(DatasetError, match=r"row 0 .*line 1\): messages\[0\]: Message.content holds a lone surrogate .*at character 2"):
        Dataset(write(line)).conversations()[0]


def test_duplicate_keys(write):
    with pytest.raises(DatasetError, match=r"line 2: an object has the key 'role' twice"):
        Dataset(write(ROW.encode() + b'\n{"messages": [{"role": "user", "role": "system", "content": "a"}]}\n'))


def test_unknown_role(write):
    path = write(with_turns({"role": "customer", "content": "Hello"}, TALK[1]))
    with pytest.raises(DatasetError, match=r"row 0 .*line 1\): messages\[0\].role is 'customer', which is no known role"):
        Dataset(path).conversations()[0]
    assert Dataset(path).conversations(roles={"customer": "user"})[0].messages[0].role == "user"


def test_empty_assistant_turn(write, make_tokenizer):
    template = Template(make_tokenizer("chatml"))
    feature = Dataset(write(with_turns(TALK[0], {"role": "assistant", "content": ""}))).encode(template)[0]
    assert template.decode(feature.input_ids[feature.labels != -100], skip_special_tokens=False) == "<|im_end|>"


def test_tool_call_without_result(write, make_tokenizer):
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}]}
    dataset = Dataset(write(with_turns(TALK[0], call) + with_turns(TALK[0], call, *TALK)))
    for feature in dataset.encode(template := Template(make_tokenizer("qwen3"))):
        assert '"name": "add"' in template.decode(feature.input_ids[feature.labels != -100])


@pytest.mark.parametrize("place", [2, 3])
def test_system_message_in_the_middle_and_two_assistant_turns_in_a_row(write, make_tokenizer, place):
    turn = {"role": "system", "content": "Be brief."} if place == 3 else TALK[1]
    path = write(with_turns(*[*TALK, *TALK][:place], turn, *[*TALK, *TALK][place:]))
    assert len(Dataset(path).encode(Template(make_tokenizer("chatml")))[0]) > 0
    with pytest.raises(DatasetError, match=r"row 0 .*line 1\): the chat template refuses messages with the roles \[user, assistant"):
        Dataset(path).encode(Template(make_tokenizer("gemma")))[0]


def test_content_as_a_list_of_parts(write):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    image = [{"type": "image_url", "image_url": {"url": "a"}}]
    dataset = Dataset(write(with_turns({"role": "user", "content": parts}, TALK[1]) + with_turns({"role": "user", "content": image})))
    assert said(dataset) == ["Hello", "Yes."]
    with pytest.raises(DatasetError, match=r"row 1 .*messages\[0\].content\[0\] is a part of type 'image_url'"):
        said(dataset, 1)


def test_numbers_as_strings(write):
    weighted = {"role": "assistant", "content": "Yes.", "weight": "0"}
    dataset = Dataset(write(with_turns(TALK[0], weighted) + with_turns({"role": "user", "content": 12})))
    with pytest.raises(DatasetError, match=r"row 0 .*messages\[1\]: Message.loss_weight is '0'; it must be a finite number"):
        said(dataset)
    with pytest.raises(DatasetError, match=r"row 1 .*messages\[0\]: Message.content must be a string, not int"):
        said(dataset, 1)


@pytest.mark.parametrize("lazy", [False, True])
def test_truncated_last_line(write, lazy):
    path = write(f"{ROW}\n{ROW}\n{ROW[:30]}".encode())
    with pytest.raises(DatasetError, match=r"rows.jsonl, line 3: not valid JSON .*the file may have been cut off here"):
        list(Dataset(path, lazy=lazy))
    good = Dataset(path, lazy=lazy, on_error="skip")
    assert (len(good), good.skipped.count) == (2, 1)
    assert "line 3" in good.skipped.reasons[0]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("mark", "encoding"), [(b"", "utf-16"), (b"\xfe\xff", "utf-16-be"), (b"", "utf-16-be"), (b"", "utf-16-le")])
def test_utf_16_file(write, mark, encoding, lazy):
    with pytest.raises(DatasetError, match=r"is a UTF-16 or UTF-32 file; make it UTF-8, e.g. iconv"):
        Dataset(write(mark + ROW.encode(encoding)), lazy=lazy)


def test_gzip_file_by_name_and_one_that_was_cut_off(write):
    packed = gzip.compress(f"{ROW}\n{ROW}\n".encode())
    assert len(Dataset(write(packed, "rows.jsonl.gz"))) == 2
    with pytest.raises(DatasetError, match=r"cannot read .*rows.jsonl.gz"):
        Dataset(write(packed[:-20], "rows.jsonl.gz"))


def test_csv_with_quoted_newlines(write):
    content = b'prompt,completion\r\n"Hello,\nyou","He said ""Yes.""\r\n"\r\n\r\nHow?,So.\r\nlonely\r\n'
    dataset = Dataset(write(content, "rows.csv"), on_error="skip")
    assert [said(dataset, index) for index in (0, 1)] == [["Hello,\nyou", 'He said "Yes."\r\n'], ["How?", "So."]]
    assert dataset.where(1).endswith("rows.csv, line 6)")
    with pytest.raises(DatasetError, match=r"rows.csv, line 7: 1 cells, the first line names 2 columns"):
        Dataset(write(content, "rows.csv"))


def test_values_nested_too_deep(write):
    with pytest.raises(DatasetError, match="line 1: values are nested too deep"):
        Dataset(write(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"))
