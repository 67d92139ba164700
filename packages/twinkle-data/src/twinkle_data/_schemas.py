"""The forms that chat data comes in, told apart by their fields, and made into trajectories.

messages           OpenAI: 'messages', each with 'role' and 'content'; 'tools', 'tool_calls'
sharegpt           'conversations', each with 'from' and 'value'; 'system', 'tools'
alpaca             'instruction', 'input', 'output'; 'system', 'history'
prompt_completion  'prompt' and 'completion' (or 'response'), texts or messages
question_answer    'question' (or 'problem') and 'answer' (or 'solution')
preference         'chosen' and 'rejected', with or without 'prompt'
text               'text'
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ._errors import FormatError
from ._messages import ROLES, Message, PreferencePair, Trajectory
from ._wording import a_kind

_ROLES = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "bot", "model", "chatgpt", "ai", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "tool_response", "function_response"), "tool"),
}
_CALLS = ("function_call", "tool_call")
_REASONING = ("reasoning", "thinking")
_PROMPTS, _COMPLETIONS = ("prompt",), ("completion", "response")
_QUESTIONS, _ANSWERS = ("question", "problem", "query"), ("answer", "solution")


def detect_schema(row: Any) -> str | None:
    """The name of the form that a row has, by its fields that are not null; None for a form that is not known."""
    if isinstance(row, Trajectory):
        return "messages"
    if isinstance(row, PreferencePair):
        return "preference"
    if isinstance(row, str):
        return "text"
    if not isinstance(row, Mapping):
        return None
    has = {key for key, value in row.items() if value is not None}
    for name, fits in _FITS.items():
        if fits(has):
            return name
    return None


_FITS: dict[str, Callable[[set[Any]], bool]] = {
    "preference": lambda has: {"chosen", "rejected"} <= has,
    "messages": lambda has: "messages" in has,
    "sharegpt": lambda has: bool({"conversations", "conversation"} & has),
    "alpaca": lambda has: {"instruction", "output"} <= has,
    "prompt_completion": lambda has: bool(has.intersection(_PROMPTS) and has.intersection(_COMPLETIONS)),
    "question_answer": lambda has: bool(has.intersection(_QUESTIONS) and has.intersection(_ANSWERS)),
    "text": lambda has: "text" in has,
}
SCHEMAS = tuple(_FITS)


def to_conversation(row: Any, schema: str | None = None, roles: Mapping[str, str] | None = None) -> Trajectory | PreferencePair:
    """A row as a `Trajectory`, or a preference pair as a `PreferencePair`. Fields that the form does not use become `user_data`.

    Args:
        row: a mapping; trajectories and pairs are given back as they are, a text is one of the form 'text'.
        schema: the form; None: the one that the row's fields tell.
        roles: names of roles that are used here beside the usual ones, each with what it means ('system', 'user', 'assistant', 'tool').

    Raises:
        FormatError: a form that is not known or that the row does not have; a field that does not fit, which is named.
    """
    if isinstance(row, (Trajectory, PreferencePair)):
        return row
    check_roles(roles)
    known = {**_ROLES, **{name: _ROLES[meaning] for name, meaning in roles.items()}} if roles else _ROLES
    name = detect_schema(row) if schema is None else schema
    if name is None:
        fields = ", ".join(f"{key!r} (null)" if value is None else repr(key) for key, value in row.items()) if isinstance(row, Mapping) else ""
        kind = f"its fields are {fields or 'none'}" if isinstance(row, Mapping) else f"it is {a_kind(row)}"
        raise FormatError(f"cannot tell what form of chat data this is ({kind}){_near(row)}; map it to a Trajectory or to a mapping with 'messages'")
    check_schema(name)
    row = {"text": row} if isinstance(row, str) else row
    if not isinstance(row, Mapping):
        raise FormatError(f"{a_kind(row)} cannot be made a conversation; map it to a Trajectory or to a mapping with 'messages'")
    try:
        return _CONVERT[name](row, known)
    except RecursionError:
        raise FormatError("values are nested too deep") from None


def _near(row: Any) -> str:
    """Which form it would be with one field more."""
    if isinstance(row, Mapping):
        has = {key for key, value in row.items() if value is not None}
        for name, first, second in (
            ("question_answer", _QUESTIONS, _ANSWERS),
            ("alpaca", ("instruction",), ("output",)),
            ("prompt_completion", _PROMPTS, _COMPLETIONS),
        ):
            if has.intersection(first):
                return f": {name} lacks {' or '.join(map(repr, second))}"
    return ""


def check_schema(name: str | None) -> None:
    """Raises FormatError for the name of a form that there is none of."""
    if name is not None and name not in _CONVERT:
        raise FormatError(f"there is no schema {name!r}; the schemas are {', '.join(SCHEMAS)}")


def check_roles(roles: Mapping[str, str] | None) -> None:
    """Raises FormatError for a role that is said to mean something that is no role: its turns would never be trained on."""
    for name, meaning in (roles or {}).items():
        if meaning not in _ROLES:
            raise FormatError(f"roles says that {name!r} means {meaning!r}, which is no role; say 'system', 'user', 'assistant' or 'tool'")


def _from_messages(row: Mapping[str, Any], roles: Mapping[str, str]) -> Trajectory:
    messages = _messages(_nested(_required(row, "messages"), "messages"), "messages", roles)
    return _trajectory(row, [*_system(row, messages), *messages], used=("messages", "system", "tools", "functions"))


def _from_sharegpt(row: Mapping[str, Any], roles: Mapping[str, str]) -> Trajectory:
    field = "conversation" if row.get("conversations") is None and "conversation" in row else "conversations"
    turns = _list(_nested(_required(row, field), field), field)
    if not turns:
        raise FormatError(f"{field} is empty; a conversation needs at least one message")
    first = turns[0]
    if isinstance(first, Mapping) and "from" not in first and "role" in first:  # the field's name of one form, the turns of the other
        messages = _messages(turns, field, roles)
    else:
        messages = [_sharegpt_turn(turn, f"{field}[{index}]", roles) for index, turn in enumerate(turns)]
    return _trajectory(row, [*_system(row, messages), *messages], used=(field, "system", "tools"))


def _sharegpt_turn(turn: Any, field: str, roles: Mapping[str, str]) -> Message:
    if not isinstance(turn, Mapping):
        raise FormatError(f"{field} must be a mapping with 'from' and 'value', not {type(turn).__name__}")
    speaker = _text(_required(turn, "from", field), f"{field}.from")
    fields = {key: value for key, value in turn.items() if value is not None and key not in ("from", "value")}
    fields["role"] = _role(speaker, f"{field}.from", roles)
    if speaker in _CALLS:
        if "tool_calls" in fields:
            raise FormatError(f"{field} is a {speaker!r} turn and has 'tool_calls' besides; leave one of them out")
        calls = _json(_text(_required(turn, "value", field), f"{field}.value"), f"{field}.value")
        fields |= {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    elif turn.get("value") is None and fields.get("tool_calls"):
        fields["content"] = None
    else:
        fields["content"] = _text(_required(turn, "value", field), f"{field}.value")
    _rename(fields, field, "train", "loss")
    return _message(fields, field)


def _from_alpaca(row: Mapping[str, Any], roles: Mapping[str, str]) -> Trajectory:
    instruction, output = _text(_required(row, "instruction"), "instruction"), _text(_required(row, "output"), "output")
    given = _text("" if row.get("input") is None else row["input"], "input")
    messages: list[Message] = []
    for index, pair in enumerate(_list(row.get("history") or [], "history")):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise FormatError(f"history[{index}] must be a pair of texts, the user's and the assistant's")
        messages += _exchange(_text(pair[0], f"history[{index}][0]"), _text(pair[1], f"history[{index}][1]"))
    messages += _exchange(f"{instruction}\n\n{given}" if given else instruction, output)
    return _trajectory(row, [*_system(row, messages), *messages], used=("instruction", "input", "output", "system", "history"))


def _from_prompt_completion(row: Mapping[str, Any], roles: Mapping[str, str]) -> Trajectory:
    prompt, completion = _either(row, _PROMPTS), _either(row, _COMPLETIONS)
    messages = [*_side(row[prompt], prompt, "user", roles), *_side(row[completion], completion, "assistant", roles)]
    return _trajectory(row, [*_system(row, messages), *messages], used=(prompt, completion, "system", "tools"))


def _from_question_answer(row: Mapping[str, Any], roles: Mapping[str, str]) -> Trajectory:
    question, answer = _either(row, _QUESTIONS), _either(row, _ANSWERS)
    messages = _exchange(_text(row[question], question), _text(row[answer], answer))
    # Both stay at hand: rewards compare with the answer.
    return _trajectory(row, [*_system(row, messages), *messages], used=("system",))


def _from_preference(row: Mapping[str, Any], roles: Mapping[str, str]) -> PreferencePair:
    used = ("prompt", "question", "chosen", "rejected", "system", "tools")
    name = next((name for name in ("prompt", "question") if row.get(name) is not None), None)
    prompt = [] if name is None else _side(row[name], name, "user", roles)
    sides: list[Trajectory] = []
    for field in ("chosen", "rejected"):
        answer = _required(row, field)
        if isinstance(answer, str) and not prompt:
            raise FormatError(f"{field} is a text and there is no 'prompt'; a pair has a prompt, or whole conversations as 'chosen' and 'rejected'")
        messages = _side(answer, field, "assistant", roles)
        if prompt and not _is_whole(messages, prompt, field, str(name)):
            messages = [*prompt, *messages]
        sides.append(Trajectory(messages=[*_system(row, messages), *messages], tools=tools_of(row)))
    return PreferencePair(chosen=sides[0], rejected=sides[1], user_data=_user_data(row, used))


def _is_whole(messages: Sequence[Message], prompt: Sequence[Message], field: str, name: str) -> bool:
    """Whether the side of a pair is a whole conversation with the prompt in it, not an answer that follows the prompt.

    Raises:
        FormatError: a conversation of its own without the prompt, so that nobody can tell which of the two is meant.
    """
    if messages[0].role in ("assistant", "tool"):
        return False
    system = messages[0].role in ("system", "developer") and prompt[0].role != messages[0].role
    if _alike(messages[system : system + len(prompt)], prompt):
        return True
    # The prompt as a text is the question that is answered: the last one of several turns.
    asked = [message for message in messages[:-1] if message.role == "user"]
    if len(prompt) == 1 and asked and _alike(asked[-1:], prompt):
        return True
    raise FormatError(
        f"{field} begins with a {messages[0].role!r} turn, so it is a whole conversation, but {name!r} is neither its beginning nor the last "
        f"question in it: leave {name!r} out, or give the answers alone as 'chosen' and 'rejected'"
    )


def _alike(some: Sequence[Message], others: Sequence[Message]) -> bool:
    """Whether messages are the same but for spaces around their texts."""
    return len(some) == len(others) and all(
        replace(a, content=a.content.strip()) == replace(b, content=b.content.strip()) for a, b in zip(some, others, strict=True)
    )


def _from_text(row: Mapping[str, Any], roles: Mapping[str, str]) -> Trajectory:
    raise FormatError("a row of plain text is no conversation; encode it with Dataset.encode or Template.encode_text, or map it to messages")


_CONVERT: dict[str, Callable[[Mapping[str, Any], Mapping[str, str]], Trajectory | PreferencePair]] = {
    "preference": _from_preference,
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt_completion": _from_prompt_completion,
    "question_answer": _from_question_answer,
    "text": _from_text,
}


def _messages(value: Any, field: str, roles: Mapping[str, str]) -> list[Message]:
    turns = _list(value, field)
    if not turns:
        raise FormatError(f"{field} is empty; a conversation needs at least one message")
    return [turn if isinstance(turn, Message) else _openai_turn(turn, f"{field}[{index}]", roles) for index, turn in enumerate(turns)]


def _openai_turn(turn: Any, field: str, roles: Mapping[str, str]) -> Message:
    if type(turn) is dict and len(turn) == 2 and type(turn.get("content")) is str and type(turn.get("role")) is str and turn["role"] in roles:
        try:
            return Message(role=roles[turn["role"]], content=turn["content"])  # most turns
        except FormatError as error:
            raise FormatError(f"{field}: {error}") from None
    if not isinstance(turn, Mapping):
        raise FormatError(f"{field} must be a mapping with 'role' and 'content', not {type(turn).__name__}")
    fields = {key: value for key, value in turn.items() if value is not None}
    fields["role"] = _role(_text(_required(turn, "role", field), f"{field}.role"), f"{field}.role", roles)
    if "function_call" in fields:  # OpenAI's older form, one call a turn
        if "tool_calls" in fields:
            raise FormatError(f"{field} has both 'function_call' and 'tool_calls'; leave one of them out")
        fields["tool_calls"] = [fields.pop("function_call")]
    content = fields.get("content")
    if content is None and not fields.get("tool_calls"):
        _required(turn, "content", field)
    fields["content"] = _parts(content, f"{field}.content") if isinstance(content, Sequence) and not isinstance(content, str) else content
    return _message(fields, field)


def _rename(fields: dict[str, Any], field: str, old: str, new: str) -> None:
    if old in fields:
        if new in fields:
            raise FormatError(f"{field} has both {old!r} and {new!r}; leave one of them out")
        fields[new] = fields.pop(old)


def _message(fields: dict[str, Any], field: str) -> Message:
    """A message of fields that are not null, the content aside; its errors name the field."""
    for name in _REASONING:
        _rename(fields, field, name, "reasoning_content")
    _rename(fields, field, "weight", "loss_weight")  # OpenAI's fine-tuning format
    if fields.get("loss_weight") == 0 and fields["role"] == "assistant":
        if fields.get("loss"):
            raise FormatError(f"{field} has the weight 0 and loss=True; one of them is wrong")
        fields["loss"] = False
    known = Message.__dataclass_fields__
    for key in [key for key, value in fields.items() if key not in known and value in ([], {})]:
        del fields[key]  # says nothing: OpenAI's answers have empty 'annotations'
    if unknown := [key for key in fields if key not in known]:
        raise FormatError(f"{field} has unknown fields {unknown}; a message has {', '.join(known)}")
    try:
        return Message(**fields)
    except FormatError as error:
        raise FormatError(f"{field}: {error}") from None


def _parts(parts: Sequence[Any], field: str) -> str:
    """A content in parts as one text."""
    texts: list[str] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part, Mapping):
            raise FormatError(f"{field}[{index}] is a part of type {kind!r}; only parts of type 'text' can be used, this package knows texts only")
        texts.append(_text(_required(part, "text", f"{field}[{index}]"), f"{field}[{index}].text"))
    return "".join(texts)


def _side(value: Any, field: str, role: str, roles: Mapping[str, str]) -> list[Message]:
    """A text of a role, or messages."""
    if isinstance(value, str):
        return [Message(role=role, content=value)]
    if isinstance(value, Sequence):
        return _messages(value, field, roles)
    raise FormatError(f"{field} must be a text or a list of messages, not {type(value).__name__}")


def _exchange(question: str, answer: str) -> list[Message]:
    return [Message(role="user", content=question), Message(role="assistant", content=answer)]


def _system(row: Mapping[str, Any], messages: Sequence[Message]) -> list[Message]:
    system = row.get("system")
    if system is None or system == "" or messages[0].role in ("system", "developer"):
        return []
    return [Message(role="system", content=_text(system, "system"))]


def _trajectory(row: Mapping[str, Any], messages: Sequence[Message], used: Sequence[str]) -> Trajectory:
    if isinstance(row.get("label"), bool):
        raise FormatError(
            f"'label' is {row['label']}: the row says whether its answer is wanted (unpaired preferences, KTO), which no form here does; "
            "keep the rows whose answer is, and leave the field out"
        )
    return Trajectory(messages=messages, user_data=_user_data(row, used), tools=tools_of(row))


def _user_data(row: Mapping[str, Any], used: Sequence[str]) -> dict[str, Any]:
    """What the conversation does not use: the mapping in the field 'user_data', and all other fields."""
    rest = {str(key): value for key, value in row.items() if key not in used}
    if not isinstance(rest.get("user_data"), Mapping):
        return rest
    own = dict(rest.pop("user_data"))
    if both := sorted(map(str, own.keys() & rest.keys())):
        raise FormatError(f"the row has the fields {', '.join(map(repr, both))}, and its 'user_data' has them too; rename or remove one of each")
    return {**rest, **own}


def tools_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tools that a row names, in OpenAI's form."""
    tools = row.get("tools")
    if tools is None and row.get("functions"):
        tools = [{"type": "function", "function": function} for function in _list(row["functions"], "functions")]
    return _list(_nested(tools, "tools") or [], "tools")


