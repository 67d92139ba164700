"""The verbs of samplers: `/sampler/{model}/twinkle/...`."""

# Not `from __future__ import annotations`: routes are made in a loop, with the body's type as their annotation.

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic_core import from_json, to_json
from sqlalchemy.exc import IntegrityError

from twinkle_client import types as wire
from twinkle_data.openai import Writer

from .._errors import ApiError, Invalid, NotFound
from .._keys import Principal
from .._service import Service, sampler_queue
from ..engine import Context, Reply
from ..http._auth import Caller, get_service, request_id
from ..http._json import StrictRoute, parse_json
from ..store import Sampler
from ._answers import answer_call
from ._convert import record_json, record_of
from ._examples import with_example
from ._models import ModelName, find_weights, session_of, template_options
from ._streams import backend_of, pieces, register_streams

_MAX_COMPLETIONS = 4096


def samplers_router(service: Service, prefix: str) -> APIRouter:
    """The routes; registers how their calls run."""
    router = APIRouter(route_class=StrictRoute, tags=["sampler"])
    register_streams(service)
    for verb, (kind, result, run, text) in VERBS.items():
        service.calls.register(
            f"native.sampler.{verb}",
            decode=lambda payload, kind=kind: kind.model_validate(parse_json(payload)),
            run=lambda context, value, run=run: Reply(body=run(context, value)),
        )
        router.add_api_route(
            f"/sampler/{{model:path}}{prefix}/{verb}",
            _endpoint(verb, kind),
            methods=["POST"],
            response_model=result,
            responses={202: {"model": wire.Future, "description": "With `Prefer: respond-async`: not finished yet"}},
            name=f"sampler_{verb}",
            description=text,
            openapi_extra=with_example(f"sampler_{verb}"),
        )
    router.add_api_route(
        f"/sampler/{{model:path}}{prefix}/sample_stream",
        _sample_stream,
        methods=["POST"],
        name="sampler_sample_stream",
        openapi_extra=with_example("sampler_sample_stream"),
        response_class=StreamingResponse,
        responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}, "description": "Lines, each a SampleChunk"}},
    )
    return router


def _endpoint(verb: str, kind: type[wire.Verb]) -> Callable[..., Any]:
    async def endpoint(request: Request, caller: Caller, model: ModelName, body: kind) -> Response:  # pyright: ignore[reportInvalidTypeForm]
        service = get_service(request)
        queue = sampler_queue(model)
        service.calls.queue(queue)
        value: Any = body
        payload = None
        if verb == "sample":
            value = await _resolved(request, caller, model, body)
            payload = value.model_dump_json(exclude_unset=True).encode()
        elif verb == "add_adapter_to_sampler":
            await _name_weights(request, caller, model, body)
        elif verb == "set_template":
            await service.io(template_options, service, caller.tenant, model, body)
        return await answer_call(request, caller, f"native.sampler.{verb}", queue=queue, value=value, payload=payload)

    return endpoint


async def _resolved(request: Request, caller: Principal, model: str, body: wire.Sample) -> wire.Sample:
    """The body with the URI of the weights in place of the adapter's name; checks sizes and that the weights are there."""
    service = get_service(request)
    each = body.sampling_params if isinstance(body.sampling_params, list) else [body.sampling_params] * len(body.inputs)
    if len(each) != len(body.inputs):
        raise Invalid(f"there are {len(body.inputs)} inputs but sampling_params for {len(each)}")
    if sum(body.num_samples or params.num_samples for params in each) > _MAX_COMPLETIONS:
        raise Invalid(f"a call samples at most {_MAX_COMPLETIONS} completions")
    path = body.adapter_path
    if path is None and body.adapter_name:
        named = await service.io(service.store.get, Sampler, _name_id(request, caller, model, body.adapter_name))
        if named is None or named.tenant != caller.tenant:
            raise NotFound(f"there is no adapter {body.adapter_name[:200]!r} on this sampler: call add_adapter_to_sampler first")
        path = named.checkpoint
    if path is not None:
        _, run = await service.io(find_weights, service, caller.tenant, path, None)
        if run.base_model != model:
            raise Invalid(f"the weights are of {run.base_model}, this sampler is of {model}")
    return body.model_copy(update={"adapter_path": path, "adapter_name": ""} if path is not None else {})


async def _name_weights(request: Request, caller: Principal, model: str, body: wire.AddAdapterToSampler) -> None:
    service = get_service(request)
    if not body.adapter_name:
        raise Invalid("adapter_name is empty, which is the base model's name")

    def write() -> None:
        _, run = find_weights(service, caller.tenant, body.path, None)
        if run.base_model != model:
            raise Invalid(f"the weights are of {run.base_model}, this sampler is of {model}")
        name_id = _name_id(request, caller, model, body.adapter_name)
        if service.store.get(Sampler, name_id) is None:
            try:
                service.store.add(Sampler(id=name_id, tenant=caller.tenant, base_model=model, checkpoint=body.path, created_at=time.time()))
                return
            except IntegrityError:  # another request was faster
                pass
        service.store.change(Sampler, name_id, checkpoint=body.path)

    await service.io(write)


