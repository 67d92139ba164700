"""What forms of chat data a dataset holds, as a report to read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._errors import DataError
from ._rows import RowName
from ._schemas import detect_schema, to_conversation
from ._wording import in_rows

_MOST_PROBLEMS = 5
_UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class SchemaReport:
    """Print it. See `Dataset.inspect`.

    Args:
        num_rows: looked at.
        schemas: for each form of chat data how many rows have it; 'unknown' for rows of no known form.
        fields: for each field the types of its values, and how many rows have it (null included).
        roles: for each role how many messages have it.
        num_problems: rows that cannot be made a conversation.
        problems: what is wrong with the first five of them.
        num_without_answer: conversations without a turn of the assistant: nothing of them is trained on.
        num_answer_first: conversations that the assistant begins, which `encode` refuses: nothing is there to answer.
    """

    num_rows: int
    schemas: Mapping[str, int]
    fields: Mapping[str, Mapping[str, int]]
    roles: Mapping[str, int]
    num_problems: int
    problems: tuple[str, ...]
    num_without_answer: int = 0
    num_answer_first: int = 0

    @property
    def schema(self) -> str | None:
        """The form that all rows have; None where they differ, or there are none."""
        return next(iter(self.schemas)) if len(self.schemas) == 1 and _UNKNOWN not in self.schemas else None

    def __str__(self) -> str:
        """A few lines."""
        lines = [f"{in_rows(self.num_rows)}: {_counts(self.schemas) or 'none'}"]
        lines += [f"  field {name!r}: {_counts(kinds)}" for name, kinds in self.fields.items()]
        if self.roles:
            lines.append(f"  roles: {_counts(self.roles)}")
        if self.num_problems:
            lines.append(f"  {in_rows(self.num_problems)} cannot be made a conversation:")
            lines += [f"    {problem}" for problem in self.problems]
        for count, what in (
            (self.num_without_answer, "without a turn of the assistant: nothing is trained on"),
            (self.num_answer_first, "begun by the assistant, which encode refuses: leave that turn out, or put a user's before it"),
        ):
            if count:
                lines.append(f"  {in_rows(count)} {what}")
        return "\n".join(lines)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def report_schema(rows: Sequence[Any], limit: int | None) -> SchemaReport:
    """The report on the first `limit` rows."""
    size = len(rows) if limit is None else min(limit, len(rows))
    schemas, fields, roles = Counter[str](), dict[str, Counter[str]](), Counter[str]()
    problems: list[str] = []
    without_answer = answer_first = 0
    for index in range(size):
        try:
            row = rows[index]
            schema = detect_schema(row)
            schemas[schema or _UNKNOWN] += 1
            for name, value in row.items() if isinstance(row, Mapping) else ():
                fields.setdefault(str(name), Counter())[type(value).__name__ if value is not None else "null"] += 1
            if schema == "text":
                continue
            found = to_conversation(row, schema)
            sides = [found] if hasattr(found, "messages") else [found.chosen, found.rejected]  # pyright: ignore[reportAttributeAccessIssue]
            without_answer += all(message.role != "assistant" for side in sides for message in side.messages)  # pyright: ignore[reportAttributeAccessIssue]
            answer_first += any(side.messages[0].role == "assistant" for side in sides)  # pyright: ignore[reportAttributeAccessIssue]
            roles.update(message.role for side in sides for message in side.messages)  # pyright: ignore[reportAttributeAccessIssue]
        except DataError as error:
            text = str(error)
            problems.append(text if text.startswith("row ") else f"{RowName(rows, index)}: {text}")
    return SchemaReport(
        num_rows=size,
        schemas=dict(schemas.most_common()),
        fields={name: dict(kinds.most_common()) for name, kinds in fields.items()},
        roles=dict(roles.most_common()),
        num_problems=len(problems),
        problems=tuple(problems[:_MOST_PROBLEMS]),
        num_without_answer=without_answer,
        num_answer_first=answer_first,
    )
