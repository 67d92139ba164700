"""Checks that a mesh can hold a model, before anything is built."""

import os
from typing import Any

from twinkle_mesh import DeviceMesh

from ._bridge import find_checkpoint, read_config
from ._errors import LayoutError


def check_layout(model_id: str | os.PathLike[str], mesh: DeviceMesh) -> None:
    """Check a model folder against a mesh without building anything: what MegatronModel would refuse, a driver script can know at once.

    Args:
        model_id: folder of a Hugging Face checkpoint; only its config.json is read.
        mesh: the trainer's mesh.

    Raises:
        LayoutError: an axis that MegatronModel does not have, or sizes that do not divide the model's.
        ModelNotFoundError: there is no checkpoint at model_id.
        UnsupportedModelError: an architecture or an option of it that is not supported.
    """
    check_mesh(mesh)
    check_divides(read_config(find_checkpoint(os.fspath(model_id))), mesh)


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuses axes that MegatronModel does not have.

    Raises:
        LayoutError: an fsdp or Ulysses axis, or one that is not supported yet.
    """
    elsewhere = {"fsdp_size": mesh.fsdp_size, "ulysses_size": mesh.ulysses_size, "ep_fsdp_size": mesh.ep_fsdp_size}
    for name, size in elsewhere.items():
        if size > 1:
            raise LayoutError(f"{name}={size}: MegatronModel has no such axis. It splits by dp_size, tp_size, pp_size and vpp_size.")
    for name, size in {"cp_size": mesh.cp_size, "ep_size": mesh.ep_size}.items():
        if size > 1:
            raise LayoutError(
                f"{name}={size} is not supported by MegatronModel in this version: use dp_size, tp_size (with sequence_parallel) or pp_size."
            )


def check_divides(hf_config: Any, mesh: DeviceMesh) -> None:
    """Refuses a mesh that does not divide the model's sizes, naming the size and what would divide it.

    Args:
        hf_config: the model's Hugging Face configuration.
        mesh: the trainer's mesh.

    Raises:
        LayoutError: attention heads, key-value heads, the MLP or the layers do not divide.
    """
    tp = mesh.tp_size
    for what, size in {
        "attention heads (num_attention_heads)": hf_config.num_attention_heads,
        "key-value heads (num_key_value_heads)": hf_config.num_key_value_heads,
        "MLP features (intermediate_size)": hf_config.intermediate_size,
    }.items():
        if size % tp:
            raise LayoutError(f"tp_size={tp} does not divide the model's {size} {what}: use a tp_size among {_divisors(size)}.")
    stages = mesh.pp_size * (mesh.vpp_size or 1)
    layers = hf_config.num_hidden_layers
    if layers % stages:
        virtual = f" x vpp_size={mesh.vpp_size}" if mesh.vpp_size else ""
        raise LayoutError(
            f"pp_size={mesh.pp_size}{virtual} makes {stages} stages, which do not divide the model's {layers} layers "
            f"(num_hidden_layers): use a number of stages among {_divisors(layers)}."
        )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
