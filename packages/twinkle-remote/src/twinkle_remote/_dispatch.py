"""Share out a call's arguments among the workers. Pure: no runtime, no Ray."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from twinkle_mesh import DeviceMesh
from twinkle_remote._errors import DispatchError
from twinkle_remote._lazy import LazyResult, packing
from twinkle_remote._protocol import MethodSpec
from twinkle_remote._sequences import batch_kind, column_lengths, even_slice


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a batch a worker gets: part `index` of `parts`; of `total` items where the driver knows."""

    index: int
    parts: int
    total: int | None

    def bounds(self, n: int) -> slice:
        """The part of `n` items."""
        return even_slice(n, self.parts, self.index)


class Sliced:
    """Stands for a LazyResult among the arguments, of which each worker takes its part only."""

    __slots__ = ("result",)

    def __init__(self, result: LazyResult[Any]) -> None:
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        register = packing.get()
        assert register is not None
        return register(self.result, True)


class Column:
    """Stands for a batch of the driver among the arguments: number `index` of the batches, of which each worker gets its part."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The arguments of a call, with Column and Sliced in place of what is cut. batches: what is cut here, by the index of its Column."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batches: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One worker's arguments. Workers that get the same share the object. part: None where nothing was cut."""

    template: Template
    part: Part | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments, this share's parts in place."""
        return tuple(self._filled(value) for value in self.template.args)

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments by name, this share's parts in place."""
        return {name: self._filled(value) for name, value in self.template.kwargs.items()}

    def columns(self) -> list[Any]:
        """This share's parts of the template's batches."""
        batches = self.template.batches
        if self.part is None or not batches:
            return list(batches)
        bounds = self.part.bounds(len(batches[0]))
        return [batch[bounds] for batch in batches]

    def _filled(self, value: Any) -> Any:
        if isinstance(value, Column):
            return self.columns()[value.index]
        if column_lengths(value, also=Column) is None:
            return value
        return {key: self._filled(column) for key, column in cast("Mapping[Any, Any]", value).items()}


def whole_share(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Share:
    """All arguments, uncut."""
    return Share(Template(args, kwargs))


def share_out(spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], num_workers: int, mesh: DeviceMesh) -> list[Share]:
    """The arguments of each worker. Raises DispatchError for batches that cannot be cut as asked."""
    if callable(spec.dispatch):
        return [_custom(spec, spec.dispatch(num_workers, i, args, kwargs, mesh)) for i in range(num_workers)]
    if spec.dispatch == "all" or num_workers == 1:
        return [whole_share(args, kwargs)] * num_workers
    over_data_ranks = spec.dispatch == "slice_dp" and num_workers == mesh.world_size
    parts = mesh.data_world_size if over_data_ranks else num_workers
    lengths = batch_lengths(spec, args, kwargs)
    if parts == 1 or not lengths:
        return [whole_share(args, kwargs)] * num_workers
    total = common_length(spec, lengths)
    if total is not None:
        check_enough(spec.name, ", ".join(lengths), total, parts, "data ranks" if over_data_ranks else "workers", spec.allow_empty)
    template = _template(spec, args, kwargs)
    shares = [Share(template, Part(index, parts, total)) for index in range(parts)]
    if not over_data_ranks:
        return shares
    inner = num_workers // (mesh.pp_size * parts)  # ranks of one data rank are neighbours
    stage = [share for share in shares for _ in range(inner)]
    return stage * mesh.pp_size


def all_differ(shares: list[Share]) -> bool:
    """Whether every worker gets a part of a batch of its own: no result is a copy of another's."""
    return len(shares) > 1 and (part := shares[0].part) is not None and part.parts == len(shares)


def check_enough(method: str, name: str, total: int, parts: int, of_what: str, allow_empty: bool) -> None:
    """Raises DispatchError if some parts would be empty."""
    if total < parts and not allow_empty:
        raise DispatchError(
            f"{method}: {name} has {total} item(s) for {parts} {of_what}, so some would get none: pass at least {parts}, "
            f"or decorate the method with allow_empty=True"
        )


def batch_lengths(spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int | None]:
    """The lengths of the arguments that are cut, and of the columns of dicts that are, by name; None where the driver does not know."""
    lengths: dict[str, int | None] = {}
    for index, value in enumerate(args):
        _add_length(spec, spec.parameters[index] if index < len(spec.parameters) else f"argument {index + 1}", value, lengths)
    for name, value in kwargs.items():
        _add_length(spec, name, value, lengths)
    return lengths


def common_length(spec: MethodSpec, lengths: dict[str, int | None]) -> int | None:
    """The one length of what is cut; None where all of it is lazy. Raises DispatchError for several."""
    known = {name: length for name, length in lengths.items() if length is not None}
    if len(set(known.values())) > 1:
        shown = ", ".join(f"{name} has {length}" for name, length in known.items())
        raise DispatchError(
            f"{spec.name}: with dispatch={spec.dispatch!r} all lists, tuples and arrays are cut into the same parts, but {shown}: "
            f"make them equally long, or use dispatch='all' or a dispatch function"
        )
    return next(iter(known.values()), None)


def _add_length(spec: MethodSpec, name: str, value: Any, lengths: dict[str, int | None]) -> None:
    if isinstance(value, LazyResult):
        lengths[name] = None
    elif batch_kind(value) is not None:
        lengths[name] = len(value)
    elif spec.dispatch == "slice_dp" and (columns := column_lengths(value, name, LazyResult)) is not None:
        lengths |= columns


def _custom(spec: MethodSpec, returned: Any) -> Share:
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2 and isinstance(returned[1], dict)):  # pyright: ignore[reportUnknownArgumentType]
        raise DispatchError(f"{spec.name}: a dispatch function returns (args, kwargs), not {returned!r:.200}")
    args, kwargs = cast("tuple[Any, dict[str, Any]]", returned)
    if not isinstance(args, (tuple, list)):
        raise DispatchError(f"{spec.name}: the args that a dispatch function returns are a tuple, not {args!r:.200}")
    return whole_share(tuple(cast("tuple[Any, ...]", args)), kwargs)


def _template(spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Template:
    batches: list[Any] = []

    def stand_in(value: Any) -> Any:
        if isinstance(value, LazyResult):
            return Sliced(cast("LazyResult[Any]", value))
        if batch_kind(value) is not None:
            batches.append(value)
            return Column(len(batches) - 1)
        if spec.dispatch == "slice_dp" and column_lengths(value, also=LazyResult) is not None:
            return {key: stand_in(column) for key, column in cast("Mapping[Any, Any]", value).items()}
        return value

    return Template(tuple(stand_in(value) for value in args), {name: stand_in(value) for name, value in kwargs.items()}, tuple(batches))
