"""Sets of prompts with reference answers, for sampling."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._dataset import Dataset
from ._errors import FormatError
from ._messages import Message, Trajectory
from ._schemas import to_conversation, tools_of
from ._wording import a_kind

_PROMPTS = ("messages", "prompt", "question", "problem", "instruction", "query", "input")
_ANSWERS = ("answer", "solution", "ground_truth", "reference", "target", "final_answer", "label")

# Part of the conversation, as in every other form.
_USED = ("system", "tools", "functions")


def prompt_dataset(
    source: "Dataset | Iterable[Any] | str | Path | Callable[[], Any]",
    *,
    prompt: str | None = None,
    answer: str | None = None,
    system: str | None = None,
    require_answer: bool = True,
    lazy: bool = False,
) -> Dataset:
    """Rows with a question and its answer (a JSONL file, say) as a dataset of prompts, shaped like those of `task_dataset`.

    A row is a `Trajectory` that ends with the user's question, and `user_data` with 'question' (the last message's text), 'answer' and
    the row's other fields, unchanged. Answers that are numbers stay numbers. The fields 'system' and 'tools' (or 'functions') become the
    system prompt and the tools.

    Args:
        source: whatever `Dataset` takes.
        prompt: the field with the question, a text or messages; None: the first of 'messages', 'prompt', 'question', 'problem',
            'instruction', 'query', 'input' that a row has.
        answer: the field with the answer; None: the first of 'answer', 'solution', 'ground_truth', 'reference', 'target',
            'final_answer', 'label' that a row has.
        system: a system prompt for prompts that begin with none, in rows that name none.
        require_answer: whether a row without an answer is an error.
        lazy: see `Dataset`.

    Raises:
        DatasetError: when a row is read: one without question or answer, or whose messages end with the assistant. Names row and field.
    """
    dataset = source if isinstance(source, Dataset) else Dataset(source, lazy=lazy)
    return dataset.map(_Prompt(prompt, answer, system, require_answer))


@dataclass(frozen=True)
class _Prompt:
    prompt: str | None
    answer: str | None
    system: str | None
    require_answer: bool

    def __call__(self, row: Any) -> Trajectory:
        if not isinstance(row, Mapping):
            raise FormatError(f"a prompt is a mapping with fields, not {a_kind(row)}")
        field = _field(row, self.prompt, _PROMPTS)
        if field is None:
            raise FormatError(f"{_absent(row, self.prompt, _PROMPTS)}; say prompt=<the field with the question>")
        messages = list(_messages(row[field], field))
        system = self.system if row.get("system") in (None, "") else row["system"]
        if system is not None and messages[0].role not in ("system", "developer"):
            messages.insert(0, Message(role="system", content=system))
        if messages[-1].role == "assistant":
            raise FormatError(f"{field} ends with an assistant turn, so there is nothing to sample; leave that turn out")
        user_data = {str(key): value for key, value in row.items() if key not in (field, *_USED)}
        name = _field(row, self.answer, _ANSWERS)
        if name is None and self.require_answer:
            raise FormatError(f"{_absent(row, self.answer, _ANSWERS)}; say answer=<the field with it>, or require_answer=False")
        if name is not None:
            user_data["answer"] = row[name]
        return Trajectory(messages=messages, user_data={**user_data, "question": messages[-1].content}, tools=tools_of(row))


def _field(row: Mapping[str, Any], name: str | None, usual: Iterable[str]) -> str | None:
    return next((field for field in ((name,) if name else usual) if row.get(field) is not None), None)


def _absent(row: Mapping[str, Any], name: str | None, usual: Sequence[str]) -> str:
    names = (name,) if name else usual
    if null := next((field for field in names if field in row), None):
        return f"the field {null!r} is null"
    return f"no field {' or '.join(map(repr, names))}"


def _messages(value: Any, field: str) -> Iterable[Message]:
    if isinstance(value, str) and field != "messages":  # there a text is JSON, as tables keep it
        return [Message(role="user", content=value)]
    if not isinstance(value, (list, tuple, str)):
        raise FormatError(f"{field} must be a text or a list of messages, not {type(value).__name__}")
    found = to_conversation({"messages": value}, "messages")
    assert isinstance(found, Trajectory)
    return found.messages
