"""`remote_group`, `device_mesh`, `on_failure` and `max_restarts` among the arguments of a constructor."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from twinkle_mesh import DeviceMesh
from twinkle_remote._arguments import signature_of
from twinkle_remote._errors import RemoteTypeError

OnFailure = Literal["raise", "restart"]
_OURS = ("remote_group", "device_mesh", "on_failure", "max_restarts")


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What becomes of a component whose workers were lost; see `remote_class`. Raises RemoteTypeError for unknown values."""

    on_failure: OnFailure = "raise"
    max_restarts: int = 3

    def __post_init__(self) -> None:
        if self.on_failure not in get_args(OnFailure):
            raise RemoteTypeError(f"on_failure={self.on_failure!r} is not known; known are 'raise' and 'restart'")
        if type(self.max_restarts) is not int or self.max_restarts < 0:
            raise RemoteTypeError(f"max_restarts={self.max_restarts!r}: it is an int of at least 0")


def read_policy(init: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any], default: FailurePolicy) -> FailurePolicy:
    """What a constructor was told about failures, or what its class says. Raises RemoteTypeError for unknown values."""
    on_failure: Any = _value_of("on_failure", init, args, kwargs)
    max_restarts: Any = _value_of("max_restarts", init, args, kwargs)
    return FailurePolicy(default.on_failure if on_failure is None else on_failure, default.max_restarts if max_restarts is None else max_restarts)


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
    """The arguments that `init` gets: `remote_group` and its kin only if it names them, the mesh if it accepts it."""
    parameters = _parameters(init)
    rest = {name: value for name, value in kwargs.items() if name not in _OURS}
    for name in _OURS:
        index = _position(init, name)
        if name != "device_mesh" and name in parameters and name in kwargs and (index is None or index >= len(args)):
            rest[name] = kwargs[name]
    index = _position(init, "device_mesh")
    if index is not None and index < len(args):
        return (*args[:index], mesh, *args[index + 1 :]), rest
    if "device_mesh" in parameters or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        rest["device_mesh"] = mesh
    return args, rest


def _parameters(init: Callable[..., None]) -> dict[str, inspect.Parameter]:
    parameters = list(signature_of(init).parameters.items())
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
