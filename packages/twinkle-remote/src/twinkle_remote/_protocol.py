"""What the decorators know about a runtime, and nothing more: the seam where another engine fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from twinkle_mesh import DeviceGroup, DeviceMesh, PlacementPlan
from twinkle_remote._stats import ComponentStats

if TYPE_CHECKING:
    from typing import Self

    from twinkle_remote._placement_arguments import FailurePolicy
    from twinkle_remote._trace import Trace

Execute = Literal["all", "first"]
DispatchFunction = Callable[[int, int, tuple[Any, ...], dict[str, Any], DeviceMesh], tuple[tuple[Any, ...], dict[str, Any]]]
CollectFunction = Callable[[list[Any], DeviceMesh], Any]
Dispatch = Literal["slice", "all", "slice_dp"] | DispatchFunction
Collect = Literal["none", "flatten", "mean", "sum", "first", "last_pp"] | CollectFunction

# These reach a component by Python's own protocols, whose callers need the value itself (len must give an int).
EAGER_METHODS = frozenset({"__len__", "__bool__", "__contains__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__next__"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSpec:
    """How one remote method is called.

    name, parameters: of the method; the parameters' names serve error messages. is_generator: whether it yields. shown: its name in messages, where
    that is another. The rest: see `remote_function`.
    """

    name: str
    parameters: tuple[str, ...]
    dispatch: Dispatch
    execute: Execute
    collect: Collect
    sync: bool
    lazy_collect: bool
    timeout_s: float | None
    allow_empty: bool
    is_generator: bool = False
    prefetch: int = 0
    shown: str = ""

    @property
    def title(self) -> str:
        """The name that messages show."""
        return self.shown or self.name

    @property
    def opens_iterator(self) -> bool:
        """Whether a call returns an iterator."""
        return self.is_generator or self.name == "__iter__"

    @property
    def returns_value(self) -> bool:
        """Whether a call returns the collected value rather than a LazyResult."""
        return self.sync or not self.lazy_collect or self.name in EAGER_METHODS


class Component(Protocol):
    """An object that lives on the workers of a group."""

    def call(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a remote method: a LazyResult, or the value where `spec.returns_value`."""
        ...

    def hold(self, holder: int) -> None:
        """An object of this process (its id) may make calls from now on: a handle, or an iterator."""
        ...

    def let_go(self, holder: int) -> None:
        """It is gone. Without the last one, calls whose results nobody holds are forgotten, and the workers end with the last result."""
        ...

    def describe(self) -> str:
        """'ClassName in group ...', for messages."""
        ...

    def link(self) -> Any:
        """What a handle takes along into another process, for `Runtime.adopt` there. Raises what says why it cannot travel."""
        ...


@runtime_checkable
class Runtime(Protocol):
    """What `initialize` decided: where components live and who slices batches.

    mode: 'local' (one process), 'torchrun' (one of several processes that run the same script) or 'ray'.
    groups: the device groups by name. plan: which worker of a group runs where (None where nothing was placed).
    slices_in_loader: True where the data loader must slice batches (local, torchrun); False where dispatch does (ray).
    """

    @property
    def mode(self) -> Literal["local", "torchrun", "ray"]:
        """Where components live."""
        ...

    @property
    def groups(self) -> dict[str, DeviceGroup]:
        """The device groups by name."""
        ...

    @property
    def plan(self) -> PlacementPlan | None:
        """Which worker of a group runs where."""
        ...

    @property
    def slices_in_loader(self) -> bool:
        """Who slices batches."""
        ...

    @property
    def trace(self) -> "Trace | None":
        """The timeline, if one is recorded."""
        ...

    def is_remote(self, group_name: str | None) -> bool:
        """Whether a component of this group lives on workers rather than in this process. Raises GroupError if unknown."""
        ...

    def mesh_for(self, group_name: str | None, mesh: DeviceMesh | None, execute: Execute) -> DeviceMesh:
        """The mesh that a component of this group gets. Raises GroupError for one that does not fit."""
        ...

    def create(
        self,
        cls: type,
        group_name: str,
        mesh: DeviceMesh,
        execute: Execute,
        policy: "FailurePolicy",
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Component:
        """Build a component on the workers of a group; returns once all are built."""
        ...

    def adopt(self, link: Any) -> Component:
        """The component of a handle that came from another process. Raises RuntimeStateError where that cannot be."""
        ...

    def stats(self) -> dict[str, ComponentStats]:
        """What the calls made in this process have cost so far, by component ('Model #1'): the numbers behind the trace."""
        ...

    def record(self, component: str, method: str, start_s: float, end_s: float, *, failed: bool) -> None:
        """A component in this process has run a method: for `stats` and the trace."""
        ...

    def draw(self, *, format: Literal["text", "svg"] = "text") -> str:
        """The groups, their nodes, the components on them and the way of a batch: plain text, or a whole SVG file.

        The SVG leaves out components that run on rank 0 only, which the text names. Raises ValueError for another format.
        """
        ...

    def shutdown(self) -> None:
        """Release everything that the runtime started. Doing it again does nothing."""
        ...

    def __enter__(self) -> "Self": ...

    def __exit__(self, *exc_info: object) -> None: ...
