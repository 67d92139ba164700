"""`remote_group` and `device_mesh` among the arguments of a constructor."""

import inspect
from collections.abc import Callable
from typing import Any

from twinkle_mesh import DeviceMesh
from twinkle_remote._errors import RemoteTypeError


def read_placement(init: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | None, DeviceMesh | None]:
    """The group's name and the mesh that a constructor was called with. Raises RemoteTypeError for other types."""
    group_name: Any = _value_of("remote_group", init, args, kwargs)
    if group_name is not None and not isinstance(group_name, str):
        raise RemoteTypeError(f"remote_group is the name of a device group, not {type(group_name).__name__}")
    mesh: Any = _value_of("device_mesh", init, args, kwargs)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise RemoteTypeError(f"device_mesh is a twinkle_mesh.DeviceMesh, not {type(mesh).__name__}")
    return group_name, mesh


def place_arguments(
    init: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that `init` gets: `remote_group` only if it names it, the mesh if it accepts it."""
    parameters = _parameters(init)
    rest = {name: value for name, value in kwargs.items() if name not in ("remote_group", "device_mesh")}
    index = _position(init, "remote_group")
    if "remote_group" in parameters and "remote_group" in kwargs and (index is None or index >= len(args)):
        rest["remote_group"] = kwargs["remote_group"]
    index = _position(init, "device_mesh")
    if index is not None and index < len(args):
        return (*args[:index], mesh, *args[index + 1 :]), rest
    if "device_mesh" in parameters or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        rest["device_mesh"] = mesh
    return args, rest


def _parameters(init: Callable[..., None]) -> dict[str, inspect.Parameter]:
    if init is object.__init__:  # its signature says (*args, **kwargs), but it takes none
        return {}
    parameters = list(inspect.signature(init).parameters.items())
    return dict(parameters[1:])


def _value_of(wanted: str, init: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An argument by name or, where `init` names it, by position."""
    value = kwargs.get(wanted)
    if value is None and (index := _position(init, wanted)) is not None and index < len(args):
        value = args[index]
    return value


def _position(init: Callable[..., None], wanted: str) -> int | None:
    for index, (name, parameter) in enumerate(_parameters(init).items()):
        if name == wanted:
            return index if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else None
    return None
