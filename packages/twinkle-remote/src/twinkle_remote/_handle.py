"""Handles: what a remote class's constructor returns when its object lives on workers."""

from collections.abc import Callable
from typing import Any, NoReturn, cast

from twinkle_remote import _state
from twinkle_remote._arguments import argument_check
from twinkle_remote._errors import RemoteAttributeError
from twinkle_remote._placement_arguments import FailurePolicy, place_arguments, read_placement, read_policy
from twinkle_remote._protocol import Component, Execute, MethodSpec

_MARK = "__twinkle_handle_of__"
_COMPONENT = "__twinkle_component__"
# Implicit calls of these bypass __getattribute__, so a handle needs them on its class; all else of `object` works by itself.
_KEPT = frozenset(dir(object)) - {"__eq__", "__hash__", "__repr__", "__str__"} | {"__dict__", "__weakref__", "__module__", "__slots__"}
_classes: dict[type, type[Any]] = {}


def is_handle_class(cls: type) -> bool:
    """Whether objects of this class stand for ones on workers."""
    return _MARK in vars(cls)


def component_of(handle: Any) -> Component:
    """The component that a handle stands for."""
    return cast("dict[str, Any]", vars(handle))[_COMPONENT]


def handle_class(cls: type, methods: dict[str, MethodSpec], execute: Execute, policy: FailurePolicy) -> type[Any]:
    """The subclass of `cls` whose objects stand for ones on workers: remote methods go there, anything else is an error.

    policy: where a constructor's call does not say.
    """
    if cls not in _classes:
        _classes[cls] = _make(cls, methods, execute, policy)
    return _classes[cls]


def rebuild_handle(cls: type, methods: dict[str, MethodSpec], execute: Execute, link: Any) -> Any:
    """A handle that has come from another process."""
    component = _state.current_runtime().adopt(link)
    made = object.__new__(handle_class(cls, methods, execute, FailurePolicy()))
    _hold(made, component)
    return made


def _hold(handle: Any, component: Component) -> None:
    cast("dict[str, Any]", vars(handle))[_COMPONENT] = component
    component.hold(id(handle))


def _make(cls: type, methods: dict[str, MethodSpec], execute: Execute, policy: FailurePolicy) -> type[Any]:
    init: Callable[..., None] = cls.__init__
    check = argument_check(init, cls.__name__)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        runtime = _state.current_runtime()
        group_name, mesh = read_placement(init, args, kwargs)
        assert group_name is not None
        mesh = runtime.mesh_for(group_name, mesh, execute)
        check(*place_arguments(init, args, kwargs, mesh))
        _hold(self, runtime.create(cls, group_name, mesh, execute, read_policy(init, args, kwargs, policy), args, kwargs))

    def __getattribute__(self: Any, name: str) -> Any:
        if name in methods or name in _KEPT:
            return object.__getattribute__(self, name)
        raise RemoteAttributeError(_explain(cls, name, methods))

    def __getattr__(self: Any, name: str) -> Any:
        if name in methods:  # a property that has raised an AttributeError: let it do so again, where nothing hides it
            return object.__getattribute__(self, name)
        raise RemoteAttributeError(_explain(cls, name, methods))

    def __setattr__(self: Any, name: str, value: Any) -> NoReturn:
        raise RemoteAttributeError(f"{cls.__name__}.{name} cannot be set from here: the object lives on workers; set it in a remote method")

    def __repr__(self: Any) -> str:
        component: Component | None = cast("dict[str, Any]", vars(self)).get(_COMPONENT)
        return f"<{cls.__name__}, not built>" if component is None else f"<{component.describe()}>"

    def __del__(self: Any) -> None:  # not the class's own, which would run on an object that is not there
        component: Component | None = cast("dict[str, Any]", vars(self)).get(_COMPONENT)
        if component is not None:
            component.let_go(id(self))

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        return rebuild_handle, (cls, methods, execute, component_of(self).link())

    namespace: dict[str, Any] = {
        "__init__": __init__,
        "__getattribute__": __getattribute__,
        "__getattr__": __getattr__,
        "__setattr__": __setattr__,
        "__repr__": __repr__,
        "__str__": __repr__,
        "__eq__": object.__eq__,
        "__hash__": object.__hash__,
        "__del__": __del__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        _MARK: cls,
    }
    for base in cls.__mro__[:-1]:
        for name, attribute in vars(base).items():
            special = name.startswith("__") and name.endswith("__") and callable(attribute)
            if special and name not in namespace and name not in methods and name not in _KEPT and not isinstance(attribute, type):
                namespace[name] = _refuse(cls, name, methods)
    return type(cls)(cls.__name__, (cls,), namespace)


def _refuse(cls: type, name: str, methods: dict[str, MethodSpec]) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise RemoteAttributeError(_explain(cls, name, methods))

    return refuse


def _explain(cls: type, name: str, methods: dict[str, MethodSpec]) -> str:
    known = ", ".join(sorted(methods)) or "none"
    if hasattr(cls, name):
        what = f"{cls.__name__}.{name} is not a remote method: decorate it with @remote_function()"
    else:
        what = f"{cls.__name__} has no remote method {name!r}; an object's other attributes stay on its workers"
    return f"{what}. Remote methods: {known}"