def _role(name: str, field: str, roles: Mapping[str, str]) -> str:
    if name not in roles:
        raise FormatError(
            f"{field} is {name!r}, which is no known role ({', '.join(sorted(roles))}); correct it, or say which of them it is: "
            f".conversations(roles={{{name!r}: ...}})"
        )
    return roles[name]


def _either(row: Mapping[str, Any], names: Sequence[str]) -> str:
    found = [name for name in names if row.get(name) is not None]
    if not found:
        _required(row, names[0])
    return found[0]


def _required(row: Mapping[str, Any], name: str, field: str | None = None) -> Any:
    if (value := row.get(name)) is not None:
        return value
    what = f"field {name!r} is null" if name in row else f"no field {name!r}"
    where = "" if field is None else f"{field}: "
    raise FormatError(f"{where}{what} (the {'row' if field is None else 'message'} has {', '.join(map(repr, row)) or 'no fields'})")


def _list(value: Any, field: str) -> list[Any]:
    if hasattr(value, "tolist"):  # a numpy array, as tables give them
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise FormatError(f"{field} must be a list, not {type(value).__name__}")
    return list(value)


def _nested(value: Any, field: str) -> Any:
    """The value, or what its JSON text holds: tables (CSV) keep nested lists as texts."""
    if not isinstance(value, str):
        return value
    return _json(value, field) if value.strip() else []


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{field} must be a text, not {type(value).__name__} ({value!r:.40})")
    return value


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise FormatError(f"{field}: values are nested too deep") from None
    except ValueError as error:
        raise FormatError(f"{field} is not JSON: {error}") from None
