"""`remote_class` and `remote_function`."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, ParamSpec, TypeVar, Unpack, cast, get_args, overload

from twinkle_mesh import DeviceMesh
from twinkle_remote import _state
from twinkle_remote._arguments import InitSignature, argument_check
from twinkle_remote._errors import DecorationError
from twinkle_remote._handle import component_of, handle_class, is_handle_class
from twinkle_remote._in_process import call_in_process
from twinkle_remote._lazy import LazyResult, resolve
from twinkle_remote._placement_arguments import FailurePolicy, OnFailure, place_arguments, read_placement
from twinkle_remote._protocol import Collect, Dispatch, Execute, MethodSpec
from twinkle_remote._seconds import check_seconds
from twinkle_remote._signatures import AtOnce, C, CollectTo, Giving, Joined, Lazily, MoreOptions

T = TypeVar("T")
P = ParamSpec("P")

_SPEC = "__twinkle_remote_method__"
_EXECUTE = "__twinkle_execute__"
_POLICY = "__twinkle_failure_policy__"
_MESH = "__twinkle_mesh__"


@overload
def remote_function(
    dispatch: Dispatch = ...,
    execute: Execute = ...,
    *,
    collect: Joined,
    sync: Literal[False] = ...,
    lazy_collect: Literal[True] = ...,
    **options: Unpack[MoreOptions],
) -> Lazily: ...
@overload
def remote_function(
    dispatch: Dispatch = ...,
    execute: Execute = ...,
    *,
    collect: Joined,
    sync: Literal[True],
    lazy_collect: bool = ...,
    **options: Unpack[MoreOptions],
) -> AtOnce: ...
@overload
def remote_function(
    dispatch: Dispatch = ...,
    execute: Execute = ...,
    *,
    collect: Joined,
    sync: bool = ...,
    lazy_collect: Literal[False],
    **options: Unpack[MoreOptions],
) -> AtOnce: ...
@overload
def remote_function(
    dispatch: Dispatch = ...,
    execute: Execute = ...,
    *,
    collect: Literal["none"] = ...,
    sync: Literal[False] = ...,
    lazy_collect: Literal[True] = ...,
    **options: Unpack[MoreOptions],
) -> Giving[LazyResult[Any]]: ...
@overload
def remote_function(
    dispatch: Dispatch = ...,
    execute: Execute = ...,
    *,
    collect: Literal["none"] = ...,
    sync: bool = ...,
    lazy_collect: bool = ...,
    **options: Unpack[MoreOptions],
) -> Giving[Any]: ...
@overload
def remote_function(
    dispatch: Dispatch = ...,
    execute: Execute = ...,
    *,
    collect: CollectTo[C],
    sync: Literal[False] = ...,
    lazy_collect: Literal[True] = ...,
    **options: Unpack[MoreOptions],
) -> Giving[LazyResult[C]]: ...
@overload
def remote_function(
    dispatch: Dispatch = ...,
    execute: Execute = ...,
    *,
    collect: CollectTo[C],
    sync: Literal[True],
    lazy_collect: bool = ...,
    **options: Unpack[MoreOptions],
) -> Giving[C]: ...
@overload
def remote_function(
    dispatch: Dispatch = ...,
    execute: Execute = ...,
    *,
    collect: CollectTo[C],
    sync: bool = ...,
    lazy_collect: Literal[False],
    **options: Unpack[MoreOptions],
) -> Giving[C]: ...
@overload
def remote_function(
    dispatch: Dispatch = ...,
    execute: Execute = ...,
    *,
    collect: Joined | Literal["none"] | CollectTo[Any],
    sync: bool = ...,
    lazy_collect: bool = ...,
    **options: Unpack[MoreOptions],
) -> Giving[Any]: ...
def remote_function(
    dispatch: Dispatch = "slice",
    execute: Execute = "all",
    collect: Collect = "none",
    sync: bool = False,
    lazy_collect: bool = True,
    timeout_s: float | None = None,
    allow_empty: bool = False,
    prefetch: int = 0,
) -> Any:
    """Make a method of a `remote_class` callable on its workers.

    dispatch: how arguments are shared out among the workers (on Ray; in process they pass through).
        'slice': lists, tuples, numpy arrays and tensors are cut evenly over the workers, anything else goes to all;
        'slice_dp': the same over the data ranks of the component's mesh: tp, pp, cp and ulysses peers get the same share. A dict of columns
        (all its values are batches, at least one an array, a tensor or a LazyResult) is cut column by column;
        'all': everything goes to all;
        a function `(length, i, args, kwargs, device_mesh) -> (args, kwargs)` for worker i of `length`.
    execute: 'all' workers, or only the 'first'.
    collect: how results come together.
        'none': the list of all workers' results (of one worker: its result);
        'flatten': one result a data group (of a batch that was cut over all workers: every worker's), joined as one process would have
        returned it;
        'mean', 'sum': over the data groups, key by key in dicts (over the ranks that have the key). In a mean each result counts as many
        items as its worker was given, or, where the method returns a `Weighted`, what that says;
        'first': the first worker's; 'last_pp': the last pipeline stage's, one a data group, joined like 'flatten';
        a function `(all_results, device_mesh) -> value`.
    sync: wait for all workers and return the value. lazy_collect: return a LazyResult (False: the value).
    timeout_s: seconds that a call may take (default: the runtime's `call_timeout_s`).
    allow_empty: let workers get no items where there are fewer items than workers (otherwise an error).
    prefetch: of a method that yields, how many steps the workers run ahead of the iteration. State that counts steps (a loader's position)
        is ahead as well.

    Parts differ by at most one item. Fewer items than parts are a DispatchError, but with `allow_empty`.

    Methods of Python's protocols (`__len__`, `__iter__`, `__next__`, ...) work across processes and return values. A generator method
    returns an iterator; its generators are closed on the workers when it is closed or dropped. An `async def` method runs on an event
    loop of the worker, one call after another. Below `property`, reading it from elsewhere calls it.

    Type checkers see a decorated method's parameters, and LazyResult[T] or T as its result; with `collect='none'` the result is Any: a list of all
    workers' results, or one worker's. For these, say `lazy_collect=False` on methods of Python's protocols.

    Raises DecorationError for unknown options, RemoteTypeError for a `timeout_s` that is not a number above 0.
    """
    _check_option("dispatch", dispatch, ("slice", "all", "slice_dp"), callable(dispatch))
    _check_option("execute", execute, get_args(Execute), False)
    _check_option("collect", collect, ("none", "flatten", "mean", "sum", "first", "last_pp"), callable(collect))
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s)
    if type(prefetch) is not int or prefetch < 0:
        raise DecorationError(f"prefetch={prefetch!r}: it is an int of at least 0")

    def decorate(method: Callable[P, Any]) -> Callable[P, Any]:
        if not inspect.isfunction(method):
            raise DecorationError(
                f"remote_function decorates methods, not {type(method).__name__}: put it below property; leave it off static and class methods"
            )
        if inspect.isasyncgenfunction(method):
            raise DecorationError(f"{method.__qualname__}: an async generator cannot be remote: make it a generator, or return a list")
        is_generator = inspect.isgeneratorfunction(method)
        if prefetch and not is_generator and method.__name__ != "__iter__":
            raise DecorationError(f"{method.__qualname__}: prefetch={prefetch} is for methods that yield, and for __iter__")
        spec = MethodSpec(
            name=method.__name__,
            parameters=tuple(inspect.signature(method).parameters)[1:],
            dispatch=dispatch,
            execute=execute,
            collect=collect,
            sync=sync,
            lazy_collect=lazy_collect,
            timeout_s=timeout_s,
            allow_empty=allow_empty,
            is_generator=is_generator,
            prefetch=prefetch,
        )
        return _remote_method(method, spec)

    return decorate


def remote_class(execute: Execute = "all", *, on_failure: OnFailure = "raise", max_restarts: int = 3) -> Callable[[type[T]], type[T]]:
    """Make a class whose objects can live on the workers of a device group. It stays a class, and `isinstance` holds.

    Constructed with `remote_group=` (a group's name) in mode 'ray', its object is built on all workers of the group (execute='all')
    or on the first only ('first': data sets, data loaders), and what the constructor returns is an instance of the same class whose remote
    methods run there. In local mode, without `remote_group`, or in a worker of that group, it is built in this process.

    `remote_group` and `device_mesh` are read from the constructor's arguments. `remote_group` is handed on only if `__init__`
    names it, `device_mesh` if `__init__` accepts it (default: data parallel over the group's workers). Subclasses are remote classes too, and a
    method that overrides a remote one is remote. `__worker_env__(device_type) -> dict[str, str]`, a classmethod, may add to the
    workers' environment.

    on_failure: what becomes of a component whose workers were lost (one died, hung after a failure, or passed a deadline; then all are ended).
        'raise': calls on it raise ComponentLostError. 'restart': the next call first replaces the workers, at most `max_restarts` times: the
        constructor runs again with the same arguments, and then the method `restore(self)` if there is one (to load a checkpoint, say). A call
        that was under way is never repeated: it raises. Both are also read from the constructor's keywords, for one component, and handed on
        only if `__init__` names them.

    Raises DecorationError for what is not a class, RemoteTypeError for other values of `on_failure` and `max_restarts`.
    """
    _check_option("execute", execute, get_args(Execute), False)
    policy = FailurePolicy(on_failure, max_restarts)

    def decorate(cls: type[T]) -> type[T]:
        given: Any = cls
        if not isinstance(given, type):
            raise DecorationError(f"remote_class decorates classes, not {type(given).__name__}")
        _install(cls, execute)
        setattr(cls, _POLICY, policy)
        return cls

    return decorate


def remote_methods(cls: type) -> dict[str, MethodSpec]:
    """The remote methods of a class, inherited ones included, by name; not those that something else overrides (None, a static method)."""
    found: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, attribute in vars(base).items():
            if (spec := _spec_of(attribute)) is not None:
                found[name] = spec
            else:
                found.pop(name, None)
    return found


def _spec_of(attribute: Any) -> MethodSpec | None:
    """The spec of a remote method, or of a property that reads one."""
    return getattr(attribute.fget if isinstance(attribute, property) else attribute, _SPEC, None)


def mesh_of(target: Any) -> DeviceMesh:
    """The mesh of an in-process component."""
    mesh = getattr(target, _MESH, None)
    return _state.current_runtime().mesh_for(None, None, "all") if mesh is None else mesh


def _check_option(name: str, value: Any, known: tuple[str, ...], fine: bool) -> None:
    if not fine and value not in known:
        raise DecorationError(
            f"{name}={value!r} is not known; known are {', '.join(map(repr, known))}" + ("" if name == "execute" else " or a function")
        )


def _remote_method(method: Callable[..., Any], spec: MethodSpec) -> Callable[..., Any]:
    check = argument_check(method, method.__qualname__)
    as_given = not callable(spec.dispatch)  # a function may make the method's arguments of others

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        cls = cast("type[Any]", type(self))
        if is_handle_class(cls):
            if as_given:
                check(args, kwargs)
            return component_of(self).call(spec, args, kwargs)
        return call_in_process(self, mesh_of(self), spec, method, args, kwargs)

    setattr(call, _SPEC, spec)
    return call


def _install(cls: type, execute: Execute) -> None:
    for name, attribute in vars(cls).items():
        if isinstance(attribute, (staticmethod, classmethod)) and _spec_of(attribute.__func__) is not None:  # pyright: ignore[reportUnknownMemberType]
            raise DecorationError(
                f"{cls.__name__}.{name}: a {type(attribute).__name__} has no object on the workers, so it cannot be remote: leave remote_function off"  # pyright: ignore[reportUnknownArgumentType]
            )
    if cls.__dictoffset__ == 0:
        raise DecorationError(f"{cls.__name__}: a remote class keeps its mesh in its __dict__; do not use __slots__ without '__dict__'")
    again = _EXECUTE in vars(cls)
    setattr(cls, _EXECUTE, execute)
    if again:  # a subclass of a remote class was installed when it was made; the decorator only changes `execute`
        return
    _inherit_specs(cls)
    _wrap_new(cls)
    _wrap_init(cls)
    if not any(_EXECUTE in vars(base) for base in cls.__mro__[1:]):
        _wrap_init_subclass(cls)
        if "__signature__" not in vars(cls):
            cls.__signature__ = InitSignature()  # pyright: ignore[reportAttributeAccessIssue]


def _inherit_specs(cls: type) -> None:
    """A method that overrides a remote method is remote in the same way, also where a plain class beside the remote one brings it."""
    attributes = {name: attribute for base in reversed(cls.__mro__) for name, attribute in vars(base).items()}
    specs = {name: spec for base in reversed(cls.__mro__) for name, attribute in vars(base).items() if (spec := _spec_of(attribute)) is not None}
    for name, inherited in specs.items():
        attribute = attributes[name]
        if _spec_of(attribute) is not None:
            continue
        if inspect.isfunction(attribute):
            setattr(cls, name, _remote_method(attribute, replace(inherited, is_generator=inspect.isgeneratorfunction(attribute))))
        elif isinstance(attribute, property) and attribute.fget is not None:
            setattr(cls, name, attribute.getter(_remote_method(attribute.fget, inherited)))


def _wrap_init_subclass(cls: type) -> None:
    original = vars(cls).get("__init_subclass__")

    def __init_subclass__(subclass: type, **kwargs: Any) -> None:
        if original is not None:
            original.__get__(None, subclass)(**kwargs)
        else:
            super(cls, subclass).__init_subclass__(**kwargs)
        if not is_handle_class(subclass):
            _install(subclass, getattr(subclass, _EXECUTE))

    cls.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]


def _wrap_new(cls: type) -> None:
    if "__new__" not in vars(cls) and any(_EXECUTE in vars(base) for base in cls.__mro__[1:]):
        return  # inherited
    # Not object.__new__ itself: the class would not pickle by value with it in a closure.
    original: Any = None if cls.__new__ is object.__new__ else cls.__new__

    def __new__(subclass: type[Any], /, *args: Any, **kwargs: Any) -> Any:
        # What is returned here gets its __init__ called with the same arguments, as it is an instance of `subclass`.
        if is_handle_class(subclass):
            return object.__new__(subclass)
        if _state.current_runtime().is_remote(read_placement(subclass.__init__, args, kwargs)[0]):
            return object.__new__(handle_class(subclass, remote_methods(subclass), getattr(subclass, _EXECUTE), getattr(subclass, _POLICY)))
        return object.__new__(subclass) if original is None else original(subclass, *args, **kwargs)

    cls.__new__ = __new__  # pyright: ignore[reportAttributeAccessIssue]


def _execute_of(target: Any) -> Execute:
    return getattr(cast("type[Any]", type(target)), _EXECUTE)


def _wrap_init(cls: type) -> None:
    original: Callable[..., None] = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:
        if _MESH in vars(self):  # called by a subclass's __init__
            original(self, *args, **kwargs)
            return
        group_name, mesh = read_placement(original, args, kwargs)
        mesh = _state.current_runtime().mesh_for(group_name, mesh, _execute_of(self))
        object.__setattr__(self, _MESH, mesh)
        args, kwargs = place_arguments(original, args, kwargs, mesh)
        token = _state.active.set(_state.active.get() | {id(self)})
        try:
            original(self, *(resolve(arg) for arg in args), **{name: resolve(value) for name, value in kwargs.items()})
        finally:
            _state.active.reset(token)

    cls.__init__ = __init__
