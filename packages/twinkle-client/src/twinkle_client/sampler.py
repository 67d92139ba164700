"""Samplers on a server: `from twinkle_client.sampler import vLLMSampler`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ._client import TwinkleClient
from ._registry import latest_client

if TYPE_CHECKING:
    from ._formats import SampleResponse
    from ._verbs import SampleChunk

    # InputFeature and Trajectory, messages, texts, token ids; records of this package, or of twinkle-data (which is not known here).
    Prompts = Sequence[Any]
    Params = Any


class Sampler:
    """A handle of a sampler beside a base model.

    Args:
        name: of the base model on the server.
        client: None: the latest that is open.

    Raises:
        NotFound: the server has no sampler of that model. ConfigError: there is no client.
    """

    def __init__(self, name: str | os.PathLike[str], *, client: TwinkleClient | None = None) -> None:
        from ._verb_calls import SamplerCalls

        self.name = os.fspath(name)
        self.client = client if client is not None else latest_client()
        self._calls, self._run = SamplerCalls(self.name), self.client.connection.run
        self._run(self._calls.create())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self.client!r}>"

    def sample(
        self,
        inputs: Prompts,
        sampling_params: Params = None,
        num_samples: int | None = None,
        adapter_name: str = "",
        *,
        adapter_path: str | None = None,
    ) -> list[SampleResponse]:
        """Sample completions for a batch of prompts, and wait for all of them: one response for each, in order.

        inputs: each an InputFeature, a Trajectory, messages, a text or token ids. sampling_params: for all, or a list with one for each.
        num_samples: in place of `sampling_params.num_samples`. adapter_name: one that `add_adapter_to_sampler` named; '' is the base model.
        adapter_path: a twinkle:// URI of weights to sample with, instead.

        What is wrong with one prompt is its response's `error`; `response.raise_for_error()` raises it.
        """
        return self._run(self._calls.sample(inputs, sampling_params, num_samples, adapter_name, adapter_path)).samples

    def sample_stream(
        self,
        inputs: Prompts,
        sampling_params: Params = None,
        num_samples: int | None = None,
        adapter_name: str = "",
        *,
        adapter_path: str | None = None,
    ) -> Iterator[SampleChunk]:
        """The same as it comes: tokens and text of each prompt, and at its end its whole response. A broken stream raises Unreachable."""
        return self.client.connection.lines(self._calls.sample_stream(inputs, sampling_params, num_samples, adapter_name, adapter_path))

    def set_template(self, template: Any, **options: Any) -> None:
        """The chat template by which conversations are encoded: the base model's name, or a `Template` handle."""
        self._run(self._calls.set_template(template, options))

    def add_adapter_to_sampler(self, adapter_name: str, path: str) -> None:
        """From now on that name means these weights, a twinkle:// URI of 'sampler_weights' or 'weights'. Raises NotFound."""
        self._run(self._calls.add_adapter_to_sampler(adapter_name, path))

    def apply_patch(self, patch: str, **options: Any) -> None:
        """A patch by its name; the options are its own."""
        self._run(self._calls.apply_patch(patch, options))


# The server's configuration says which engine samples; a script keeps the name that it has.
vLLMSampler = Sampler
