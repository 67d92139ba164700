"""Conversations: messages, trajectories and preference pairs.

Like all records they are frozen, keyword-only dataclasses that check themselves when they are made.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ._errors import FormatError
from ._wording import a_kind

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
"""The roles of messages that templates take without being told."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that the assistant makes.

    Args:
        name: of the function.
        arguments: a mapping, or its JSON text; each template is given the form that it can render.
        id: by which the tool's answer refers to the call.

    Raises:
        FormatError: no name, or arguments that are neither a mapping nor the JSON text of one.
    """

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    id: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise FormatError(f"ToolCall.name must be a non-empty string, not {self.name!r}")
        if isinstance(self.arguments, str):
            self.parsed_arguments()
        elif not isinstance(self.arguments, Mapping):
            raise FormatError(f"ToolCall.arguments must be a mapping or JSON text, not {type(self.arguments).__name__} (of {self.name!r})")

    def parsed_arguments(self) -> Mapping[str, Any]:
        """The arguments as a mapping."""
        if not isinstance(self.arguments, str):
            return self.arguments
        try:
            parsed = json.loads(self.arguments or "{}")
        except RecursionError:
            raise FormatError(f"ToolCall.arguments of {self.name!r}: values are nested too deep") from None
        except ValueError as error:
            raise FormatError(f"ToolCall.arguments of {self.name!r} is not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise FormatError(f"ToolCall.arguments of {self.name!r} is the JSON text of {a_kind(parsed)}, not of an object")
        return parsed

    def text_arguments(self) -> str:
        """The arguments as JSON text."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(dict(self.arguments), ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation.

    Args:
        role: 'system', 'user', 'assistant', 'tool', or another role that the chat template knows (see `Template`).
        content: the text, without the template's markers. None is stored as an empty text; only a turn with tool calls may lack one.
        loss: whether the turn is trained on. None: assistant turns are, all others are not. True is for assistant turns only.
        loss_weight: a factor for the loss of each of the turn's tokens; finite, at least 0.
        reasoning_content: what the assistant thought before it answered; for templates that render it.
        tool_calls: `ToolCall`s, or mappings in OpenAI's form.
        tool_call_id: of a tool's answer: the call that it answers.
        name: of the speaker, or of the tool that answers.

    Raises:
        FormatError: an empty role, a content that is not text or no Unicode text, `loss=True` on a turn that the model does not write.
    """

    role: str
    content: str = ""
    loss: bool | None = None
    loss_weight: float = 1.0
    reasoning_content: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    name: str | None = None

    if TYPE_CHECKING:  # what may be given; the fields tell what is kept

        def __init__(
            self,
            *,
            role: str,
            content: str | None = ...,
            loss: bool | None = ...,
            loss_weight: float = ...,
            reasoning_content: str | None = ...,
            tool_calls: Sequence[ToolCall | Mapping[str, Any]] | None = ...,
            tool_call_id: str | None = ...,
            name: str | None = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        if self._is_simple():
            return
        if not isinstance(self.role, str) or not self.role:
            raise FormatError(f"Message.role must be a non-empty string, not {self.role!r}")
        if self.tool_calls != ():
            object.__setattr__(self, "tool_calls", _tool_calls(self.tool_calls))
            if self.content is None and self.tool_calls:
                object.__setattr__(self, "content", "")
        if not isinstance(self.content, str):
            raise FormatError(f"Message.content must be a string, not {type(self.content).__name__} (role {self.role!r})")
        if not self.content.isascii():
            check_unicode("Message.content", self.content)
        for name in ("reasoning_content", "tool_call_id", "name"):
            if (value := getattr(self, name)) is not None:
                if not isinstance(value, str):
                    raise FormatError(f"Message.{name} must be a string, not {type(value).__name__} (role {self.role!r})")
                check_unicode(f"Message.{name}", value)
        if self.loss is not None and not isinstance(self.loss, bool):
            raise FormatError(f"Message.loss must be True, False or None, not {self.loss!r} (role {self.role!r})")
        if self.role != "assistant":
            for name in ("loss", "reasoning_content", "tool_calls"):
                if getattr(self, name):
                    what = "loss=True" if name == "loss" else name
                    raise FormatError(f"Message.{what} is for assistant turns; this one is a {self.role!r} turn")
        self._check_loss_weight()

    def _is_simple(self) -> bool:
        """Nothing to convert, and nothing that could be wrong: most messages, told in half a microsecond."""
        plain = type(self.role) is str and type(self.content) is str and self.content.isascii() and self.is_plain
        return plain and self.loss is None and self.loss_weight == 1.0 and self.role != "" and type(self.loss_weight) is float

    def _check_loss_weight(self) -> None:
        weight = self.loss_weight
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight < 0:
            raise FormatError(f"Message.loss_weight is {weight!r}; it must be a finite number, at least 0")

    @property
    def is_plain(self) -> bool:
        """Whether role and content are all that a template has to render."""
        return not self.tool_calls and self.reasoning_content is None and self.tool_call_id is None and self.name is None


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A conversation, and whatever the user wants to carry along with it.

    Args:
        messages: at least one `Message`; mappings with the same keys are converted.
        user_data: travels untouched into the `InputFeature` and the `SampleResponse` (an answer to compare with, say).
        tools: the functions that the assistant may call, as JSON schemas in OpenAI's form
            (`{"type": "function", "function": {"name": ..., "parameters": ...}}`).

    Raises:
        FormatError: no message, or a message that is not one. The text names its index.
    """

    messages: Sequence[Message]
    user_data: dict[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()

    if TYPE_CHECKING:  # what may be given; the fields tell what is kept

        def __init__(
            self, *, messages: Sequence[Message | Mapping[str, Any]], user_data: dict[str, Any] = ..., tools: Sequence[Mapping[str, Any]] = ...
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", _messages(self.messages))
        check_user_data("Trajectory", self.user_data)
        if self.tools != ():
            object.__setattr__(self, "tools", _tools(self.tools))


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """Two ways to go on from one beginning, the first preferred to the second.

    Args:
        chosen, rejected: whole conversations that end with an assistant turn.
        user_data: travels along untouched.

    Raises:
        FormatError: conversations that do not end with an assistant turn, or that begin with different messages.
    """

    chosen: Trajectory
    rejected: Trajectory
    user_data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected"):
            side = getattr(self, name)
            if not isinstance(side, Trajectory):
                raise FormatError(f"PreferencePair.{name} must be a Trajectory, not {type(side).__name__}")
            if side.messages[-1].role != "assistant":
                raise FormatError(f"PreferencePair.{name} ends with a {side.messages[-1].role!r} turn; it must end with the assistant's")
        if not self.num_common_messages:
            raise FormatError("PreferencePair.chosen and .rejected begin with different messages: they must share a prompt")
        check_user_data("PreferencePair", self.user_data)

    @property
    def num_common_messages(self) -> int:
        """How many messages both begin with: the prompt."""
        pairs = zip(self.chosen.messages, self.rejected.messages, strict=False)
        different = (index for index, (a, b) in enumerate(pairs) if a != b)
        # Two equal conversations share all but the answer.
        return next(different, min(len(self.chosen.messages), len(self.rejected.messages)) - 1)


def check_user_data(owner: str, user_data: Any) -> None:
    """Raises FormatError for what is not a dict."""
    if not isinstance(user_data, dict):
        raise FormatError(f"{owner}.user_data must be a dict, not {type(user_data).__name__}")


def check_unicode(what: str, text: str) -> None:
    """Raises FormatError for a text that no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FormatError(
            f"{what} holds a lone surrogate ({text[error.start]!a} at character {error.start}), which no tokenizer can encode; "
            "repair the text, e.g. text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from None


def _messages(messages: Any) -> tuple[Message, ...]:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise FormatError(f"Trajectory.messages must be a list of Message, not {type(messages).__name__}")
    if not messages:
        raise FormatError("Trajectory.messages is empty; a trajectory needs at least one message")
    return tuple(_message(message, index) for index, message in enumerate(messages))


_KNOWN = tuple(f.name for f in fields(Message))
_KNOWN_SET = frozenset(_KNOWN)


def _message(message: Any, index: int) -> Message:
    if isinstance(message, Message):
        return message
    if not isinstance(message, Mapping):
        raise FormatError(f"Trajectory.messages[{index}] must be a Message or a mapping, not {type(message).__name__}")
    for key in ("role", "content"):
        if key not in message and not (key == "content" and message.get("tool_calls")):
            raise FormatError(f"Trajectory.messages[{index}] has no {key!r} (it has: {', '.join(map(repr, message))})")
    given: dict[str, Any] = dict(message)
    if not _KNOWN_SET.issuperset(message) or len(message) > 2:
        # Tables of one schema for all rows (Arrow) write None for what a message has not.
        given = {key: value for key, value in given.items() if value is not None or key in ("role", "content")}
        if unknown := [key for key in given if key not in _KNOWN_SET]:
            raise FormatError(f"Trajectory.messages[{index}] has unknown fields {unknown}; a message has {', '.join(_KNOWN)}")
    try:
        return Message(**given)
    except FormatError as error:
        raise FormatError(f"Trajectory.messages[{index}]: {error}") from None


def _tool_calls(calls: Any) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
        raise FormatError(f"Message.tool_calls must be a list, not {type(calls).__name__}")
    return tuple(call if isinstance(call, ToolCall) else _tool_call(call, index) for index, call in enumerate(calls))


def _tool_call(call: Any, index: int) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or function.get("name") is None:
        raise FormatError(f"Message.tool_calls[{index}] has no function with a name; a call is {{'function': {{'name': ..., 'arguments': ...}}}}")
    arguments = function.get("arguments")
    return ToolCall(name=function["name"], arguments={} if arguments is None else arguments, id=call.get("id"))


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise FormatError(f"Trajectory.tools must be a list of JSON schemas, not {type(tools).__name__}")
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise FormatError(f"Trajectory.tools[{index}] has no function with a name; a tool is {{'type': 'function', 'function': {{'name': ...}}}}")
    return tuple(tools)
