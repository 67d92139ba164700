"""What rows of chat data become where a careless reading would lose or double something."""

import copy
import csv
import json

import numpy as np
import pytest

from twinkle_data import (
    Dataset,
    DatasetError,
    FormatError,
    InputFeature,
    InputProcessor,
    IterableDataset,
    IterablePackingDataset,
    PackingDataset,
    Template,
    TemplateError,
    append_context,
    append_sample,
    prompt_dataset,
)
from twinkle_data._packed import cut, loss_mask

SYSTEM, ASK = {"role": "system", "content": "S"}, {"role": "user", "content": "q"}
GOOD, BAD = {"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}


def turns(trajectory):
    return [(message.role, message.content) for message in trajectory.messages]


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("q", [SYSTEM, ASK]),
        (" q\n", [ASK]),
        ("q", [{"role": "user", "content": "first"}, BAD, ASK]),
        ([ASK], [SYSTEM, ASK]),
        ([SYSTEM, ASK], [SYSTEM, ASK]),
        ("q", []),
    ],
)
def test_a_prompt_that_stands_in_whole_conversations_is_not_asked_twice(prompt, before):
    (pair,) = Dataset([{"prompt": prompt, "chosen": [*before, GOOD], "rejected": [*before, BAD]}]).conversations()
    expected = [(turn["role"], turn["content"]) for turn in before or [ASK]]
    assert turns(pair.chosen) == [*expected, ("assistant", "A")]
    assert turns(pair.rejected) == [*expected, ("assistant", "B")]


