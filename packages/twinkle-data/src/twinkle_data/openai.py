"""OpenAI's completions (https://platform.openai.com/docs/api-reference) as samples, for the endpoints of samplers and of the service."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._errors import FormatError

if TYPE_CHECKING:
    from ._sampling import SampledSequence, SampleResponse, SamplingParams
    from ._template import Template


class Writer:
    """Turns responses into OpenAI's JSON.

    model: as the request named it. template: of the sampler; it turns tokens into text. params: how was sampled.
    """

    kind = ""
    prefix = ""

    def __init__(self, model: str, template: Template, params: SamplingParams) -> None:
        self.template, self.params = template, params
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, responses: Sequence[SampleResponse]) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices = [
            {**self.choice(sequence), "index": index, **_extra(sequence), "prompt_token_ids": response.prompt_token_ids}
            for index, (response, sequence) in enumerate((response, sequence) for response in responses for sequence in response.sequences)
        ]
        return {
            **self.head,
            "object": self.kind,
            "choices": choices,
            "usage": self.usage(responses),
            "prompt_token_ids": responses[0].prompt_token_ids,
        }

    def usage(self, responses: Sequence[SampleResponse]) -> dict[str, int]:
        """How many tokens there were."""
        prompt = sum(len(response.prompt_token_ids) for response in responses)
        completion = sum(len(sequence.tokens) for response in responses for sequence in response.sequences)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def usage_chunk(self, responses: Sequence[SampleResponse]) -> dict[str, Any]:
        """What ends a stream where `stream_options.include_usage` asks for it."""
        return {**self.chunk(""), "choices": [], "usage": self.usage(responses)}

    def choice(self, sequence: SampledSequence) -> dict[str, Any]:
        """A finished choice."""
        raise NotImplementedError

    def piece(self, text: str, reason: str | None) -> dict[str, Any]:
        """A part of one."""
        raise NotImplementedError

    def chunk(self, text: str, sequence: SampledSequence | None = None, index: int = 0) -> dict[str, Any]:
        """A part of a stream; a choice's last one has the sequence."""
        choice = self.piece(text, None if sequence is None else _reason(sequence))
        if sequence is not None:
            choice |= _extra(sequence) | {"logprobs": self.choice(sequence)["logprobs"]}
        return {**self.head, "object": self.kind + (".chunk" if self.kind == "chat.completion" else ""), "choices": [{"index": index, **choice}]}

    def text(self, sequence: SampledSequence) -> str:
        """Without the stop text."""
        return _without_stop(sequence.decoded, self.params.stop)

    def news(self, tokens: Sequence[int], sent: str) -> str:
        """The text that tokens so far add to what was sent; what could still become part of a stop text or of a character is held back."""
        longest = max((len(text) for text in self.params.stop), default=0)
        text = str(self.template.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)).rstrip("\ufffd")
        text = text[: max(0, len(text) - longest)]
        return text[len(sent) :] if len(text) > len(sent) and text.startswith(sent) else ""

    def token(self, token: int) -> str:
        """A token's text."""
        return self.template.decode([token])


class ChatWriter(Writer):
    """Of chat completions."""

    kind = "chat.completion"
    prefix = "chatcmpl"

    def choice(self, sequence: SampledSequence) -> dict[str, Any]:
        content = None
        if self.params.logprobs:
            content = []
            for place, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
                top = [self._entry(other, value) for other, value in sequence.top_logprobs[place].items()] if sequence.top_logprobs else []
                content.append({**self._entry(token, logprob), "top_logprobs": top})
        message = {"role": "assistant", "content": self.text(sequence)}
        return {"message": message, "finish_reason": _reason(sequence), "logprobs": None if content is None else {"content": content}}

    def piece(self, text: str, reason: str | None) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text}, "finish_reason": reason}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class TextWriter(Writer):
    """Of text completions."""

    kind = "text_completion"
    prefix = "cmpl"

    def choice(self, sequence: SampledSequence) -> dict[str, Any]:
        logprobs = None
        if self.params.logprobs:
            texts = [self.token(token) for token in sequence.tokens]
            logprobs = {
                "tokens": texts,
                "token_logprobs": sequence.logprobs,
                "top_logprobs": [{self.token(other): value for other, value in top.items()} for top in sequence.top_logprobs],
                "text_offset": [sum(map(len, texts[:place])) for place in range(len(texts))],
            }
        return {"text": self.text(sequence), "finish_reason": _reason(sequence), "logprobs": logprobs}

    def piece(self, text: str, reason: str | None) -> dict[str, Any]:
        return {"text": text, "finish_reason": reason, "logprobs": None}


def message_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content that comes in parts becomes one text; parts that are no text are an error."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise FormatError("messages may hold text only")
        content = "".join(part["text"] for part in content)
    return {**message, "content": content or ""}


def structure_of(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    kind = (response_format or {}).get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema" and response_format is not None:
        return {"json": response_format["json_schema"]["schema"]}
    raise FormatError(f"response_format of type {kind!r}: it may be text, json_object or json_schema")


def _reason(sequence: SampledSequence) -> str:
    return "stop" if sequence.stop_reason == "stop" else "length"


def _extra(sequence: SampledSequence) -> dict[str, Any]:
    return {"token_ids": sequence.tokens, "weight_versions": sequence.weight_versions}


def _without_stop(text: str, stop: Sequence[str]) -> str:
    ends = [place for one in stop if (place := text.find(one)) >= 0]
    return text[: min(ends)] if ends else text
