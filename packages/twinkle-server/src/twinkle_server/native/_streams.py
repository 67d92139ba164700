"""Samples as they come: a call in the sampler's queue that tells of its tokens while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from twinkle_client import types as wire

from .._errors import Conflict, NotFound
from .._keys import Principal
from .._service import Service, sampler_queue
from ..engine import Context, Reply, reply_of
from ..engine._sampler import SamplerBackend
from ._convert import record_of
from ._models import find_weights

KIND = "native.sampler.stream"


@dataclass
class Streamed:
    """A prompt, and who is told: `news` is called in the sampler's thread with what `SamplerBackend.stream` tells, last with the response."""

    body: wire.Sample
    news: Callable[[Any], object]
    is_wanted: bool = True

    def tell(self, item: Any) -> bool:
        """Tells it; whether more is wanted."""
        if self.is_wanted:
            self.news(item)
        return self.is_wanted


def register_streams(service: Service) -> None:
    """Says how such calls run. They are not stored: what was told cannot be told again."""
    service.calls.register(KIND, decode=_no_payload, run=_run)


def backend_of(service: Service, model: str) -> SamplerBackend:
    """The sampler beside a model; NotFound without one."""
    if model not in service.samplers:
        raise NotFound(f"there is no sampler of {model[:200]!r}")
    return service.samplers[model]


async def pieces(service: Service, caller: Principal, model: str, body: wire.Sample, request: str) -> AsyncIterator[Any]:
    """What comes of a body with one prompt: lists with the tokens and log-probabilities so far of each completion, and last its response.

    Raises the call's error. Who stops listening ends the call.
    """
    news: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    value = Streamed(body, lambda item: loop.call_soon_threadsafe(news.put_nowait, item))
    payload = body.model_dump_json(exclude_unset=True).encode()
    future = await service.calls.submit(caller, KIND, payload, queue=sampler_queue(model), value=value, request_id=request, durable=False)
    ended = asyncio.create_task(service.calls.wait(caller, future.id, service.config.limits.call_s))
    ended.add_done_callback(lambda _: news.put_nowait(None))
    try:
        while (item := await news.get()) is not None:
            while isinstance(item, list) and not news.empty():  # who reads slowly gets more at once
                following = news.get_nowait()
                if not isinstance(following, list):
                    yield item
                item = following
            if item is None:
                break
            yield item
        reply_of(await ended)
    finally:
        value.is_wanted = False
        ended.cancel()


def _run(context: Context, value: Streamed) -> Reply:
    body, checkpoint = value.body, None
    if body.adapter_path is not None:
        checkpoint, _ = find_weights(context.service, context.tenant, body.adapter_path, None)
    params = record_of(body.sampling_params)
    response = context.the_sampler().stream(record_of(body.inputs[0]), params, checkpoint, value.tell)
    if response is not None:
        value.tell(response)
    return Reply(body=b"")


def _no_payload(payload: bytes) -> Any:
    raise Conflict("a stream ends with its connection")