def test_a_prompt_that_whole_conversations_do_not_have_is_refused():
    row = {"prompt": "another", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    with pytest.raises(DatasetError, match="chosen begins with a 'user' turn, so it is a whole conversation, but 'prompt' is neither"):
        Dataset([row]).conversations()[0]


RESTARTING = InputFeature(input_ids=[1, 2, 3, 4, 5], position_ids=[0, 1, 0, 1, 2])


@pytest.mark.parametrize("make", [PackingDataset, IterablePackingDataset])
def test_a_feature_of_several_sequences_is_packed_as_several(make):
    process = InputProcessor(padding_free=True)
    alone, packed = process([RESTARTING]), process(list(make([RESTARTING], max_length=8)))
    assert packed.cu_seq_lens.tolist() == alone.cu_seq_lens.tolist() == [0, 2, 5]
    assert packed.loss_mask.tolist() == alone.loss_mask.tolist()
    (row,) = make([RESTARTING], max_length=8)
    assert row.labels is not None
    assert (row.lengths.tolist(), row.labels.tolist()) == ([2, 3], [-100, 2, -100, 4, 5])


def test_a_part_of_several_sequences_keeps_where_each_begins():
    positions = cut(RESTARTING, slice(1, 5)).position_ids
    assert positions is not None
    assert positions.tolist() == [0, 0, 1, 2]
    pieces = [sequence.input_ids.tolist() for pack in PackingDataset([RESTARTING], max_length=3, too_long="split") for sequence in pack.features]
    assert sorted(pieces) == [[1, 2], [3], [4, 5]]


def test_the_labels_that_a_completion_mask_stands_for_survive_what_is_appended():
    masked = InputFeature(input_ids=[1, 2, 3], completion_mask=[0, 1, 1])
    for longer, new in ((append_sample(masked, [5]), [5]), (append_context(masked, [5]), [-100])):
        assert longer.labels is not None
        assert longer.labels.tolist() == [-100, 2, 3, *new]
        assert loss_mask(longer)[:3].tolist() == loss_mask(masked).tolist()
    labels = append_sample(InputFeature(input_ids=[1, 2]), [5]).labels
    assert labels is not None
    assert labels.tolist() == [-100, -100, 5], "a prompt is not trained on"


TOOL = {"type": "function", "function": {"name": "f"}}


def test_prompts_keep_the_tools_and_the_system_prompt_of_their_rows():
    prompts = prompt_dataset([{"messages": [ASK], "tools": [TOOL], "system": "S", "answer": 1}, {"prompt": "p", "answer": 2}], system="other")
    assert list(prompts[0].tools) == [TOOL]
    assert (turns(prompts[0]), prompts[0].user_data) == ([("system", "S"), ("user", "q")], {"answer": 1, "question": "q"})
    assert turns(prompts[1])[0] == ("system", "other")


def sharegpt(**turn):
    return {"conversations": [{"from": "human", "value": "q"}, turn]}


def test_every_field_of_a_sharegpt_turn_counts_or_is_refused():
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
    rows = [
        sharegpt(**call, weight=0),
        sharegpt(**{"from": "gpt"}, value="A", loss=False),
        sharegpt(**{"from": "gpt"}, value="A", train=False),
        sharegpt(**{"from": "gpt"}, value=None, tool_calls=[{"name": "f"}], reasoning_content="R"),
        sharegpt(**{"from": "gpt"}, value="A", weight=0.5, train=None),
    ]
    answers = [trajectory.messages[1] for trajectory in Dataset(rows).conversations()]
    assert [answer.loss for answer in answers] == [False, False, False, None, None]
    assert (answers[3].tool_calls[0].name, answers[3].reasoning_content, answers[4].loss_weight) == ("f", "R", 0.5)
    for row, match in (
        (sharegpt(**{"from": "gpt"}, value="A", likes=3), r"unknown fields \['likes'\]"),
        (sharegpt(**{"from": "gpt"}, value="A", train=1), "loss must be True, False or None"),
        (sharegpt(**{"from": "gpt"}, value="A", train=True, loss=False), "both 'train' and 'loss'"),
        (sharegpt(**{"from": "gpt"}, value="A", weight=0, loss=True), "weight 0 and loss=True"),
        (sharegpt(**call, tool_calls=[{"name": "g"}]), "has 'tool_calls' besides"),
    ):
        with pytest.raises(DatasetError, match=match):
            Dataset([row]).conversations()[0]


def test_nulls_that_a_table_puts_into_tools_and_calls_are_left_out(tmp_path):
    datasets = pytest.importorskip("datasets")

    def chat(name, arguments, parameters):
        calls = [{"function": {"name": name, "arguments": arguments}}]
        tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
        return {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": calls}], "tools": [tool], "extra": {name: None}}

    rows = [chat("f", {"x": {"y": 1}}, {"type": "object"}), chat("g", {"z": [2]}, {"required": ["z"]})]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    assert table[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"x": {"y": 1}, "z": None}, "a control: the table has them"
    for source in (table, tmp_path / "rows.parquet", tmp_path / "saved"):
        for row, found in zip(rows, Dataset(source).conversations(), strict=True):
            assert found.messages[1].tool_calls[0].arguments == row["messages"][1]["tool_calls"][0]["function"]["arguments"]
            assert list(found.tools) == row["tools"]
            assert found.user_data == {"extra": {"f": None, "g": None}}, "only tools and calls are touched"
    listed = Dataset([chat("f", {"x": None}, {})]).conversations()
    assert listed[0].messages[1].tool_calls[0].arguments == {"x": None}, "where keys are a row's own, a null is meant"


def test_user_data_is_joined_with_the_other_fields_of_a_row():
    row = {"messages": [ASK, GOOD], "answer": 5, "user_data": {"x": 1}}
    assert Dataset([row]).conversations()[0].user_data == {"answer": 5, "x": 1}
    with pytest.raises(DatasetError, match="fields 'x', and its 'user_data' has them too"):
        Dataset([{**row, "x": 2}]).conversations()[0]


def test_a_system_column_is_the_system_prompt_of_messages():
    assert turns(Dataset([{"messages": [ASK, GOOD], "system": "S"}]).conversations()[0])[0] == ("system", "S")
    assert turns(Dataset([{"messages": [SYSTEM, ASK, GOOD], "system": "T"}]).conversations()[0])[0] == ("system", "S")


def test_a_feature_is_one_flat_sequence():
    with pytest.raises(FormatError, match=r"input_ids has shape \(1, 3\); one sequence is a flat list"):
        InputFeature(input_ids=[[1, 2, 3]])
    assert len(InputFeature(input_ids=np.array([1, 2, 3]))) == 3


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"x": value}
    return value


def call(arguments):
    return {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": arguments}]}


FAILING = {
    "surrogate text": {"text": "\ud800"},
    "no text": {"text": 5},
    "surrogate argument": {"messages": [ASK, call({"x": "\ud800"})]},
    "surrogate in a tool": {"messages": [ASK, GOOD], "tools": [{"name": "f", "description": "\ud800"}]},
    "no turns": {"conversations": [], "system": "s"},
    "deep tools": {"messages": [ASK, GOOD], "tools": "[" * 100_000},
    "deep arguments": {"messages": [ASK, call("[" * 100_000)]},
    "deep mapping": {"messages": [ASK, call(nested(5000))]},
}


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("name", FAILING)
def test_rows_that_cannot_be_encoded_are_data_errors_and_can_be_skipped(make_tokenizer, name, lazy):
    template = Template(make_tokenizer("qwen3"))
    rows = Dataset([FAILING[name], {"text": "ok"}])
    skipping = rows.encode(template, on_error="skip", lazy=lazy)
    assert (len(skipping), skipping.skipped.count) == (1, 1)
    with pytest.raises(DatasetError, match="row 0"):
        rows.encode(template)[0]


def test_a_pair_that_is_too_long_is_left_out_when_rows_are(make_tokenizer):
    rows = Dataset([{"prompt": "q", "chosen": "hello " * 90, "rejected": "n"}, {"prompt": "q", "chosen": "y", "rejected": "n"}])
    dropping = rows.encode(Template(make_tokenizer("qwen3"), max_length=60, truncation="drop"))
    assert (len(dropping), dropping.skipped.count) == (1, 1)
    with pytest.raises(DatasetError, match=r"row 0: chosen: .* a pair cannot be split"):
        len(rows.encode(Template(make_tokenizer("qwen3"), max_length=60, truncation="split")))


def test_a_template_that_leaves_out_parallel_calls_is_refused(make_tokenizer):
    calls = [{"name": "e", "arguments": {"x": number}} for number in (1, 2)]
    messages = [ASK, {"role": "assistant", "content": None, "tool_calls": calls}]
    tokenizer = copy.deepcopy(make_tokenizer("qwen3"))
    assert Template(tokenizer).decode(Template(tokenizer).encode(messages).input_ids).count('"x"') == 2
    tokenizer.chat_template = tokenizer.chat_template.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
    with pytest.raises(DatasetError, match="leaves out some of several calls"):
        Dataset([{"messages": messages}]).encode(Template(tokenizer))[0]
    assert len(Template(tokenizer).encode([ASK, {**messages[1], "tool_calls": calls[:1]}])), "one call is rendered"


def test_errors_of_batch_encode_name_the_index(make_tokenizer):
    template = Template(make_tokenizer("qwen3"))
    with pytest.raises(FormatError, match=r"trajectories\[1\]: Trajectory.messages is empty"):
        template.batch_encode([[ASK, GOOD], []])


TOOL_CALL = {"function": {"name": "add", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("tool", {"messages": [{"role": "user", "content": "add 1 with add"}, GOOD], "tools": [{"function": {"name": "add"}}]}),
        ("call", {"messages": [ASK, {"role": "assistant", "content": "I add.", "tool_calls": [TOOL_CALL]}]}),
        ("reasoning", {"messages": [ASK, {"role": "assistant", "content": "Yes. So be it.", "reasoning_content": "Yes."}]}),
    ],
)
@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_what_a_template_leaves_out_is_missed_though_its_words_stand_in_the_text(make_tokenizer, family, what, fields):
    with pytest.raises(DatasetError, match=f"does not render .*{what}"):
        Dataset([fields]).encode(Template(make_tokenizer(family)))[0]
    if what == "call":
        with pytest.raises(DatasetError, match="does not render the call of 'add'"):
            Dataset([{"messages": [*fields["messages"], ASK]}]).encode(Template(make_tokenizer(family)), add_generation_prompt=True)[0]
    if what != "call":  # and where they are rendered, nothing is missed
        assert Dataset([fields]).encode(Template(make_tokenizer("qwen3")))[0].completion_mask.any()


def test_a_call_beside_a_text_that_names_it_is_missed_where_only_calls_alone_are_rendered(make_tokenizer):
    alone = [ASK, {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}]
    template = Template(make_tokenizer("deepseek"))
    assert "add" in template.decode(template.encode(alone).input_ids)
    with pytest.raises(TemplateError, match="does not render the call of 'add'"):
        template.encode([ASK, {**alone[1], "content": "I add."}])


@pytest.mark.parametrize("given", [0, False, [], 5])
def test_an_input_that_is_no_text_is_refused_and_not_left_out(given):
    with pytest.raises(DatasetError, match="row 0: input must be a text"):
        Dataset([{"instruction": "Double it.", "input": given, "output": "0"}]).conversations()[0]


def test_a_role_must_mean_one_that_there_is():
    row = {"messages": [{"role": "customer", "content": "q"}, {"role": "clerk", "content": "A"}]}
    assert turns(Dataset([row]).conversations(roles={"customer": "human", "clerk": "assistant"})[0]) == [("user", "q"), ("assistant", "A")]
    for attempt in (Dataset([row]).conversations, IterableDataset([row]).conversations):
        with pytest.raises(FormatError, match="roles says that 'clerk' means 'assitant', which is no role"):
            attempt(roles={"customer": "user", "clerk": "assitant"})


def test_openai_s_older_calls_and_what_its_answers_say_nothing_with():
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}, "refusal": None, "annotations": []}
    row = {"messages": [ASK, call, {"role": "function", "name": "f", "content": "2"}, GOOD], "functions": [{"name": "f"}]}
    (made,) = Dataset([row]).conversations()
    assert [(message.role, [call.name for call in message.tool_calls]) for message in made.messages][1:3] == [("assistant", ["f"]), ("tool", [])]
    with pytest.raises(DatasetError, match=r"messages\[1\] has both 'function_call' and 'tool_calls'"):
        Dataset([{"messages": [ASK, {**call, "tool_calls": [TOOL_CALL]}]}]).conversations()[0]
    with pytest.raises(DatasetError, match=r"unknown fields \['annotations'\]"):
        Dataset([{"messages": [ASK, {**GOOD, "annotations": [1]}]}]).conversations()[0]


