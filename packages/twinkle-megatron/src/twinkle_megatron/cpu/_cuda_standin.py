"""What a rewritten module of megatron-core sees instead of ``torch.cuda``.

One stream, no events, the CPU's generator. Names not listed fall through to the real ``torch.cuda`` (most of them are only looked up
in code that does not run without a GPU), so nothing is hidden by accident.
"""

import contextlib
import types
from typing import Any

import torch

_CPU = torch.device("cpu")


class CpuEvent:
    """An event that has always happened: work on a CPU is done when the call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    def record(self, *args: object) -> None:
        """Does nothing."""

    def wait(self, *args: object) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """True: the work is done."""
        return True


class CpuStream:
    """The one stream of a CPU: everything on it is already in order."""

    _only: "CpuStream | None" = None

    def __new__(cls, *args: object, **kwargs: object) -> "CpuStream":
        del args, kwargs
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def wait_stream(self, *args: object) -> None:
        """Does nothing."""

    def wait_event(self, *args: object) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def record_event(self, *args: object) -> CpuEvent:
        """An event that has happened."""
        del args
        return CpuEvent()


class _CudaStandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _nothing(*args: object, **kwargs: object) -> None:
    del args, kwargs


def build() -> types.ModuleType:
    """The stand-in module."""
    standin = _CudaStandIn("torch.cuda (twinkle_megatron's stand-in on a CPU)")
    replaced: dict[str, object] = {
        "is_available": lambda: False,
        "device_count": lambda: 0,
        "current_device": lambda: _CPU,
        "set_device": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "Stream": CpuStream,
        "Event": CpuEvent,
        "current_stream": lambda *args: CpuStream(),
        "default_stream": lambda *args: CpuStream(),
        "set_stream": _nothing,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "random": types.SimpleNamespace(get_rng_state=lambda *args, **kwargs: torch.get_rng_state()),
        "FloatTensor": torch.FloatTensor,
        "HalfTensor": torch.HalfTensor,
        "BFloat16Tensor": torch.BFloat16Tensor,
        "nvtx": types.SimpleNamespace(range_push=_nothing, range_pop=_nothing),
    }
    for name, value in replaced.items():
        setattr(standin, name, value)
    return standin
