"""The fixed parts of rendered chats, learnt once for each sequence of roles, so that finding spans takes one rendering a row.

A skeleton is the text that a template writes around the contents of messages with given roles, and where the assistant's turns begin
and end in it. It is learnt by the full analysis (two renderings a turn) of stand-in contents. For a row, the skeleton filled with the
row's contents must equal what the template renders, to the character; then the spans are the skeleton's. If not (the template treats
this content otherwise: strips its reasoning, say), the row is analysed in full.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._messages import Message

_MOST_SKELETONS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Characters `[start, stop)` of a rendered text, from the assistant's first character to the end of its end token."""

    start: int
    stop: int
    message: int


_Analyse = Callable[[Sequence[Message], bool], tuple[str, list[Span]] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Skeleton:
    """Text before, between and after n contents: n + 1 gaps. `answers`: index of an assistant's message, characters of its turn before
    the content, and after it up to the end of its end token.
    """

    gaps: tuple[str, ...]
    answers: tuple[tuple[int, int, int], ...]


class Skeletons:
    """Finds the assistant's spans in rendered texts by skeletons; None where a row needs the full analysis."""

    def __init__(self, analyse: _Analyse) -> None:
        self._analyse = analyse
        self._known: OrderedDict[tuple[bool, tuple[str, ...]], _Skeleton | None] = OrderedDict()

    def spans(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], full: str, add_generation_prompt: bool) -> list[Span] | None:
        """The spans in `full`, which is what the template renders of these messages."""
        if tools or not all(message.is_plain for message in messages):
            return None
        key = (add_generation_prompt, tuple(message.role for message in messages))
        if key in self._known:
            self._known.move_to_end(key)
        else:
            self._known[key] = self._learn(*key)
            if len(self._known) > _MOST_SKELETONS:
                self._known.popitem(last=False)
        skeleton = self._known[key]
        if skeleton is None:
            return None
        contents = [message.content for message in messages]
        found = _fill(skeleton, contents, full)
        return found if found is not None else _fill(skeleton, [content.strip() for content in contents], full)

    def _learn(self, add_generation_prompt: bool, roles: tuple[str, ...]) -> _Skeleton | None:
        contents = [f"probe-content-{index}-7f3a" for index in range(len(roles))]
        stand_ins = [Message(role=role, content=content) for role, content in zip(roles, contents, strict=True)]
        analysed = self._analyse(stand_ins, add_generation_prompt)
        if analysed is None:
            return None
        text, spans = analysed
        gaps: list[str] = []
        places: list[int] = []
        after = 0
        for content in contents:
            at = text.find(content, after)
            if at < 0 or text.count(content) != 1:
                return None
            gaps.append(text[after:at])
            places.append(at)
            after = at + len(content)
        answers = tuple(
            (span.message, places[span.message] - span.start, span.stop - places[span.message] - len(contents[span.message])) for span in spans
        )
        return _Skeleton(gaps=(*gaps, text[after:]), answers=answers)


def _fill(skeleton: _Skeleton, contents: Sequence[str], full: str) -> list[Span] | None:
    at = 0
    places: list[int] = []
    for gap, content in zip(skeleton.gaps, contents, strict=False):
        if not full.startswith(gap, at) or not full.startswith(content, at + len(gap)):
            return None
        places.append(at + len(gap))
        at += len(gap) + len(content)
    if len(full) != at + len(skeleton.gaps[-1]) or not full.endswith(skeleton.gaps[-1]):
        return None
    return [
        Span(start=places[index] - before, stop=places[index] + len(contents[index]) + after, message=index)
        for index, before, after in skeleton.answers
    ]