def test_conversations_that_a_table_keeps_as_json_texts(tmp_path):
    path = tmp_path / "rows.csv"
    sharegpt = [{"from": "human", "value": 'a "q"'}, {"from": "gpt", "value": "A"}]
    for name, value in (("messages", [{"role": "user", "content": 'a "q"'}, GOOD]), ("conversations", sharegpt)):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([[name, "id"], [json.dumps(value, indent=1), "7"]])
        (made,) = Dataset(path).conversations()
        assert (turns(made), made.user_data) == ([("user", 'a "q"'), ("assistant", "A")], {"id": "7"})
        with pytest.raises(DatasetError, match=f"row 0: {name} is not JSON"):
            Dataset([{name: "{"}]).conversations()[0]
    asked = prompt_dataset([{"messages": json.dumps([ASK]), "answer": 1}])[0]
    assert turns(asked) == [("user", "q")]


@pytest.mark.parametrize("too_long", ["left", "split"])
def test_positions_of_a_part_that_begins_in_the_middle_of_an_image(too_long):
    # Two text tokens, an image of 2 x 2, two text tokens: time, height and width.
    axes = [[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]]
    rows = list(PackingDataset([InputFeature(input_ids=range(8), position_ids=axes)], max_length=5, too_long=too_long))
    (part,) = [row for row in rows if row.input_ids[-1] == 7]
    start = 8 - len(part)
    np.testing.assert_array_equal(part.position_ids, np.array(axes)[:, start:] - 2)


def test_targets_are_kept_when_tokens_are_appended():
    taught = InputFeature(input_ids=[1, 2], targets=[8, 9])
    targets = append_context(append_sample(taught, [5]), [6]).targets
    assert targets is not None
    assert targets.tolist() == [8, 9, 5, 6]
