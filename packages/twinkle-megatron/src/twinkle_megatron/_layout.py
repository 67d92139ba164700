"""Checks that a mesh can hold a model, before anything is built."""

import os
from collections.abc import Sequence
from typing import Any

from twinkle_mesh import DeviceMesh

from ._bridge import find_checkpoint, read_config
from ._errors import LayoutError
from ._families import moe_sizes


def check_layout(model_id: str | os.PathLike[str], mesh: DeviceMesh, layers_per_stage: Sequence[int] | None = None) -> None:
    """Check a model folder against a mesh without building anything: what MegatronModel would refuse, a driver script can know at once.

    Args:
        model_id: folder of a Hugging Face checkpoint; only its config.json is read.
        mesh: the trainer's mesh.
        layers_per_stage: as MegatronModel's.

    Raises:
        LayoutError: an axis that MegatronModel does not have, or sizes that do not divide the model's.
        ModelNotFoundError: there is no checkpoint at model_id.
        UnsupportedModelError: an architecture or an option of it that is not supported.
    """
    check_mesh(mesh)
    check_divides(read_config(find_checkpoint(os.fspath(model_id))), mesh, layers_per_stage)


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuses axes that MegatronModel does not have.

    Raises:
        LayoutError: an fsdp or Ulysses axis.
    """
    for name, size in {"fsdp_size": mesh.fsdp_size, "ulysses_size": mesh.ulysses_size, "ep_fsdp_size": mesh.ep_fsdp_size}.items():
        if size > 1:
            instead = "cp_size splits sequences" if name == "ulysses_size" else "use_distributed_optimizer=True shards the optimizer's states"
            raise LayoutError(
                f"{name}={size}: MegatronModel has no such axis. It splits by dp_size, tp_size (with sequence_parallel), pp_size, vpp_size, "
                f"cp_size, ep_size and etp_size; {instead}."
            )


def check_divides(hf_config: Any, mesh: DeviceMesh, layers_per_stage: Sequence[int] | None = None) -> None:
    """Refuses a mesh that does not divide the model's sizes, naming the size and what would divide it.

    Args:
        hf_config: the model's Hugging Face configuration.
        mesh: the trainer's mesh.
        layers_per_stage: how many layers each (virtual) stage has, in the order of the layers; None: equally many.

    Raises:
        LayoutError: attention heads, key-value heads, the MLP, the experts or the layers do not divide.
    """
    for what, size in {
        "attention heads (num_attention_heads)": hf_config.num_attention_heads,
        "key-value heads (num_key_value_heads)": hf_config.num_key_value_heads,
        "MLP features (intermediate_size)": hf_config.intermediate_size,
    }.items():
        _must_divide("tp_size", mesh.tp_size, size, what)
    _check_experts(hf_config, mesh)
    _check_stages(hf_config.num_hidden_layers, mesh, layers_per_stage)


def _check_experts(hf_config: Any, mesh: DeviceMesh) -> None:
    sizes = moe_sizes(hf_config)
    if sizes is None:
        if mesh.ep_size > 1:
            raise LayoutError(f"ep_size={mesh.ep_size}: a {hf_config.model_type!r} model has no experts to spread; leave ep_size out.")
        if mesh.etp_size != mesh.tp_size:
            raise LayoutError(f"etp_size={mesh.etp_size}: a {hf_config.model_type!r} model has no experts to split; leave etp_size out.")
        return
    _must_divide("ep_size", mesh.ep_size, sizes.num_experts, "experts")
    _must_divide("etp_size", mesh.etp_size, sizes.expert_features, "features of an expert")
    if sizes.shared_features:
        _must_divide("tp_size", mesh.tp_size, sizes.shared_features, "features of the shared experts")
    if mesh.tp_size > 1 and not mesh.sequence_parallel:
        raise LayoutError(
            f"tp_size={mesh.tp_size} with experts needs sequence_parallel=True: without it every tensor-parallel rank would send the same tokens to "
            "the experts, which megatron-core refuses in training."
        )
    if mesh.ep_size == 1 and mesh.etp_size != mesh.tp_size:
        raise LayoutError(
            f"etp_size={mesh.etp_size} differs from tp_size={mesh.tp_size} without expert parallelism: megatron-core would reduce the experts' "
            "gradients over the ranks of the dense layers. Use ep_size > 1, or leave etp_size out."
        )


def _check_stages(num_layers: int, mesh: DeviceMesh, layers_per_stage: Sequence[int] | None) -> None:
    stages = mesh.pp_size * (mesh.vpp_size or 1)
    virtual = f" x vpp_size={mesh.vpp_size}" if mesh.vpp_size else ""
    if layers_per_stage is not None:
        given = list(layers_per_stage)
        if len(given) != stages or sum(given) != num_layers or min(given) < 1:
            raise LayoutError(
                f"layers_per_stage={given}: pp_size={mesh.pp_size}{virtual} has {stages} stages and the model {num_layers} layers, so it must be "
                f"{stages} numbers of at least 1 that add up to {num_layers}, in the order of the layers."
            )
    elif stages > num_layers:
        raise LayoutError(f"pp_size={mesh.pp_size}{virtual} makes {stages} stages, and the model has {num_layers} layers (num_hidden_layers).")
    elif num_layers % stages:
        share, longer = divmod(num_layers, stages)
        # The first and last stage have the embedding and the head besides, so that the longer ones are best in the middle.
        first = (stages - longer) // 2
        example = tuple(share + (first <= stage < first + longer) for stage in range(stages))
        raise LayoutError(
            f"pp_size={mesh.pp_size}{virtual} makes {stages} stages, which do not divide the model's {num_layers} layers "
            f"(num_hidden_layers): use a number of stages among {_divisors(num_layers)}, or say how many layers each has, for example "
            f"layers_per_stage={example}."
        )


def _must_divide(name: str, parts: int, size: int, what: str) -> None:
    if size % parts:
        raise LayoutError(f"{name}={parts} does not divide the model's {size} {what}: use {_among(name)} {_divisors(size)}.")


def _among(name: str) -> str:
    return f"{'an' if name.startswith('e') else 'a'} {name} among"


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
