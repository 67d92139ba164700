"""A sampler with many checkpoints' adapters, some of them loaded. Used from its queue's threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from twinkle_remote import LazyResult

from .._config import ModelConfig, SamplerConfig
from .._errors import Unavailable
from .._folders import Folders
from ..store import Checkpoint
from ._build import build_sampler


class SamplerBackend:
    """The sampler beside a base model. At most `max_loras` adapters are loaded; the one that was idle for longest makes way."""

    def __init__(self, model: ModelConfig, config: SamplerConfig, folders: Folders, build: Callable[..., Any] = build_sampler) -> None:
        self.model = model
        self.config = config
        self._folders = folders
        self._build = build
        self._sampler: Any = None
        self._loaded: OrderedDict[str, int] = OrderedDict()  # by folder: calls that use it
        self._changed = threading.Condition()
        self.error: Exception | None = None

    def start(self) -> None:
        """Loads the model."""
        try:
            self._sampler = self._build(self.model, self.config)
        except Exception as error:  # kept for who asks for the model, whatever the engine failed with
            self.error = error
            raise

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded."""
        return self._sampler is not None

    def admits(self) -> bool:
        """Whether calls can run, or fail with the reason why they cannot."""
        return self.is_ready or self.error is not None

    def sample(
        self, inputs: Sequence[Any], sampling_params: Any = None, num_samples: int | None = None, checkpoint: Checkpoint | None = None
    ) -> list[Any]:
        """One `twinkle_data.SampleResponse` for each prompt: see `vLLMSampler.sample`. checkpoint: whose adapter is used; None: the base model."""
        if self._sampler is None:
            raise Unavailable(f"the sampler of {self.model.name} could not be loaded; the server's log says why")
        adapter = "" if checkpoint is None else self._hold(checkpoint)
        try:
            responses = self._sampler.sample(list(inputs), sampling_params, num_samples, adapter)
            return list(responses.get() if isinstance(responses, LazyResult) else responses)
        finally:
            if adapter:
                self._let_go(adapter)

    def forget(self, folder: str) -> None:
        """Unloads the adapter of a checkpoint that is deleted, unless it is in use."""
        with self._changed:
            if self._loaded.get(folder) == 0:
                del self._loaded[folder]
                self._sampler.unload_adapter(folder)

    def close(self) -> None:
        """Lets go of the model."""
        self._sampler = None

    def _hold(self, checkpoint: Checkpoint) -> str:
        folder = checkpoint.folder
        with self._changed:
            while folder not in self._loaded and len(self._loaded) >= self.config.max_loras:
                idle = next((name for name, uses in self._loaded.items() if uses == 0), None)
                if idle is None:
                    self._changed.wait(1.0)
                    continue
                del self._loaded[idle]
                self._sampler.unload_adapter(idle)
            if folder not in self._loaded:
                path = self._folders.verify(folder, checkpoint.digest) / "adapter"
                self._sampler.load_adapter(folder, str(path))
                self._loaded[folder] = 0
            self._loaded[folder] += 1
            self._loaded.move_to_end(folder)
        return folder

    def _let_go(self, folder: str) -> None:
        with self._changed:
            self._loaded[folder] -= 1
            self._changed.notify_all()
