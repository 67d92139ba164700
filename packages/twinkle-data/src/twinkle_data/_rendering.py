"""Which characters of a rendered chat the assistant wrote. Text only; `_template` turns it into tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ._errors import TemplateError
from ._messages import Message, ToolCall, Trajectory
from ._skeletons import Skeletons, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stand in for a turn whose text does not matter; no template or tokenizer gives them a meaning.
_QUESTION, _ANSWER = "probe-question-7f3a", "probe-answer-7f3a"
_ASK, _REPLY = Message(role="user", content=_QUESTION), Message(role="assistant", content=_ANSWER)
_CALL = Message(role="assistant", tool_calls=[ToolCall(name=_ANSWER, id="probe0001")])
_Tools = Sequence[Mapping[str, Any]]


class ChatRenderer:
    """Renders messages with a tokenizer's chat template and finds the assistant's spans by incremental rendering.

    The span of an assistant turn begins where the generation prompt after the turns before it ends, which is where a sampler would
    begin, and stops after the end token, which is where a sampler would stop.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._skeletons = Skeletons(self._analyse)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: _Tools = ()) -> str:
        """The text of the messages. Raises TemplateError when there is no template, or when it refuses the messages."""
        import jinja2

        if not self._tokenizer.chat_template:
            raise TemplateError("the tokenizer has no chat template; set tokenizer.chat_template (a Jinja text) before making the Template")
        plain = [
            {"role": message.role, "content": message.content} if message.is_plain else _as_mapping(message, self._text_arguments(message))
            for message in messages
        ]
        functions: Any = [dict(tool) for tool in tools] or None
        try:
            text = self._tokenizer.apply_chat_template(plain, tools=functions, tokenize=False, add_generation_prompt=add_generation_prompt)
        except RecursionError:
            raise TemplateError("tools or arguments of calls are nested too deep to be rendered") from None
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(f"the chat template refuses messages with the roles [{roles}]: {error}") from error
        assert isinstance(text, str)
        return text

    def _text_arguments(self, message: Message) -> bool:
        return bool(message.tool_calls) and message is not _CALL and self._wants_text_arguments

    @cached_property
    def _wants_text_arguments(self) -> bool:
        """Whether the template joins a call's arguments to text as they stand (DeepSeek's does); then they must be text already."""
        try:
            self.render([_ASK, _CALL])
        except TemplateError:
            return True
        return False

    @cached_property
    def end_token(self) -> str:
        """The token after an assistant's text, at which sampling stops.

        Most templates write it themselves. Where one does not (GLM's), the token that opens the next turn ends this one.

        Raises:
            TemplateError: there is no such token.
        """
        return self._closing_token or self._opening_token(_REPLY, _ASK)

    @cached_property
    def _closing_token(self) -> str | None:
        return self._first_special(self._after_answer([_ASK, _REPLY]))

    @cached_property
    def call_end_token(self) -> str:
        """The end token of a turn that calls tools. Differs from `end_token` where the next turn's opening token ends a turn."""
        if self._closing_token:
            return self._closing_token
        call = Message(role="assistant", tool_calls=_CALL.tool_calls)  # a copy: its arguments take the form that the template wants
        return self._opening_token(call, Message(role="tool", content=_QUESTION, tool_call_id="probe0001", name=_ANSWER))

    def _opening_token(self, answer: Message, following: Message) -> str:
        after = self._after_answer([_ASK, answer, following])
        found = self._first_special(after[: after.index(_QUESTION)] if _QUESTION in after else "")
        if found is None:
            raise TemplateError(
                f"the chat template writes no special token after an assistant turn (it writes {after[:40]!r}), so a model could not learn to "
                "stop; add the end token, e.g. {{ eos_token }}, to the template"
            )
        return found

    def _after_answer(self, messages: Sequence[Message]) -> str:
        text = self.render(messages)
        if _ANSWER not in text:
            raise TemplateError("the chat template does not render an assistant's turn; mend the template")
        return text[text.rindex(_ANSWER) + len(_ANSWER) :]

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """All tokens of the vocabulary that the tokenizer finds before anything else."""
        added: dict[str, int] = self._tokenizer.get_added_vocab()  # pyright: ignore[reportCallIssue, reportOptionalCall] # of both subclasses
        return frozenset(token for token in {*self._tokenizer.all_special_tokens, *added} if token)

    def _first_special(self, text: str) -> str | None:
        found = [(text.index(token), -len(token), token) for token in self.special_tokens if token in text]
        return min(found)[2] if found else None

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """The special tokens that the template writes around turns."""
        text = self.render([_ASK, _REPLY, _ASK], add_generation_prompt=True)
        return tuple(sorted(token for token in self.special_tokens if token in text))

    def continuation(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """What the template writes between an assistant's turn and the end of the messages that follow it, end token left out.

        Where the next turn's opening token is the end token it stands in front nevertheless: which one it is depends on the next turn.
        """
        answer = _REPLY
        if messages and messages[0].role == "tool":
            answer = Message(role="assistant", tool_calls=[ToolCall(name=_ANSWER, id=messages[0].tool_call_id or "probe0001")])
        text = self.render([_ASK, answer, *messages], add_generation_prompt)
        after = text.rindex(_ANSWER) + len(_ANSWER)
        if self._closing_token:
            return text[text.index(self._closing_token, after) + len(self._closing_token) :]
        done = self.render([_ASK, answer])
        return text[len(done) :] if text.startswith(done) else text[after:]

    @property
    def is_open(self) -> bool:
        """Whether the template leaves an assistant's turn without an end token of its own."""
        return self._closing_token is None

    def prompt(self, trajectory: Trajectory) -> tuple[str, list[Span]]:
        """The rendered text with the generation prompt, and the spans of the assistant turns in it, as far as they can be found."""
        messages, tools = trajectory.messages, trajectory.tools
        full = self.render(messages, True, tools)
        self._check_tools(messages, full, tools, True)
        self._check_turns(messages, tools, reasoning=False)  # of earlier turns a template may leave it out: that is what a sampler sees
        if all(message.role != "assistant" for message in messages):
            return full, []
        if spans := self._skeletons.spans(messages, tools, full, add_generation_prompt=True):
            return full, spans
        try:
            answers = self._answers(messages, tools, full, add_generation_prompt=True)
        except TemplateError:
            return full, []  # nothing here is trained on: that a turn cannot be masked does not matter
        return full, _whole(full, answers) or []

    def conversation(self, trajectory: Trajectory, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """The rendered text, and the spans of the assistant turns in it.

        The text is what the template renders at once, unless the template rewrites earlier turns when later ones follow (dropping their
        reasoning, say). Then it is the turns as they were when each was the last one, which is what the sampler of each saw. Where the
        template ends the last turn with no token, its end token is added.
        """
        messages, tools = trajectory.messages, trajectory.tools
        full = self.render(messages, add_generation_prompt, tools)
        if self.is_open and messages[-1].role == "assistant":
            full += self._end_of(messages[-1])
        spans = self._skeletons.spans(messages, tools, full, add_generation_prompt)
        if spans is None:
            answers = self._answers(messages, tools, full, add_generation_prompt)
            spans = _whole(full, answers)
            if spans is None:
                full, spans = self._as_sampled(messages, answers, add_generation_prompt)
        self._check_tools(messages, full, tools, add_generation_prompt)
        self._check_turns(messages, tools, reasoning=True)
        return full, spans

    def _check_tools(self, messages: Sequence[Message], text: str, tools: _Tools, add_generation_prompt: bool) -> None:
        """Tools must stand in the text. Their names alone do not tell: they may stand in a message."""
        lacking = [name for tool in tools if (name := tool.get("function", tool)["name"]) not in text]
        if not lacking and tools and self.render(messages, add_generation_prompt) in (text, text.removesuffix(self._added_end(messages))):
            lacking = [tool.get("function", tool)["name"] for tool in tools]
        if lacking:
            raise TemplateError(
                f"the chat template does not render the tool {lacking[0]!r}; use a template that knows tools, or describe them in a message"
            )

    def _added_end(self, messages: Sequence[Message]) -> str:
        """The end token that `conversation` adds to what the template renders."""
        return self._end_of(messages[-1]) if messages[-1].role == "assistant" and self.is_open else ""

    def _check_turns(self, messages: Sequence[Message], tools: _Tools, *, reasoning: bool) -> None:
        """What a turn holds must be rendered: a template that leaves it out would have the model trained on something else.

        Told by stand-ins in its place, since names of functions and thoughts may stand in a turn's text, too.
        """
        for index, message in enumerate(messages):
            thinks = reasoning and bool((message.reasoning_content or "").strip())
            if message.role != "assistant" or not (message.tool_calls or thinks):
                continue
            calls = [replace(call, name=f"{_ANSWER}-{number}-") for number, call in enumerate(message.tool_calls)]
            stand_in = replace(message, tool_calls=calls, reasoning_content=_QUESTION if thinks else message.reasoning_content)
            try:
                text = self.render([*messages[:index], stand_in], False, tools)
            except TemplateError:
                continue  # it refuses what stands here; what it was given before it has rendered
            if thinks and _QUESTION not in text:
                raise TemplateError(
                    f"message {index}: the chat template does not render reasoning_content; put it into the content, or mend the template"
                )
            lacking = [call.name for call, other in zip(message.tool_calls, calls, strict=True) if other.name not in text]
            if lacking and len(lacking) < len(calls):
                raise TemplateError(
                    f"message {index}: the chat template leaves out some of several calls; use a template that renders them all, or "
                    "make each call a turn of its own"
                )
            if lacking:
                raise TemplateError(
                    f"message {index}: the chat template does not render the call of {lacking[0]!r}; use a template that knows tool calls"
                )

    def _as_sampled(self, messages: Sequence[Message], answers: dict[int, tuple[str, str]], add_generation_prompt: bool) -> tuple[str, list[Span]]:
        text, after, spans = "", 0, list[Span]()
        for index, (head, answer) in answers.items():
            text += self._continued(text, messages[after:index], True) if after else head
            spans.append(Span(start=len(text), stop=len(text) + len(answer), message=index))
            text, after = text + answer, index + 1
        return text + self._continued(text, messages[after:], add_generation_prompt), spans

    def _continued(self, text: str, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        more = self.continuation(messages, add_generation_prompt)
        opening = self._first_special(more) if self.is_open else None
        return more.removeprefix(opening) if opening and text.endswith(opening) else more

    def _end_of(self, message: Message) -> str:
        return self.call_end_token if message.tool_calls else self.end_token

    def _analyse(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[str, list[Span]] | None:
        """The text and its spans by rendering every turn; None when the template rewrites or refuses these turns."""
        try:
            full = self.render(messages, add_generation_prompt)
            if self.is_open and messages[-1].role == "assistant":
                full += self.end_token
            spans = _whole(full, self._answers(messages, (), full, add_generation_prompt))
        except TemplateError:
            return None
        return None if spans is None else (full, spans)

    def _answers(self, messages: Sequence[Message], tools: _Tools, full: str, add_generation_prompt: bool) -> dict[int, tuple[str, str]]:
        """For every assistant turn the text before it, generation prompt included, and the turn itself with its end token."""
        found: dict[int, tuple[str, str]] = {}
        for index, message in enumerate(messages):
            if message.role == "assistant":
                is_last = index == len(messages) - 1 and not add_generation_prompt
                done = full if is_last else self.render(messages[: index + 1], False, tools)
                found[index] = self._answer(messages, index, tools, done, full)
        return found

    def _answer(self, messages: Sequence[Message], index: int, tools: _Tools, done: str, full: str) -> tuple[str, str]:
        if index == 0:
            raise TemplateError("the first message is an assistant turn; begin with a system or user message")
        head = self.render(messages[:index], True, tools)
        if not done.startswith(head):
            raise TemplateError(
                f"message {index}: the template's generation prompt ({head[-40:]!r}) is not how it begins the finished turn "
                f"({done[max(0, len(head) - 40) : len(head) + 20]!r}), so the assistant's tokens cannot be told from the prompt's; mend the template"
            )
        if self.is_open:
            if done is full:  # the end token was added already
                return head, done[len(head) :]
            # The next turn's opening token ends this one; where the turn was rewritten, the one that a sampler would have stopped at.
            following = self._first_special(full[len(done) : len(done) + 64]) if full.startswith(done) else None
            end = following if following and full.startswith(following, len(done)) else self._end_of(messages[index])
            return head, done[len(head) :] + end
        end = self.end_token
        stop = done.rfind(end, len(head))
        if stop < 0:
            raise TemplateError(f"message {index}: the template writes no {end!r} after this assistant turn; mend the template")
        return head, done[len(head) : stop + len(end)]


def _as_mapping(message: Message, text_arguments: bool) -> dict[str, Any]:
    """A message as templates expect it."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        # Null beside calls, as OpenAI's API answers: templates ask `content is none` to tell a call from a text (DeepSeek's does).
        plain["content"] = message.content or None
        plain["tool_calls"] = [
            {
                "type": "function",
                **({} if call.id is None else {"id": call.id}),
                "function": {"name": call.name, "arguments": call.text_arguments() if text_arguments else dict(call.parsed_arguments())},
            }
            for call in message.tool_calls
        ]
    for name in ("reasoning_content", "tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def _whole(full: str, answers: dict[int, tuple[str, str]]) -> list[Span] | None:
    """The spans of the answers in the text that was rendered at once; None when the template rewrote one of them."""
    if not all(full.startswith(head + answer) for head, answer in answers.values()):
        return None
    return [Span(start=len(head), stop=len(head) + len(answer), message=index) for index, (head, answer) in answers.items()]
