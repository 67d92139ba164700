"""The bodies of OpenAI's completion requests, and what they mean to a sampler."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from twinkle_data import SamplingParams
from twinkle_data.openai import message_of, structure_of

from ._errors import SamplingOptionError


class _Body(BaseModel):
    """What both kinds share. An unknown field is an error: nothing is dropped."""

    model_config = ConfigDict(extra="forbid")

    model: str
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    logit_bias: dict[int, float] | None = None
    user: str | None = None
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    # Not OpenAI's; vLLM's server has them under these names.
    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    return_token_ids: bool = True

    def _params(self, max_tokens: int | None, top_logprobs: int | None, structure: Mapping[str, Any] | None) -> dict[str, Any]:
        if self.stream and self.n != 1:
            raise SamplingOptionError("stream=true gives one choice: leave n at 1")
        return {
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "min_tokens": self.min_tokens,
            "seed": self.seed,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or [],
            "stop_token_ids": self.stop_token_ids,
            "num_samples": self.n,
            "logit_bias": self.logit_bias or {},
            "logprobs": top_logprobs is not None,
            "top_logprobs": top_logprobs or 0,
            "structured_output": structure,
        }


class CompletionBody(_Body):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] = False
    suffix: None = None

    def prompts(self) -> list[Any]:
        """One entry a prompt."""
        if not self.prompt:
            raise SamplingOptionError("prompt is empty")
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def params(self) -> SamplingParams:
        """How to sample. Raises FormatError, SamplingOptionError."""
        return SamplingParams(**self._params(self.max_tokens, self.logprobs, None))


class ChatBody(_Body):
    """`POST /v1/chat/completions`."""

    messages: Sequence[Mapping[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None

    def prompts(self) -> list[Any]:
        """The conversation."""
        return [{"messages": [message_of(message) for message in self.messages], "tools": self.tools}]

    def params(self) -> SamplingParams:
        """How to sample. Raises FormatError, SamplingOptionError."""
        if self.top_logprobs and not self.logprobs:
            raise SamplingOptionError("top_logprobs needs logprobs=true")
        asked = (self.top_logprobs or 0) if self.logprobs else None
        return SamplingParams(**self._params(self.max_completion_tokens or self.max_tokens, asked, structure_of(self.response_format)))
