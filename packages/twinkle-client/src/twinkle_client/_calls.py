"""One request of the service, described: what is sent, how its answer is read, and whether it may be sent again."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from ._errors import InvalidRequest
from ._verbs import Result, VerbWithOptions

T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Call(Generic[T]):
    """A request.

    path: with '{prefix}' where the route prefix belongs. read: the answer's body to what the caller gets. content: the JSON body.
    is_repeatable: sending it twice is like sending it once, by what it does or by its idempotency key. is_long: it waits in a model's queue
    (its deadline is call_timeout_s). needs_session: it is refused once the session is lost.
    """

    method: str
    path: str
    read: Callable[[bytes], T]
    content: bytes | None = None
    params: Mapping[str, str] = field(default_factory=dict[str, str])
    is_repeatable: bool = True
    idempotency_key: str | None = None
    is_long: bool = False
    needs_session: bool = False


def get(path: str, answer: type[ModelT], params: Mapping[str, str] | None = None) -> Call[ModelT]:
    """A GET."""
    return Call(method="GET", path=path, read=answer.model_validate_json, params=params or {})


def ask(path: str, question: BaseModel, answer: type[ModelT]) -> Call[ModelT]:
    """A POST that changes nothing which a second one would change again."""
    return Call(method="POST", path=path, read=answer.model_validate_json, content=_encode(question))


def post(path: str, body: BaseModel, read: Callable[[bytes], T], *, is_long: bool = False, needs_session: bool = False) -> Call[T]:
    """A POST with an idempotency key: the server does it once, however often it is sent."""
    return Call(
        method="POST",
        path=path,
        read=read,
        content=_encode(body),
        idempotency_key=str(uuid.uuid4()),
        is_long=is_long,
        needs_session=needs_session,
    )


def make(kind: type[ModelT], **fields: Any) -> ModelT:
    """A body of this type.

    Raises:
        InvalidRequest: a field that is wrong; the message names it. Nothing was sent.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        told = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False, include_input=False)[:10]]
        raise InvalidRequest("; ".join(told)) from None


def _encode(body: BaseModel) -> bytes:
    try:
        # An option that is None means something; a field of a record that is None is not there.
        has_options = isinstance(body, VerbWithOptions)
        return body.model_dump_json(exclude_unset=has_options, exclude_none=not has_options).encode()
    except PydanticSerializationError as error:
        raise InvalidRequest(f"{type(body).__name__} holds something that is no JSON: {error}") from None


class ResultOf(Generic[T]):
    """Reads `{"result": ...}`, whose result is of a type."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __call__(self, content: bytes) -> T:
        model = _results.get(self._kind)
        if model is None:
            model = _results[self._kind] = Result[self._kind]
        return model.model_validate_json(content).result


def result_of(kind: type[T] | Any) -> ResultOf[Any]:
    """What reads a verb's answer, whose result is of this type."""
    return ResultOf(kind)


_results: dict[Any, type[Result[Any]]] = {}
