"""The trainer's present weights for the sampler, under the local name."""

from __future__ import annotations

from typing import Literal

from ._errors import NotFound
from .model import Model
from .sampler import Sampler


class CheckpointEngineManager:
    """Keeps a sampler's copy of an adapter current: each `sync_weights` saves it, names it to the sampler, and deletes the copy before.

    The name and the call are those of twinkle-sync; between processes of the server nothing passes through this one.
    """

    def __init__(self, *, model: Model, sampler: Sampler) -> None:
        self.model, self.sampler = model, sampler
        self._last: dict[str, str] = {}

    def sync_weights(self, mode: Literal["lora"] = "lora", *, adapter_name: str) -> str:
        """Sample with the adapter's present weights from now on, as `adapter_name`. Returns their twinkle:// URI."""
        del mode  # of the local manager's; a server trains adapters only
        saved = self.model.save(adapter_name=adapter_name, checkpoint_type="sampler_weights")
        self.sampler.add_adapter_to_sampler(adapter_name, saved.twinkle_path)
        before = self._last.get(adapter_name)
        self._last[adapter_name] = saved.twinkle_path
        if before is not None:
            self._forget(before)
        return saved.twinkle_path

    def _forget(self, path: str) -> None:
        from ._resources import parse_twinkle_path

        parts = parse_twinkle_path(path)
        try:
            self.model.client.delete_checkpoint(parts.run_id, parts.checkpoint_id)
        except NotFound:  # deleted by someone else, or by the server's retention
            return
