"""A sampler with many checkpoints' adapters, some of them loaded. Used from its queue's threads."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from twinkle_remote import LazyResult

from .._config import ModelConfig, SamplerConfig
from .._errors import Unavailable
from .._folders import Folders
from ..store import Checkpoint
from ._build import build_sampler
from ._trainer import DEAD

logger = logging.getLogger(__name__)

_PEEK_S = 0.02


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
        with self._using(checkpoint) as (sampler, adapter):
            responses = sampler.sample(list(inputs), sampling_params, num_samples, adapter)
            return list(responses.get() if isinstance(responses, LazyResult) else responses)

    def stream(self, prompt: Any, params: Any, checkpoint: Checkpoint | None, tell: Callable[[list[Any]], bool]) -> Any:
        """As `sample` for one prompt.

        tell: called with the tokens and log-probabilities so far of each completion (vLLM: of the first, without log-probabilities; with several
        completions not at all) whenever there are more; False: nobody wants the rest, and None is returned.
        """
        with self._using(checkpoint) as (sampler, adapter):
            if hasattr(sampler, "stream"):
                for item in sampler.stream(prompt, params, adapter):
                    if not isinstance(item, list):
                        return item
                    if not tell(item):
                        return None
            if params.num_samples > 1:
                return sampler.sample([prompt], params, None, adapter)[0]
            names = sampler.submit([prompt], params, None, adapter)
            while not (done := sampler.collect(names, _PEEK_S)):
                told = [(tokens, []) for _, tokens in sampler.peek(names)]
                if told and not tell(told):
                    sampler.abort(names)
            return done[0][1]

    @contextmanager
    def _using(self, checkpoint: Checkpoint | None) -> Iterator[tuple[Any, str]]:
        sampler = self._sampler
        if sampler is None:
            raise Unavailable(f"the sampler of {self.model.name} could not be loaded; the server's log says why")
        adapter = ""
        try:
            adapter = "" if checkpoint is None else self._hold(checkpoint)
            yield sampler, adapter
        except Exception as error:  # by name: the layer that lost the workers may be any of the engines'
            if DEAD & {base.__name__ for base in type(error).__mro__}:
                self._start_again(sampler)
            raise
        finally:
            if adapter:
                self._let_go(adapter)

    @cached_property
    def template(self) -> Any:
        """The model's own chat template (`twinkle_data.Template`), to turn tokens into text. Blocks when it is loaded."""
        from twinkle_data import Template

        return Template(Path(self.config.path or self.model.path))

    def forget(self, folder: str) -> None:
        """Unloads the adapter of a checkpoint that is deleted, unless it is in use."""
        with self._changed:
            if self._loaded.get(folder) == 0:
                del self._loaded[folder]
                self._sampler.unload_adapter(folder)

    def close(self) -> None:
        """Lets go of the model."""
        self._sampler = None

    def _start_again(self, lost: Any) -> None:
        """After the workers were lost: a new sampler, without adapters. Of calls that lost the same one, the first does it."""
        with self._changed:
            if self._sampler is not lost:
                return
            logger.error("the workers of the sampler of %s were lost; it is loaded again", self.model.name)
            self._sampler = None
            self._loaded.clear()
            self._changed.notify_all()
            self.start()

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
            if folder in self._loaded:  # not where the sampler was loaded anew meanwhile
                self._loaded[folder] -= 1
            self._changed.notify_all()
