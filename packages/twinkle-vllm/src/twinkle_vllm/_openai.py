"""An OpenAI-compatible endpoint over a pool of samplers (https://platform.openai.com/docs/api-reference)."""

import hmac
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from twinkle_data import DataError, SampleResponse, SamplingParams, Template
from twinkle_data.openai import ChatWriter, TextWriter, Writer

from ._errors import AdapterNotLoaded, EngineMissing, PromptError, SamplerError, SamplingOptionError
from ._pool import SamplerPool

if TYPE_CHECKING:
    from fastapi import FastAPI


def openai_app(
    pool: SamplerPool, template: Template, *, model_name: str = "policy", adapters: Sequence[str] = (), api_key: str | None = None
) -> "FastAPI":
    """The ASGI application; `OpenAIServer` runs it.

    Args:
        pool: answers the requests.
        template: of the samplers; here it turns tokens into text.
        model_name: what requests name the model itself.
        adapters: names of adapters that requests may name instead.
        api_key: what clients have to send; None: nothing.

    Responses hold, beside OpenAI's fields, `prompt_token_ids`, and in each choice `token_ids` and `weight_versions`, so that a client can train
    on exactly the tokens that were sampled. A field that this server does not know is an error.
    """
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse, StreamingResponse
        from pydantic import ValidationError
    except ModuleNotFoundError as error:
        raise EngineMissing("the OpenAI-compatible endpoint needs FastAPI: pip install 'twinkle-vllm[server]'") from error
    from ._openai_requests import ChatBody, CompletionBody

    app = FastAPI(title="Twinkle sampler", openapi_url=None)
    created = int(time.time())

    @app.middleware("http")
    async def check_key(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
            return JSONResponse(_error("the API key is missing or wrong", "authentication_error"), 401)
        return await call_next(request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        data = [{"id": name, "object": "model", "created": created, "owned_by": "twinkle"} for name in (model_name, *adapters)]
        return {"object": "list", "data": data}

    async def answer(request: Request, kind: type[ChatBody] | type[CompletionBody], shape: type[ChatWriter] | type[TextWriter]) -> Any:
        try:
            body = kind.model_validate_json(await request.body())
            adapter = "" if body.model == model_name else body.model
            if adapter and adapter not in adapters:
                raise AdapterNotLoaded(f"there is no model {body.model!r}; there are {[model_name, *adapters]}")
            writer = shape(body.model, template, body.params())
            prompts = body.prompts()
            if body.stream:
                if len(prompts) != 1:
                    raise SamplingOptionError("stream=true takes one prompt")
                with_usage = bool((body.stream_options or {}).get("include_usage"))
                first, chunks = await _first_chunk(_stream(pool, prompts[0], writer, adapter, with_usage))
                return StreamingResponse(_events(first, chunks), media_type="text/event-stream")
            responses = await _gathered(pool, prompts, writer.params, adapter)
            return JSONResponse(writer.whole([response.raise_for_error() for response in responses]))
        except ValidationError as error:
            first_error = error.errors()[0]
            where = ".".join(map(str, first_error["loc"]))
            return JSONResponse(_error(f"{where}: {first_error['msg']}", "invalid_request_error"), 400)
        except AdapterNotLoaded as error:
            return JSONResponse(_error(str(error), "not_found_error"), 404)
        except (DataError, SamplingOptionError, PromptError, KeyError, ValueError) as error:
            return JSONResponse(_error(str(error), "invalid_request_error"), 400)
        except Exception as error:  # a process edge: whatever else a sampler answers with
            return JSONResponse(_error(f"{type(error).__name__}: {error}", "server_error"), 503)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        return await answer(request, ChatBody, ChatWriter)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Any:
        return await answer(request, CompletionBody, TextWriter)

    return app


class OpenAIServer:
    """Runs `openai_app` in a thread: `with OpenAIServer(pool, template) as server: openai.OpenAI(base_url=server.base_url, api_key="none")`.

    Arguments as of `openai_app`; host: where it listens; start_timeout_s: for the server to come up.
    """

    def __init__(
        self,
        pool: SamplerPool,
        template: Template,
        *,
        model_name: str = "policy",
        adapters: Sequence[str] = (),
        api_key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        start_timeout_s: float = 30.0,
    ) -> None:
        app = openai_app(pool, template, model_name=model_name, adapters=adapters, api_key=api_key)
        import uvicorn

        self._socket = socket.create_server((host, port))
        self._server: Any = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, name="twinkle-openai", daemon=True)
        self._thread.start()
        end = time.monotonic() + start_timeout_s
        while not self._server.started:
            if time.monotonic() > end or not self._thread.is_alive():
                raise SamplerError(f"the endpoint did not start within {start_timeout_s:g} s")
            time.sleep(0.01)
        self.base_url = f"http://{host}:{self._socket.getsockname()[1]}/v1"

    def close(self) -> None:
        """Stop; requests that are under way are cut off, and aborted."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        self._socket.close()

    def __enter__(self) -> "OpenAIServer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


async def _gathered(pool: SamplerPool, prompts: list[Any], params: SamplingParams, adapter: str) -> list[SampleResponse]:
    found: dict[int, SampleResponse] = {}
    async for index, response in pool.sample_async(prompts, params, adapter_name=adapter):
        found[index] = response
    return [found[index] for index in range(len(prompts))]


async def _stream(pool: SamplerPool, prompt: Any, writer: Writer, adapter: str, with_usage: bool) -> AsyncIterator[dict[str, Any]]:
    """Chunks of text as it comes; what could still become part of a stop text or of a character is held back."""
    sent = ""
    async for tokens, response in pool.stream(prompt, writer.params, adapter_name=adapter):
        if response is None:
            if text := writer.news(tokens, sent):
                yield writer.chunk(text)
                sent += text
            continue
        sequence = response.raise_for_error().sequences[0]
        yield writer.chunk(writer.text(sequence)[len(sent) :], sequence) | {"prompt_token_ids": response.prompt_token_ids}
        if with_usage:
            yield writer.usage_chunk([response])


async def _first_chunk(chunks: AsyncIterator[dict[str, Any]]) -> tuple[dict[str, Any], AsyncIterator[dict[str, Any]]]:
    """Wait for the first, so that an error is still one of HTTP."""
    return await anext(chunks), chunks


async def _events(first: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    yield f"data: {json.dumps(first)}\n\n"
    try:
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
    except SamplerError as error:
        yield f"data: {json.dumps(_error(str(error), 'server_error'))}\n\n"
    yield "data: [DONE]\n\n"


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