def _name_id(request: Request, caller: Principal, model: str, name: str) -> str:
    """Under which a session (or, without one, a tenant) keeps a name."""
    text = "\0".join((caller.tenant, session_of(request) or "", model, name))
    return "name-" + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _create(context: Context, body: wire.CreateModel) -> bytes:
    context.the_sampler()
    return _NOTHING


def _done(context: Context, body: Any) -> bytes:
    return _NOTHING


def _apply_patch(context: Context, body: wire.ApplyPatch) -> bytes:
    raise Invalid(f"there is no patch {body.patch[:200]!r} on this server's list, which is empty")


def _sample(context: Context, body: wire.Sample) -> bytes:
    sampler = context.the_sampler()
    checkpoint = None
    if body.adapter_path is not None:
        checkpoint, _ = find_weights(context.service, context.tenant, body.adapter_path, None)
    params = body.sampling_params
    responses = sampler.sample(
        [record_of(each) for each in body.inputs],
        [record_of(each) for each in params] if isinstance(params, list) else record_of(params),
        body.num_samples,
        checkpoint,
    )
    return b'{"samples":[' + b",".join(record_json(wire.SampleResponse, response) for response in responses) + b"]}"


async def _sample_stream(request: Request, caller: Caller, model: ModelName, body: wire.Sample) -> StreamingResponse:
    """As `sample`, but as it comes: lines of JSON, each a SampleChunk, with the tokens since the line before; a prompt's last has its response."""
    service = get_service(request)
    queue = sampler_queue(model)
    service.calls.queue(queue)
    whole = await _resolved(request, caller, model, body)
    backend = backend_of(service, model)
    template = await service.file_io(lambda: backend.template)
    params = whole.sampling_params
    parts = [
        whole.model_copy(
            update={
                "inputs": [each],
                "sampling_params": _for_one(
                    params[index] if isinstance(params, list) else params, whole.num_samples, index, isinstance(params, list)
                ),
            }
        )
        for index, each in enumerate(whole.inputs)
    ]

    async def lines() -> AsyncIterator[bytes]:
        found: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def one(index: int, part: wire.Sample) -> None:
            try:
                async for line in _one(service, caller, model, index, part, template, request_id(request)):
                    found.put_nowait(line + b"\n")
            finally:
                found.put_nowait(None)

        calls = [asyncio.create_task(one(index, part)) for index, part in enumerate(parts)]
        left = len(calls)
        try:
            while left:
                line = await found.get()
                if line is None:
                    left -= 1
                else:
                    yield line
        finally:
            for call in calls:
                call.cancel()

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _for_one(params: Any, num_samples: int | None, index: int, is_own: bool) -> Any:
    """The options of one prompt of a batch; where all share a seed, it differs by the prompt, as in `sample`."""
    changes: dict[str, Any] = {} if num_samples is None else {"num_samples": num_samples}
    if params.seed is not None and not is_own:
        changes["seed"] = params.seed + index
    return replace(params, **changes) if changes else params


async def _one(service: Service, caller: Principal, model: str, index: int, part: wire.Sample, template: Any, request: str) -> AsyncIterator[bytes]:
    """The lines of one prompt."""
    counts, texts = dict[int, int](), dict[int, str]()
    writer = Writer(model, template, record_of(part.sampling_params))
    try:
        async for item in pieces(service, caller, model, part, request):
            if isinstance(item, list):
                for number, (tokens, logprobs) in enumerate(item):
                    begin = counts.get(number, 0)
                    if len(tokens) > begin:
                        text = writer.news(tokens, texts.get(number, ""))
                        counts[number], texts[number] = len(tokens), texts.get(number, "") + text
                        yield to_json({"index": index, "sequence": number, "tokens": tokens[begin:], "logprobs": logprobs[begin:], "text": text})
                continue
            response = from_json(record_json(wire.SampleResponse, item))
            sequences = response["sequences"]
            for number, each in enumerate(sequences):
                begin, sent = counts.get(number, 0), texts.get(number, "")
                rest = {"tokens": each["tokens"][begin:], "logprobs": each["logprobs"][begin:], "text": each["decoded"].removeprefix(sent)}
                if rest["tokens"] or rest["text"]:
                    yield to_json({"index": index, "sequence": number, **rest})
            yield to_json({"index": index, "response": response})
    except ApiError as error:
        yield to_json({"index": index, "error": error.detail})


_NOTHING = b'{"result":null}'
VERBS: dict[str, tuple[type[Any], Any, Callable[[Context, Any], bytes], str]] = {
    "create": (wire.CreateModel, wire.Result[None], _create, "Waits until the sampler is loaded."),
    "sample": (wire.Sample, wire.Samples, _sample, "Completions: one response for each prompt, in order."),
    "set_template": (wire.SetTemplate, wire.Result[None], _done, "Accepts the model's own template, which is always used."),
    "add_adapter_to_sampler": (wire.AddAdapterToSampler, wire.Result[None], _done, "From now on this name means these weights."),
    "apply_patch": (wire.ApplyPatch, wire.Result[None], _apply_patch, "A patch, by a name of the list (which is empty: always 422)."),
}
