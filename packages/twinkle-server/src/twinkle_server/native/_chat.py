"""`POST /chat/completions` and `GET /models`, as OpenAI's clients speak (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StrictInt, ValidationError
from pydantic_core import to_json

from twinkle_client import types as wire
from twinkle_data import FormatError
from twinkle_data.openai import ChatWriter, message_of, structure_of

from .._errors import ApiError, Invalid
from .._keys import Principal
from .._service import Service, sampler_queue
from ..engine import Reply
from ..engine._sampler import SamplerBackend
from ..http._auth import Caller, get_service, request_id
from ..http._json import StrictRoute
from ._answers import answer_call
from ._convert import record_of
from ._examples import with_example
from ._models import find_weights
from ._streams import backend_of, pieces

chat_router = APIRouter(route_class=StrictRoute, tags=["openai"])
KIND = "openai.chat"


class ModelCard(wire.Answer):
    """A model, or weights over one, that can be chatted with."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "twinkle"


class ModelCards(wire.Answer):
    """The answer to GET /models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ChatBody(BaseModel):
    """The body of a chat completion. A field that is not here is an error: nothing is dropped.

    model: a base model's name, or the URI of weights (`twinkle://RUN/sampler_weights/NAME`). top_k, min_p, min_tokens and stop_token_ids are not
    OpenAI's; vLLM's server has them under these names.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: Annotated[str, Field(max_length=400)]
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] = []
    n: Annotated[StrictInt, Field(ge=1, le=128)] = 1
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=100)] = 1.0
    top_p: FiniteFloat = 1.0
    seed: StrictInt | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    logit_bias: dict[str, FiniteFloat] | None = None
    response_format: dict[str, Any] | None = None
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    user: str | None = None
    top_k: StrictInt = -1
    min_p: FiniteFloat = 0.0
    min_tokens: Annotated[StrictInt, Field(ge=0)] = 0
    stop_token_ids: list[StrictInt] = []

    def sample(self) -> wire.Sample:
        """What is to be sampled; Invalid for what cannot be."""
        if self.top_logprobs and not self.logprobs:
            raise Invalid("top_logprobs needs logprobs=true")
        try:
            return wire.Sample.model_validate(
                {
                    "inputs": [{"messages": [message_of(message) for message in self.messages], "tools": self.tools}],
                    "sampling_params": {
                        "max_tokens": self.max_completion_tokens or self.max_tokens,
                        "temperature": self.temperature,
                        "top_p": self.top_p,
                        "top_k": self.top_k,
                        "min_p": self.min_p,
                        "min_tokens": self.min_tokens,
                        "seed": self.seed,
                        "stop": self.stop or [],
                        "stop_token_ids": self.stop_token_ids,
                        "num_samples": self.n,
                        "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
                        "logprobs": self.logprobs,
                        "top_logprobs": self.top_logprobs or 0,
                        "structured_output": structure_of(self.response_format),
                    },
                }
            )
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise Invalid(f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg'][:300]}") from None
        except (FormatError, KeyError, TypeError, ValueError) as error:
            raise Invalid(f"the body cannot be read: {str(error)[:300]}") from None


@chat_router.get("/models")
async def models(request: Request, caller: Caller) -> ModelCards:
    """What can be chatted with by name. Weights are named by their URI, and are not listed."""
    return ModelCards(data=[ModelCard(id=name) for name in get_service(request).samplers])


@chat_router.post(
    "/chat/completions",
    response_model=None,
    openapi_extra=with_example("chat_completions"),
    responses={
        200: {
            "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}},
            "description": "A chat.completion; with `stream` its chunks as server-sent events",
        }
    },
)
async def chat_completions(request: Request, caller: Caller, body: ChatBody) -> Response:
    """Completions of a conversation. Beside OpenAI's fields answers have `prompt_token_ids`, and each choice `token_ids`."""
    service = get_service(request)
    whole = body.sample()
    model = body.model
    if "://" in model:
        path = "twinkle" + model.removeprefix("tinker") if model.startswith("tinker://") else model
        _, run = await service.io(find_weights, service, caller.tenant, path, None)
        model, whole = run.base_model, whole.model_copy(update={"adapter_path": path})
    backend = backend_of(service, model)
    if not body.stream:
        payload = to_json({"model": body.model, "sample": whole.model_dump(mode="json", exclude_unset=True)})
        return await answer_call(request, caller, KIND, queue=sampler_queue(model), value=(body.model, whole), payload=payload)
    template = await service.file_io(lambda: backend.template)
    writer = ChatWriter(body.model, template, record_of(whole.sampling_params))
    wants_usage = bool((body.stream_options or {}).get("include_usage"))
    events = _events(service, caller, model, whole, writer, wants_usage, request_id(request))
    first = await anext(events)  # so that an error is still one of HTTP
    return StreamingResponse(_after(first, events), media_type="text/event-stream")


def register_chat(service: Service) -> None:
    """Says how such calls run."""
    service.calls.register(KIND, decode=_decode, run=lambda context, value: Reply(body=_complete(context.the_sampler(), context, *value)))


def _decode(payload: bytes) -> tuple[str, wire.Sample]:
    content = json.loads(payload)
    return content["model"], wire.Sample.model_validate(content["sample"])


def _complete(sampler: SamplerBackend, context: Any, name: str, body: wire.Sample) -> bytes:
    checkpoint = None
    if body.adapter_path is not None:
        checkpoint, _ = find_weights(context.service, context.tenant, body.adapter_path, None)
    params = record_of(body.sampling_params)
    responses = sampler.sample([record_of(each) for each in body.inputs], params, None, checkpoint)
    return to_json(ChatWriter(name, sampler.template, params).whole([_good(response) for response in responses]))


def _good(response: Any) -> Any:
    if response.error is not None:
        raise Invalid(str(response.error)[:1000])
    return response


async def _events(
    service: Service, caller: Principal, model: str, body: wire.Sample, writer: ChatWriter, wants_usage: bool, request: str
) -> AsyncIterator[bytes]:
    """The server-sent events: of each choice its text as it comes, and last its reason."""
    texts: dict[int, str] = {}
    async for item in pieces(service, caller, model, body, request):
        if isinstance(item, list):
            for number, (tokens, _) in enumerate(item):
                if text := writer.news(tokens, texts.get(number, "")):
                    texts[number] = texts.get(number, "") + text
                    yield _event(writer.chunk(text, index=number))
            continue
        response = _good(item)
        for number, sequence in enumerate(response.sequences):
            yield _event(writer.chunk(writer.text(sequence)[len(texts.get(number, "")) :], sequence, number))
        if wants_usage:
            yield _event(writer.usage_chunk([response]))
    yield b"data: [DONE]\n\n"


async def _after(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    try:
        async for event in events:
            yield event
    except ApiError as error:
        yield _event({"error": {"message": error.detail, "type": "server_error", "param": None, "code": error.status}})


def _event(content: Any) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"
