"""Which characters of a rendered chat the assistant wrote. Text only; `_template` turns it into tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ._errors import TemplateError
from ._formats import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stand in for a turn whose text does not matter; no template or tokenizer gives them a meaning.
_QUESTION, _ANSWER = "probe-question-7f3a", "probe-answer-7f3a"


@dataclass(frozen=True, kw_only=True)
class Span:
    """Characters `[start, stop)` of a rendered text, from the assistant's first character to the end of its end token."""

    start: int
    stop: int
    message: int


class ChatRenderer:
    """Renders messages with a tokenizer's chat template and finds the assistant's spans by incremental rendering.

    The span of an assistant turn begins where the generation prompt after the turns before it ends, which is where a sampler would
    begin, and stops after the end token, which is where a sampler would stop.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The text of the messages. Raises TemplateError when there is no template, or when it refuses the messages."""
        import jinja2

        if not self._tokenizer.chat_template:
            raise TemplateError("the tokenizer has no chat template; set tokenizer.chat_template (a Jinja text) before making the Template")
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_generation_prompt)
        except jinja2.TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(f"the chat template refuses messages with the roles [{roles}]: {error}") from error
        assert isinstance(text, str)
        return text

    @cached_property
    def end_token(self) -> str:
        """The token that the template writes after an assistant's text. Raises TemplateError when it writes none."""
        text = self.render([Message(role="user", content=_QUESTION), Message(role="assistant", content=_ANSWER)])
        after = text[text.rindex(_ANSWER) + len(_ANSWER) :]
        added: dict[str, int] = self._tokenizer.get_added_vocab()  # pyright: ignore[reportCallIssue, reportOptionalCall] # of both subclasses
        special = {*self._tokenizer.all_special_tokens, *added}
        found = [(after.index(token), -len(token), token) for token in special if token and token in after]
        if not found:
            raise TemplateError(
                f"the chat template writes no special token after an assistant turn (it writes {after!r}), so a model could not learn to "
                "stop; add the end token, e.g. {{ eos_token }}, to the template"
            )
        return min(found)[2]

    def continuation(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """What the template writes between an assistant's end token and the end of the messages that follow it."""
        before = [Message(role="user", content=_QUESTION), Message(role="assistant", content=_ANSWER)]
        text = self.render([*before, *messages], add_generation_prompt)
        return text[text.index(self.end_token, text.rindex(_ANSWER)) + len(self.end_token) :]

    def prompt(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The rendered text with the generation prompt, and the spans of the assistant turns in it, as far as they can be found."""
        full = self.render(messages, add_generation_prompt=True)
        try:
            answers = self._answers(messages)
        except TemplateError:
            return full, []  # nothing here is trained on: that a turn cannot be masked does not matter
        return full, _whole(full, answers) or []

    def conversation(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """The rendered text, and the spans of the assistant turns in it.

        The text is what the template renders at once, unless the template rewrites earlier turns when later ones follow (dropping their
        reasoning, say). Then it is the turns as they were when each was the last one, which is what the sampler of each saw.
        """
        full = self.render(messages, add_generation_prompt)
        answers = self._answers(messages)
        spans = _whole(full, answers)
        if spans is not None:
            return full, spans
        text, after, spans = "", 0, list[Span]()
        for index, (head, answer) in answers.items():
            text += self.continuation(messages[after:index], True) if after else head
            spans.append(Span(start=len(text), stop=len(text) + len(answer), message=index))
            text, after = text + answer, index + 1
        return text + self.continuation(messages[after:], add_generation_prompt), spans

    def _answers(self, messages: Sequence[Message]) -> dict[int, tuple[str, str]]:
        return {index: self._answer(messages, index) for index, message in enumerate(messages) if message.role == "assistant"}

    def _answer(self, messages: Sequence[Message], index: int) -> tuple[str, str]:
        """The text before an assistant turn, generation prompt included, and the turn itself with its end token."""
        if index == 0:
            raise TemplateError("the first message is an assistant turn; begin with a system or user message")
        head = self.render(messages[:index], add_generation_prompt=True)
        done = self.render(messages[: index + 1])
        if not done.startswith(head):
            raise TemplateError(
                f"message {index}: the template's generation prompt ({head[-40:]!r}) is not how it begins the finished turn "
                f"({done[max(0, len(head) - 40) : len(head) + 20]!r}), so the assistant's tokens cannot be told from the prompt's; mend the template"
            )
        stop = done.rfind(self.end_token, len(head))
        if stop < 0:
            raise TemplateError(f"message {index}: the template writes no {self.end_token!r} after this assistant turn; mend the template")
        return head, done[len(head) : stop + len(self.end_token)]


def _whole(full: str, answers: dict[int, tuple[str, str]]) -> list[Span] | None:
    """The spans of the answers in the text that was rendered at once; None when the template rewrote one of them."""
    if not all(full.startswith(head + answer) for head, answer in answers.values()):
        return None
    return [Span(start=len(head), stop=len(head) + len(answer), message=index) for index, (head, answer) in answers.items()]
