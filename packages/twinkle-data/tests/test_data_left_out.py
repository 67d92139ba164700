"""Rows that are left out are counted and told; what would train on nothing is told before."""

import logging
import subprocess
import sys
from typing import Any

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
    Message,
    PackedFeature,
    PackingDataset,
    RetrySampler,
    Template,
    mix,
    prompt_dataset,
    task_dataset,
)

ANSWERED = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LONG = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 80}]}


def _features(*lengths: int) -> list[InputFeature]:
    return [InputFeature(input_ids=range(length)) for length in lengths]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "twinkle_data" and record.levelno == logging.WARNING]


@pytest.mark.parametrize("options", [{}, {"lazy": False}, {"num_proc": 2}], ids=str)
def test_rows_that_a_template_drops_are_counted_and_told(make_tokenizer, caplog, options):
    template = Template(make_tokenizer("chatml"), max_length=50, truncation="drop")
    found = Dataset([ANSWERED, LONG, ANSWERED, {"text": "c " * 80}]).encode(template, **options)
    assert len(found) == 2
    assert found.skipped.count == 2
    assert [reason.split(":")[0] for reason in found.skipped.reasons] == ["row 1", "row 3"]
    assert _warnings(caplog) == [str(found.skipped)]
    assert "more than 50 tokens" in str(found.skipped)


def test_nothing_is_told_where_nothing_is_dropped(make_tokenizer, caplog):
    found = Dataset([ANSWERED]).encode(Template(make_tokenizer("chatml"), max_length=50, truncation="drop"))
    assert (len(found), found.skipped.count, _warnings(caplog)) == (1, 0, [])
    assert len(Dataset([1, 2]).filter(lambda row: row > 1)) == 1  # what a filter leaves out is meant
    assert _warnings(caplog) == []


def test_rows_that_packing_drops_are_counted_and_told(caplog):
    packed = PackingDataset(_features(3, 9, 4, 12), 8, too_long="drop")
    assert packed.skipped.count == 2
    assert packed.skipped.reasons[0] == "row 1 has 9 tokens, a pack at most 8"
    assert _warnings(caplog) == [str(packed.skipped)]
    caplog.clear()
    stream = IterablePackingDataset(_features(3, 9, 4, 12), 8, too_long="drop")
    for _ in range(2):  # each pass counts anew
        assert sum(map(len, stream)) == 7
        assert stream.skipped == packed.skipped
    assert _warnings(caplog) == [str(packed.skipped)] * 2


def test_a_pass_over_a_stream_tells_what_it_left_out(make_tokenizer, caplog):
    stream = IterableDataset([ANSWERED, {"question": "?"}, LONG]).encode(
        Template(make_tokenizer("chatml"), max_length=50, truncation="drop"), on_error="skip"
    )
    rows = iter(stream)
    next(rows)
    assert _warnings(caplog) == []
    assert list(rows) == []
    assert stream.skipped.count == 2
    assert _warnings(caplog) == [str(stream.skipped)]


def test_packing_names_a_row_by_its_file_and_line(tmp_path, make_tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"text": "' + "a " * 40 + '"}\n')
    with pytest.raises(Exception, match=r"row 0 \(.*rows.jsonl, line 2\) has \d+ tokens, a pack at most 8"):
        PackingDataset(Dataset(path).encode(Template(make_tokenizer("chatml"))), 8)


def test_a_misspelt_role_is_an_error_for_every_way_into_a_template(make_tokenizer):
    template = Template(make_tokenizer("chatml"))
    messages = [{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}]
    for encode in (
        template.encode,
        lambda given: template.batch_encode([given]),
        lambda given: template.extend(template.encode(messages[:1]), given),
    ):
        with pytest.raises(FormatError, match=r"messages\[[01]\]\.role is 'asistant', which is no known role .*other_roles=\['asistant'\]"):
            encode(messages)
    knowing = Template(make_tokenizer("chatml"), other_roles=["narrator"])
    assert len(knowing.encode([Message(role="narrator", content="x"), *ANSWERED["messages"]])) > len(knowing.encode(ANSWERED["messages"]))


