"""Whether a call's arguments fit the method, found out before anything is sent to a worker."""

import inspect
from collections.abc import Callable
from typing import Any

from twinkle_remote._errors import RemoteTypeError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature, `self` included. That of `object.__init__` says (*args, **kwargs), but it takes none."""
    if inspect.unwrap(function) is object.__init__:
        return inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)])
    return inspect.signature(function)


def argument_check(function: Callable[..., Any], shown: str) -> Callable[[tuple[Any, ...], dict[str, Any]], None]:
    """A check of the arguments that follow `self` in calls of `function`, `shown` in messages. It raises
    RemoteTypeError, with Python's reason, where they do not fit.

    It only counts and looks names up, as it comes before every call; `inspect` is asked for the reason once they do not fit.
    """
    signature = signature_of(function)
    parameters = list(signature.parameters.values())[1:]
    kinds = {parameter.kind for parameter in parameters}
    most = len(parameters) if inspect.Parameter.VAR_POSITIONAL in kinds else sum(parameter.kind in _POSITIONAL for parameter in parameters)
    unbounded = inspect.Parameter.VAR_POSITIONAL in kinds
    names = None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(one.name for one in parameters if one.kind in _KEYWORD)
    needed = [
        (index if one.kind in _POSITIONAL else None, one.name if one.kind in _KEYWORD else None)
        for index, one in enumerate(parameters)
        if one.default is inspect.Parameter.empty and one.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    ]
    of_position = {one.name: index for index, one in enumerate(parameters) if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}

    def fits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = len(args)
        if given > most and not unbounded:
            return False
        if any((index is None or index >= given) and name not in kwargs for index, name in needed):
            return False
        return not kwargs or ((names is None or names.issuperset(kwargs)) and all(of_position.get(name, given) >= given for name in kwargs))

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if fits(args, kwargs):
            return
        try:
            signature.bind(None, *args, **kwargs)
        except TypeError as error:
            raise RemoteTypeError(f"{shown}: {error}; it takes {_without_self(signature)}") from None

    return check


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:])


class InitSignature:
    """The `__signature__` of a remote class: what its `__init__` takes. `inspect.signature` would show the `__new__` that decides where to build."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        return _without_self(signature_of(owner.__init__))
