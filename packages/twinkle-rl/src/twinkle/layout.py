"""The groups and components of a run: who lives where."""

from __future__ import annotations

import glob
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from twinkle._errors import ConfigError
from twinkle.config import ActorConfig, GRPOConfig, RuntimeConfig, SamplerConfig, SFTConfig
from twinkle.config._common import Backend
from twinkle.run import RunFolder
from twinkle_mesh import DeviceGroup, DeviceMesh, draw_topology
from twinkle_remote import initialize

if TYPE_CHECKING:
    from twinkle_megatron import MegatronModel
    from twinkle_transformers import TransformersModel
    from twinkle_vllm import vLLMSampler

    Trainer: TypeAlias = MegatronModel | TransformersModel

ACTOR, SAMPLER = "actor", "sampler"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Device groups and meshes of a run, before anything is started."""

    groups: tuple[DeviceGroup, ...]
    backend: Backend
    actor_mesh: DeviceMesh
    sampler_mesh: DeviceMesh | None = None


def cuda_device_count() -> int:
    """CUDA devices of this machine, without importing torch (0 where there is no driver)."""
    return len(glob.glob("/dev/nvidia[0-9]*"))


def resolve_device(runtime: RuntimeConfig) -> str:
    """'cuda' or 'cpu'.

    Raises:
        ConfigError: CUDA is asked for on a machine without it.
    """
    available = cuda_device_count()
    if runtime.device == "auto":
        return "cuda" if available else "cpu"
    if runtime.device == "cuda" and not available and runtime.address is None:
        raise ConfigError(
            "--runtime.device cuda: this machine has no CUDA device; use --runtime.device cpu, or --runtime.address of a cluster that has"
        )
    return runtime.device


def plan_layout(runtime: RuntimeConfig, backend: Backend, actor: ActorConfig, sampler: SamplerConfig | None = None) -> Layout:
    """Give the actor and the sampler their own device group and mesh. On GPUs the sampler's devices follow the actor's."""
    device = resolve_device(runtime)
    sizes = {ACTOR: actor.world_size} | ({SAMPLER: sampler.dp} if sampler else {})
    groups: list[DeviceGroup] = []
    first = 0
    for name, count in sizes.items():
        ranks = count if device == "cpu" else list(range(first, first + count))
        groups.append(DeviceGroup(name=name, ranks=ranks, device_type=device))
        first += count
    actor_mesh = DeviceMesh.from_sizes(
        dp_size=actor.dp,
        fsdp_size=actor.fsdp,
        ulysses_size=actor.ulysses,
        tp_size=actor.tp,
        pp_size=actor.pp,
        vpp_size=actor.vpp,
        sequence_parallel=actor.sequence_parallel,
        device_type=device,
    )
    sampler_mesh = DeviceMesh.from_sizes(dp_size=sampler.dp, device_type=device) if sampler else None
    return Layout(groups=tuple(groups), backend=backend, actor_mesh=actor_mesh, sampler_mesh=sampler_mesh)


def draw_layout(layout: Layout, *, format: Literal["text", "svg"] = "text") -> str:
    """A drawing of the groups, their components and the data's way, as plain text or as an SVG file."""
    components: list[tuple[str, str, DeviceMesh | None]] = [
        ("MegatronModel" if layout.backend == "megatron" else "TransformersModel", ACTOR, layout.actor_mesh)
    ]
    if layout.sampler_mesh is not None:
        components.insert(0, ("vLLMSampler", SAMPLER, layout.sampler_mesh))
    return draw_topology(list(layout.groups), components, format=format)


def resolved(config: GRPOConfig | SFTConfig, folder: RunFolder, layout: Layout) -> dict[str, Any]:
    """The configuration with what was left open filled in: for `config.json`."""
    values = config.model_dump(mode="json")
    values["run_dir"] = str(folder.path)
    values["runtime"]["device"] = layout.actor_mesh.device_type
    return values


def check_trainer(model: Path, layout: Layout) -> None:
    """Refuse a model that the actor's mesh cannot hold before anything is started; raises LayoutError or UnsupportedModelError.

    TransformersModel takes any that transformers knows, and says itself what else it cannot do.
    """
    if layout.backend == "transformers":
        return
    from twinkle_megatron import check_layout

    check_layout(model, layout.actor_mesh)


def build_trainer(model: Path, layout: Layout, config: ActorConfig, seed: int) -> Trainer:
    """The trainer of the layout's backend, in the actor group."""
    if layout.backend == "transformers":
        from twinkle.model import TransformersModel as Model
    else:
        from twinkle.model import MegatronModel as Model
    return Model(str(model), device_mesh=layout.actor_mesh, mixed_precision=config.mixed_precision, remote_group=ACTOR, seed=seed)


def build_sampler(model: Path, layout: Layout, config: GRPOConfig) -> vLLMSampler:
    """A vLLMSampler in the sampler group."""
    from twinkle.sampler import vLLMSampler

    section = config.sampler
    engine_args = {
        "dtype": section.dtype,
        "max_model_len": section.max_model_len,
        "max_num_seqs": section.max_num_seqs,
        "kv_cache_memory_bytes": section.kv_cache_bytes,
        "seed": config.seed,
    }
    return vLLMSampler(str(model), engine_args=engine_args, device_mesh=layout.sampler_mesh, remote_group=SAMPLER)


def build_together(*builders: Callable[[], Any]) -> list[Any]:
    """Run functions that build components on Ray at the same time: each one's engine takes seconds to import, on its own workers.

    Returns:
        what they returned, in their order.

    Raises:
        BaseException: the first failure, or Ctrl-C, at once. The others are left waiting for workers that end with the runtime.
    """
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def build(number: int, builder: Callable[[], Any]) -> None:
        try:
            done.put((number, builder(), None))
        except BaseException as error:
            done.put((number, None, error))

    for number, builder in enumerate(builders):
        threading.Thread(target=build, args=(number, builder), name=f"build {number}", daemon=True).start()
    built: dict[int, Any] = {}
    while len(built) < len(builders):
        number, value, error = done.get()  # Ctrl-C ends this wait; every builder has deadlines of its own
        if error is not None:
            raise error
        built[number] = value
    return [built[number] for number in range(len(builders))]


@contextmanager
def running(runtime: RuntimeConfig, layout: Layout) -> Iterator[None]:
    """The runtime that the configuration asks for; everything that was started ends with the block."""
    with initialize(
        runtime.mode,
        groups=list(layout.groups),
        start_timeout_s=runtime.start_timeout_s,
        call_timeout_s=runtime.call_timeout_s,
        threads_per_worker=runtime.threads_per_worker,
        address=runtime.address,
        trace=runtime.trace,
    ):
        yield