def test_a_report_tells_what_nothing_is_trained_on():
    begun = {"conversations": [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    report = Dataset([ANSWERED, {"messages": ANSWERED["messages"][:1]}, begun]).inspect()
    assert (report.num_problems, report.num_without_answer, report.num_answer_first) == (0, 1, 1)
    assert "1 row without a turn of the assistant" in str(report)
    assert "1 row begun by the assistant, which encode refuses" in str(report)
    assert "assistant:" not in str(Dataset([ANSWERED]).inspect())


def test_what_is_given_in_a_wrong_shape_is_told(make_tokenizer, tmp_path):
    template = Template(make_tokenizer("chatml"))
    pairs = [template.encode_pair(pair) for pair in Dataset([{"prompt": "q", "chosen": "y", "rejected": "n"}]).conversations()]
    attempts: list[tuple[Any, type[Exception], str]] = [
        (lambda: Dataset([ANSWERED]).encode("folder"), DatasetError, r"encode takes a Template, not a str: Template\('folder'\)"),  # pyright: ignore[reportArgumentType]
        (lambda: InputProcessor()(pairs), FormatError, r"features\[0\] is a pair of features \(chosen, rejected\): collate \[side for"),  # pyright: ignore[reportArgumentType]
        (lambda: PackingDataset(pairs, 64), FormatError, r"row 0 is a pair of features"),
        (lambda: InputProcessor()(_features(3)[0]), FormatError, "a list of features is collated, not an InputFeature alone"),  # pyright: ignore[reportArgumentType]
        (lambda: mix([Dataset([1])], weights=[3, 1]), DatasetError, r"datasets are given one by one: mix\(a, b\)"),  # pyright: ignore[reportArgumentType, reportCallIssue]
        (lambda: prompt_dataset([{"question": "q", "answer": None}])[0], DatasetError, "row 0: the field 'answer' is null; say answer="),
        (lambda: Dataset([{"prompt": "q"}]).conversations()[0], DatasetError, "prompt_completion lacks 'completion' or 'response'"),
        (lambda: Dataset("~/no-such-file.jsonl"), DatasetError, r"there is no file '/.*/no-such-file.jsonl'"),
    ]
    for attempt, error, text in attempts:
        with pytest.raises(error, match=text):
            attempt()
    assert len(InputProcessor()([side for pair in pairs for side in pair]).input_ids) == 2


def test_a_task_of_no_rows_and_a_sampler_of_features_are_errors():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DatasetError, match="size of the task 'gcd' is -5; it must be a whole number, at least 1"):
        task_dataset("gcd", size=-5)
    retry = RetrySampler(DataLoader(["a", "b"], batch_size=2), lambda rows: _features(2, 2), lambda rows, responses: [1.0, 0.0], batch_size=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DatasetError, match="sample returned an InputFeature for a prompt; it returns a SampleResponse for each"):
        retry.next()


def test_what_is_printed_fits_a_line(make_tokenizer):
    feature = InputFeature(input_ids=[1, 2, 3], labels=[-100, 2, 3], advantages=1.0)
    assert repr(feature) == "<InputFeature of 3 tokens, 2 trained on, advantages>"
    assert repr(PackedFeature(features=[feature, feature])) == "<PackedFeature of 2 sequences, 6 tokens>"
    assert "max_length=9, truncation='left'" in repr(Template(make_tokenizer("chatml"), max_length=9, truncation="left"))
    assert repr(IterableDataset([1]).take(2)).startswith("<IterableDataset: ")


def test_a_script_that_holds_an_iterator_ends_silently():
    script = "import twinkle_data as d\nl = d.DataLoader(list(range(9)), batch_size=4)\nit = iter(l)\nnext(it)\nimport datasets\n"
    pytest.importorskip("datasets")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr == ""
