"""The toy tokenizer and the arithmetic task."""

import pytest

from twinkle_data import DatasetError, InputFeature, SampledSequence, Template
from twinkle_data.toy import arithmetic_task, exact_match, running_totals, toy_tokenizer, with_response


@pytest.fixture(scope="module")
def task():
    return arithmetic_task(num_problems=3000, num_held_out=100)


@pytest.fixture(scope="module")
def template(task):
    rows = task.train[:2000]
    return Template(toy_tokenizer([text for row in rows for text in (row.user_data["question"], row.user_data["answer"])]))


def test_training_and_held_out_problems_share_no_expression(task):
    train, held_out = ({row.user_data["expression"] for row in part} for part in (task.train, task.held_out))
    assert len(train) == len(task.train)
    assert len(held_out) == len(task.held_out) == 100
    assert not train & held_out


def test_the_split_depends_on_the_expression_alone(task):
    other = arithmetic_task(num_problems=2000, seed=5)
    train, held_out = ({row.user_data["expression"] for row in part} for part in (other.train, other.held_out))
    assert not train & {row.user_data["expression"] for row in task.held_out}
    assert not held_out & {row.user_data["expression"] for row in task.train}


def test_the_last_running_total_is_the_answer(task):
    assert running_totals("0 + 1 + 9 - 0") == "1 10 10"
    assert running_totals("12 - 40") == "-28"
    for row in task.held_out:
        assert row.user_data["response"].split(" ")[-1] == row.user_data["answer"]
        assert row.user_data["expression"] in row.messages[0].content


@pytest.mark.parametrize("expression", ["", "1", "1 +", "1 * 2"])
def test_what_is_no_chain_of_sums_is_refused(expression):
    with pytest.raises(DatasetError, match="not a chain of sums"):
        running_totals(expression)


def test_other_lengths_of_sums_work():
    task = arithmetic_task(num_terms=2, num_digits=2, num_problems=300)
    expression = task.train[0].user_data["expression"].split()
    assert len(expression) == 3
    assert len(expression[0]) == 2
    with pytest.raises(DatasetError, match="too few to split"):
        arithmetic_task(num_problems=1)


def test_the_tokenizer_has_the_documented_tokens_and_knows_no_markers(task, template):
    tokenizer = template.tokenizer
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<eos>"]) == [0, 1]
    assert (template.pad_token_id, template.eos_token_ids) == (0, (1,))
    assert 258 < len(tokenizer) <= 384
    assert len(template.tokenize("1234567890")) == 10
    feature = template.encode(with_response(task.train[0]))
    data = task.train[0].user_data
    assert template.decode(feature.input_ids, skip_special_tokens=False) == data["question"] + data["response"] + "<eos>"
    assert template.decode(feature.input_ids[feature.completion_mask], skip_special_tokens=False) == data["response"] + "<eos>"


def test_any_text_survives_the_tokenizer(template):
    text = "na\u00efve \u4f60\u597d\n\t 3.14 <eos"
    assert template.decode(template.tokenize(text)) == text


def test_training_the_tokenizer_is_deterministic(task):
    texts = [row.user_data["question"] for row in task.train[:200]]
    assert toy_tokenizer(texts).get_vocab() == toy_tokenizer(texts).get_vocab()
    with pytest.raises(DatasetError, match="need 258"):
        toy_tokenizer(texts, vocab_size=100)


@pytest.mark.parametrize(
    ("decoded", "stop_reason", "right"),
    [
        ("1 10 10", "stop", True),
        ("10", "stop", True),
        ("1 10 10", "length", False),
        ("1 10 10 ", "stop", False),
        ("10 1", "stop", False),
        ("110", "stop", False),
        ("", "stop", False),
    ],
)
def test_only_a_finished_completion_whose_last_word_is_the_answer_is_right(decoded, stop_reason, right):
    feature = InputFeature(input_ids=[1])
    sequence = SampledSequence(tokens=[1], logprobs=[], stop_reason=stop_reason, decoded=decoded, new_input_feature=feature)
    assert exact_match(sequence, "10") is right
