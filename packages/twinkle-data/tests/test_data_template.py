"""Template: ids and masks against transformers' own, multi-turn, sampled tokens, truncation, errors."""

# Optional arrays are known to be set here, and wrong types are handed in on purpose.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false

import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinkle_data import (
    Dataset,
    FormatError,
    InputFeature,
    Message,
    SequenceTooLongError,
    Template,
    TemplateError,
    Trajectory,
    append_sample,
)

STRUCTURES = ["chatml", "llama3", "mistral", "mistral-spm", "gemma", "deepseek"]
# Text that neither begins nor ends with white space: no token straddles a border, and templates that trim change nothing.
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="<|>[]"), min_size=1, max_size=24)
content = st.builds(lambda text: f"a{text}.", words)


def conversation(contents, system=False):
    roles = ["user", "assistant"] * len(contents)
    messages = [Message(role=role, content=text) for role, text in zip(roles, contents, strict=False)]
    return [Message(role="system", content="Be brief."), *messages] if system else messages


def plain(messages):
    return [{"role": message.role, "content": message.content} for message in messages]


@pytest.mark.parametrize("family", STRUCTURES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(content, min_size=2, max_size=6))
def test_ids_and_masks_equal_those_of_transformers(make_tokenizer, family, contents):
    tokenizer = make_tokenizer(family)
    messages = conversation(contents)
    expected = tokenizer.apply_chat_template(plain(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    feature = Template(tokenizer).encode(messages)
    assert feature.input_ids.tolist() == expected["input_ids"]
    assert feature.completion_mask.tolist() == [bool(bit) for bit in expected["assistant_masks"]]
    np.testing.assert_array_equal(feature.labels, np.where(feature.completion_mask, feature.input_ids, -100))


@pytest.mark.parametrize("family", STRUCTURES)
def test_a_prompt_ends_where_the_answer_begins(make_tokenizer, family):
    template = Template(make_tokenizer(family))
    messages = conversation(["What is 12 plus 7?", "The answer is 19.", "How are you?", "Hello there"])
    whole = template.encode(messages)
    prompt = template.encode(messages[:3], add_generation_prompt=True)
    assert whole.input_ids[: len(prompt)].tolist() == prompt.input_ids.tolist()
    assert whole.completion_mask[len(prompt)]
    assert not whole.completion_mask[len(prompt) - 1]
    assert not prompt.completion_mask.any()
    assert (prompt.labels == -100).all()


def test_masked_tokens_are_the_text_and_its_end_token_and_nothing_else(make_tokenizer):
    template = Template(make_tokenizer("chatml"))
    feature = template.encode(conversation(["Hello", "The answer is 19."], system=True))
    assert template.decode(feature.input_ids[feature.completion_mask], skip_special_tokens=False) == "The answer is 19.<|im_end|>"
    assert template.decode(feature.input_ids[-1:]) == "\n"
    assert not feature.completion_mask[-1]


def test_a_token_that_would_straddle_the_border_is_split_as_the_sampler_saw_it(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    template = Template(tokenizer)
    messages = conversation(["Hello", "\nYes.", "Hello", "\n\nYes."])
    at_once = tokenizer.apply_chat_template(plain(messages), tokenize=True)["input_ids"]
    feature = template.encode(messages)
    assert feature.input_ids.tolist() != at_once, "the example does not straddle: this test would prove nothing"
    assert template.decode(feature.input_ids, skip_special_tokens=False) == tokenizer.apply_chat_template(plain(messages), tokenize=False)
    masked = template.decode(feature.input_ids[feature.completion_mask], skip_special_tokens=False)
    assert masked == "\nYes.<|im_end|>\n\nYes.<|im_end|>"
    for turns in (1, 3):
        prompt = template.encode(messages[:turns], add_generation_prompt=True).input_ids
        assert feature.input_ids[: len(prompt)].tolist() == prompt.tolist()


def test_a_straddled_border_that_cannot_be_split_is_refused(make_tokenizer):
    tokenizer = make_tokenizer("mistral-spm")
    glued = Template(type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>"))
    glued.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    with pytest.raises(TemplateError, match="straddles the border"):
        glued.encode(conversation(["The ans", "wer is 19."]))


def test_a_template_that_rewrites_earlier_turns_keeps_each_turn_as_it_was_sampled(make_tokenizer):
    tokenizer = make_tokenizer("rewriting")
    template = Template(tokenizer)
    messages = conversation(["Hello", "x</think>Hello there", "How are you?", "y</think>Yes."])
    assert "x</think>" not in tokenizer.apply_chat_template(plain(messages), tokenize=False)
    feature = template.encode(messages)
    text = template.decode(feature.input_ids, skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nx</think>Hello there<|im_end|>\n"
        "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\ny</think>Yes.<|im_end|>\n"
    )
    masked = template.decode(feature.input_ids[feature.completion_mask], skip_special_tokens=False)
    assert masked == "x</think>Hello there<|im_end|>y</think>Yes.<|im_end|>"


def test_a_prompt_of_a_rewriting_template_is_what_the_template_renders(make_tokenizer):
    tokenizer = make_tokenizer("rewriting")
    messages = conversation(["Hello", "x</think>Hello there", "How are you?"])
    prompt = Template(tokenizer).encode(messages, add_generation_prompt=True)
    assert prompt.input_ids.tolist() == tokenizer.apply_chat_template(plain(messages), tokenize=True, add_generation_prompt=True)["input_ids"]


def test_earlier_turns_of_a_prompt_are_context_unless_asked_for(make_tokenizer):
    template = Template(make_tokenizer("chatml"))
    messages = conversation(["Hello", "Yes.", "Hello", "The answer is 19.", "How are you?"])
    messages[3] = Message(role="assistant", content="The answer is 19.", loss=True)
    feature = template.encode(messages, add_generation_prompt=True)
    for mask in (feature.completion_mask, feature.labels != -100):
        assert template.decode(feature.input_ids[mask]) == "The answer is 19."


def test_loss_flags_choose_labels_and_leave_the_completion_mask(make_tokenizer):
    template = Template(make_tokenizer("chatml"))
    messages = [
        Message(role="user", content="Hello"),
        Message(role="assistant", content="Yes.", loss=False),
        Message(role="user", content="Hello"),
        Message(role="assistant", content="The answer is 19."),
    ]
    feature = template.encode(messages)
    labelled = template.decode(feature.input_ids[feature.labels != -100], skip_special_tokens=False)
    assert labelled == "The answer is 19.<|im_end|>"
    assert template.decode(feature.input_ids[feature.completion_mask]) == "Yes.The answer is 19."


@pytest.mark.parametrize("family", STRUCTURES)
def test_multi_turn_sampling_gives_the_tokens_of_one_encoding(make_tokenizer, family):
    template = Template(make_tokenizer(family))
    messages = conversation(["What is 12 plus 7?", "The answer is 19.", "How are you?", "Hello there"])
    whole = template.encode(messages)
    spans = np.flatnonzero(np.diff(np.concatenate([[0], whole.completion_mask.astype(int), [0]]))).reshape(-1, 2)
    feature = template.encode(messages[:1], add_generation_prompt=True)
    for turn, (start, stop) in enumerate(spans):
        tokens = whole.input_ids[start:stop].tolist()
        feature = append_sample(feature, tokens, -np.arange(1.0, 1 + len(tokens)), temperature=0.5, weight_version=7 - turn)
        if turn == 0:
            feature = template.extend(feature, messages[2:3])
    assert feature.input_ids.tolist() == whole.input_ids[: len(feature)].tolist()
    assert feature.completion_mask.tolist() == whole.completion_mask[: len(feature)].tolist()
    assert ((feature.logprobs != 0) == feature.completion_mask).all()
    assert (feature.temperature, feature.weight_version) == (0.5, 6)


def test_extending_a_turn_that_was_cut_off_adds_an_untrained_end_token(make_tokenizer):
    template = Template(make_tokenizer("chatml"))
    prompt = template.encode(conversation(["Hello"]), add_generation_prompt=True)
    cut_off = append_sample(prompt, template.tokenize("The answer is"))
    longer = template.extend(cut_off, [Message(role="user", content="Yes?")])
    assert template.decode(longer.input_ids[len(cut_off) :], skip_special_tokens=False) == (
        "<|im_end|>\n<|im_start|>user\nYes?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (longer.labels[len(cut_off) :] == -100).all()
    assert longer.labels[len(prompt)] == longer.input_ids[len(prompt)]


def test_eos_token_ids_hold_the_templates_end_token_and_the_tokenizers(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    ids = Template(tokenizer).eos_token_ids
    assert ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id)
    mistral = make_tokenizer("mistral")
    assert Template(mistral).eos_token_ids == (mistral.eos_token_id,)


def test_user_data_and_mappings_pass_through(make_tokenizer):
    trajectory = Trajectory(messages=[{"role": "user", "content": "Hello"}], user_data={"answer": "19"})
    feature = Template(make_tokenizer("chatml")).encode(trajectory, add_generation_prompt=True)
    assert feature.user_data == {"answer": "19"}


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_cuts_every_array_on_its_side(make_tokenizer, side):
    tokenizer = make_tokenizer("chatml")
    messages = conversation(["Hello", "The answer is 19."])
    whole = Template(tokenizer).encode(messages)
    feature = Template(tokenizer, max_length=8, truncation=side).encode(messages)
    keep = slice(-8, None) if side == "left" else slice(0, 8)
    for name in ("input_ids", "labels", "completion_mask"):
        assert getattr(feature, name).tolist() == getattr(whole, name)[keep].tolist()


def test_too_long_a_row_is_an_error_that_names_length_limit_and_index(make_tokenizer):
    template = Template(make_tokenizer("chatml"), max_length=12)
    short, long = Trajectory(messages=conversation(["Yes"])), Trajectory(messages=conversation(["Hello there, how are you today?" * 4]))
    with pytest.raises(SequenceTooLongError, match=r"trajectories\[1\]: \d+ tokens, max_length is 12: raise max_length"):
        template.batch_encode([short, long])


def test_drop_leaves_long_rows_out_of_a_batch(make_tokenizer):
    template = Template(make_tokenizer("chatml"), max_length=12, truncation="drop")
    short, long = Trajectory(messages=conversation(["Yes"])), Trajectory(messages=conversation(["Hello there, how are you today?" * 4]))
    assert len(template.batch_encode([short, long, short])) == 2
    with pytest.raises(SequenceTooLongError):
        template.encode(long)


def test_a_saved_tokenizer_is_loaded_from_its_folder(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer("llama3")
    tokenizer.save_pretrained(tmp_path)
    messages = conversation(["Hello", "Yes."])
    assert Template(tmp_path).encode(messages) == Template(tokenizer).encode(messages)


def test_a_template_and_a_dataset_that_it_encodes_travel_to_workers(make_tokenizer):
    template = Template(make_tokenizer("chatml"), max_length=64)
    encoded = Dataset([Trajectory(messages=conversation(["Hello", "Yes."]))]).encode(template)
    assert template.eos_token_ids == pickle.loads(pickle.dumps(template)).eos_token_ids
    assert list(pickle.loads(pickle.dumps(encoded))) == list(encoded)


def test_errors_say_what_to_mend(make_tokenizer, tmp_path):
    with pytest.raises(TemplateError, match="there is no such folder"):
        Template(str(tmp_path / "absent"))
    with pytest.raises(TemplateError, match="that folder holds no tokenizer"):
        Template(str(tmp_path))
    with pytest.raises(FormatError, match="truncation is 'middle'"):
        Template(make_tokenizer("chatml"), truncation="middle")
    with pytest.raises(TemplateError, match=r"refuses messages with the roles \[user, user\]: roles must alternate"):
        Template(make_tokenizer("mistral")).encode([Message(role="user", content="a"), Message(role="user", content="b")])
    chatml = Template(make_tokenizer("chatml"))
    with pytest.raises(TemplateError, match="last message is an assistant turn already"):
        chatml.encode(conversation(["a", "b"]), add_generation_prompt=True)
    with pytest.raises(TemplateError, match="first message is an assistant turn"):
        chatml.encode([Message(role="assistant", content="b")])


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [
        (None, "has no chat template"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "writes no special token after an assistant turn"),
        (
            "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<think>' }}{% endif %}",
            "generation prompt .* is not how it begins the finished turn",
        ),
    ],
)
def test_templates_that_cannot_be_masked_are_refused(make_tokenizer, chat_template, message):
    tokenizer = make_tokenizer("chatml")
    other = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    other.chat_template = chat_template
    with pytest.raises(TemplateError, match=message):
        Template(other).encode(conversation(["a", "b"]))


def test_append_sample_keeps_what_the_prompt_holds():
    prompt = InputFeature(input_ids=[5, 6, 7], position_ids=[2, 3, 4], loss_weights=[0, 0, 0], advantages=1.0, user_data={"k": 1})
    feature = append_sample(prompt, [8, 9], [-1.0, -2.0], temperature=0.0, weight_version=3)
    expected = InputFeature(
        input_ids=[5, 6, 7, 8, 9],
        labels=[-100, -100, -100, 8, 9],
        position_ids=[2, 3, 4, 5, 6],
        completion_mask=[0, 0, 0, 1, 1],
        loss_weights=[0, 0, 0, 1, 1],
        logprobs=[0, 0, 0, -1, -2],
        weight_version=3,
        weight_versions=[-1, -1, -1, 3, 3],
        user_data={"k": 1},
    )
    assert feature == expected


@pytest.mark.parametrize(
    ("tokens", "logprobs", "temperature", "message"),
    [
        ([], [], 1.0, "at least one sampled token"),
        ([8], [-1.0, -2.0], 1.0, "1 sampled tokens but logprobs of shape"),
        ([8], None, 1.0, "comes without any"),
        ([8], [-1.0], 0.5, "temperature 1.0, this one at 0.5"),
    ],
)
def test_append_sample_refuses_what_does_not_fit(tokens, logprobs, temperature, message):
    earlier = append_sample(InputFeature(input_ids=[5]), [6], [-1.0])
    with pytest.raises(FormatError, match=message):
        append_sample(earlier, tokens, logprobs, temperature=temperature)
