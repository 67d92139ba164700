"""A component on Ray workers, as the process that calls it sees it."""

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from twinkle_mesh import DeviceMesh
from twinkle_remote._control import ask_all, listens
from twinkle_remote._dispatch import Share, all_differ, share_out, whole_share
from twinkle_remote._driver_line import driver_line
from twinkle_remote._errors import CollectError, ComponentLostError, RemoteError, RuntimeStateError, WorkerDiedError
from twinkle_remote._lazy import LazyResult
from twinkle_remote._packing import unpack
from twinkle_remote._placement_arguments import FailurePolicy
from twinkle_remote._protocol import MethodSpec
from twinkle_remote._ray_calls import CallSource, PendingCall, wait_for
from twinkle_remote._ray_costs import Costs
from twinkle_remote._ray_iterator import RemoteIterator
from twinkle_remote._ray_messages import Limits, Link
from twinkle_remote._ray_places import Crew
from twinkle_remote._ray_sending import PlainSender, Sender, at_hand, sender_without_arguments
from twinkle_remote._ray_settle import Settlement
from twinkle_remote._shards import Result, Stop
from twinkle_remote._stats import Totals

if TYPE_CHECKING:
    from twinkle_remote._ray_host import RayHost

logger = logging.getLogger("twinkle_remote")

_STACKS_TIMEOUT_S = 2.0
_STACKS_SHOWN = 16
_END_TIMEOUT_S = 10.0
_REASON_CHARACTERS = 500
_BUILD = "__init__"
_BUILD_SPEC = MethodSpec(
    name=_BUILD,
    parameters=(),
    dispatch="all",
    execute="all",
    collect="none",
    sync=True,
    lazy_collect=False,
    timeout_s=None,
    allow_empty=False,
)
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a component is built from, and built again after a failure."""

    cls: type
    num_workers: int
    arguments: Sender | PlainSender


class RayComponent:
    """The workers of one component and the calls that this process has under way on them.

    id: unique. restarts: how often the workers were replaced.
    """

    def __init__(self, host: "RayHost", class_name: str, group_name: str, mesh: DeviceMesh, limits: Limits, policy: FailurePolicy) -> None:
        self.id = uuid.uuid4().hex
        self.class_name = class_name
        self.group_name = group_name
        self.mesh = mesh
        self.num_workers = 0
        self.restarts = 0
        self.limits = limits
        self.costs = Costs(Totals(f"{class_name} #{next(_numbers)}", group_name), host.trace)
        self._policy = policy
        self._host = ref(host)
        self._token = host.token
        self._crew: Crew | None = None
        self._origin: _Origin | None = None
        self._lost: str | None = None
        self._reasons: dict[int, str] = {}
        self._calls: list[PendingCall] = []
        self._holders: set[int] = set()
        self._settlement: Settlement | None = None
        # The first guards what is known of the workers, and is held for moments only; the second is held while they are replaced.
        self._lock = threading.Lock()
        self._restarting = threading.RLock()

    @classmethod
    def borrow(cls, host: "RayHost", link: Link) -> "RayComponent":
        """A component that another process built and ends."""
        component = cls(host, link.class_name, link.group_name, link.mesh, link.limits, FailurePolicy())
        component.id, component.restarts, component._token = link.component_id, link.restarts, link.token
        component._set_crew(Crew(actors=link.actors, hellos=link.hellos))
        return component

    def link(self) -> Link:
        """What a handle takes along into another process. Raises ComponentLostError if there are no workers."""
        self._open_host()
        if self._lost is not None or self._crew is None:
            raise ComponentLostError(f"{self.describe()} has no workers any more ({self._lost}), so its handle cannot be passed on: build it anew")
        return Link(
            component_id=self.id,
            class_name=self.class_name,
            group_name=self.group_name,
            mesh=self.mesh,
            restarts=self.restarts,
            actors=self._crew.actors,
            hellos=self._crew.hellos,
            limits=self.limits,
            token=self._token,
        )

    def describe(self) -> str:
        again = "" if not self.restarts else f", restarted {self.restarts} time(s)"
        return f"{self.class_name} on {self.num_workers} worker(s) of group {self.group_name!r}{again}"

    def build(self, cls: type, num_workers: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Start the workers and construct the object in each. Raises what the constructor raises; then no worker is left."""
        self.num_workers = num_workers
        arguments = self._sender(_BUILD_SPEC, [whole_share((cls, tuple(args), kwargs), {})] * num_workers)
        self._start(_Origin(cls, num_workers, arguments), "its construction failed")
        if self._policy.on_failure == "restart":
            self._origin = _Origin(cls, num_workers, arguments)

    def hold(self, holder: int) -> None:
        """See `Component.hold`."""
        self._holders.add(holder)

    def let_go(self, holder: int) -> None:
        """See `Component.let_go`. Comes from `__del__`, at any time: takes no lock and does not ask Ray."""
        self._holders.discard(holder)
        if self._holders:
            return
        # Calls hold their component, as their results live on its workers. If it went on holding them, none would go.
        unfinished = [call for call in self._calls if not call.finished]
        for index, call in enumerate(unfinished):
            call.earlier = tuple(unfinished[:index])
        self._calls = []

    def in_use(self) -> AbstractContextManager[None]:
        """While a thread uses Ray for this component. Inside, look whether the runtime is open."""
        host = self._host()
        return nullcontext() if host is None else host.gate

    def call(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a remote method on the workers."""
        with self.in_use():
            return self._call(spec, args, kwargs)

    def _call(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._open_host()
        self._raise_uncollected()
        self.ensure_workers()
        args = tuple(at_hand(arg) for arg in args)
        kwargs = {name: at_hand(value) for name, value in kwargs.items()}
        num_workers = 1 if spec.execute == "first" else self.num_workers
        shares = share_out(spec, args, kwargs, num_workers, self.mesh)
        call = self.submit("call", spec, shares)
        no_copies = all_differ(shares)
        if spec.opens_iterator:
            wait_for([call], None)
            numbers = [unpack(result.pieces[0].data) for result in call.results if isinstance(result, Result)]
            return RemoteIterator(self, spec, numbers, no_copies=no_copies)
        if spec.name == "__next__":
            return self.next_value(spec, call)
        source = CallSource(call, self.mesh, spec.collect, self.runtime_is_open, no_copies=no_copies)
        return source.value() if spec.returns_value else LazyResult[Any](source)

    def submit(
        self,
        actor_method: str,
        spec: MethodSpec,
        shares: Sequence[Share],
        iterators: Sequence[int] = (),
        extra: tuple[Any, ...] = (),
        prepared: Sender | PlainSender | None = None,
    ) -> PendingCall:
        """Start a call. shares: the arguments of each worker that takes part, by rank. extra: more arguments for the actor. prepared: for all
        workers, in place of the shares."""
        if self._crew is None or (self._lost is not None and spec.name != _BUILD):
            raise ComponentLostError(f"{self.describe()} has no workers any more ({self._lost}): {self._advice()}")
        sender = self._sender(spec, shares, iterators) if prepared is None else prepared
        ranks = range(len(shares) if prepared is None else self.num_workers)
        references = [getattr(self._crew.actors[rank], actor_method).remote(*sender.objects(rank, extra)) for rank in ranks]
        call = PendingCall(self, spec, references, sender.upstream, driver_line(), self._timeout_s(spec))
        self._calls.append(call)
        return call

    def next_value(self, spec: MethodSpec, call: PendingCall, *, no_copies: bool = False) -> Any:
        """Wait for `__next__`; its value stays where it is unless the method says otherwise. no_copies: see `contributors`. Raises StopIteration at
        the end, and CollectError where some ranks end before the others."""
        wait_for([call], None)
        ended = [rank for rank, result in enumerate(call.results) if isinstance(result, Stop)]
        if len(ended) == len(call.results):
            raise StopIteration
        if ended:
            raise CollectError(
                f"ranks {ended} of {self.describe()} came to the end of the iteration from {call.line} before the others, whose items would be "
                f"lost: have all ranks yield as often"
            )
        lazy = LazyResult[Any](CallSource(call, self.mesh, spec.collect, self.runtime_is_open, no_copies=no_copies))
        return lazy.get() if spec.sync or not spec.lazy_collect else lazy

    def calls_before(self, call: PendingCall) -> list[PendingCall]:
        """The unfinished calls that these workers got before `call`."""
        if call not in self._calls:
            return list(call.earlier)
        return list(itertools.takewhile(lambda other: other is not call, self._calls))

    def call_finished(self, call: PendingCall) -> None:
        """Called by a call that has finished. One that has failed is remembered until somebody has seen its error."""
        if call.error is None:
            self._forget(call)
        self.costs.add_call(call.spec.name, call.name, call.submit_s, line=call.line, failed=call.error is not None)

    def ensure_workers(self) -> None:
        """Before a call: restart workers that were lost, where the component's policy says so. Raises ComponentLostError where it does not."""
        settlement = self._settlement
        if self._origin is not None and settlement is not None:
            settlement.wait()  # a call that is queued now would be lost with workers that are about to be ended
        if self._lost is None:
            return
        with self._restarting:
            if not self._is_lost():  # another thread has restarted them
                return
            if self._origin is None or self.restarts >= self._policy.max_restarts:
                raise ComponentLostError(f"{self.describe()} has no workers any more ({self._lost}): {self._advice()}")
            self._restart(self._origin)

    def after_failure(self, call: PendingCall, ranks: Sequence[int], reason: str) -> str:
        """A call has failed on one rank, and these still run it: watch them, and end the component if they hang. Returns what becomes of the
        component, for the message."""
        if call.spec.name == _BUILD:  # a component that was not built is ended in any case
            return ""
        if self._lost is not None:
            return f"its workers have been ended ({self._lost}): {self._advice()}"
        if not ranks:
            return ""
        with self._lock:
            self._settlement = Settlement(self, call, reason, before=self._settlement)
            self._settlement.start()
        return (
            f"ranks {list(ranks)} were still in the call; should they hang, all workers of this component are ended after "
            f"peer_grace_s={self.limits.peer_grace_s:g} s: {self._advice()}"
        )

    def worker_died(self, call: PendingCall, rank: int, cause: Exception) -> None:
        """A worker's process has ended under a call."""
        if call.crew_number != self.restarts or (self._lost is not None and call.spec.name != _BUILD):
            call.reported = True  # as what ended the workers was
            reason = self._reasons.get(call.crew_number, self._lost)
            call.fail(
                ComponentLostError(
                    f"{call.name}, called from {call.line}, was lost with the workers of {self.describe()} ({reason}): {self._advice()}"
                )
            )
            return
        host = self._host()
        hello = None if self._crew is None else self._crew.hellos[rank]
        tail = "" if host is None or hello is None else host.log_tail(hello.pid)
        where = "" if hello is None else f" (process {hello.pid} on {hello.host})"
        error = WorkerDiedError(
            f"the worker of rank {rank} of {self.describe()}{where} ended during {call.name}, called from {call.line}; all workers of "
            f"this component have been ended: {self._advice()}\n  {cause}".rstrip()
            + (f"\nIts last output:\n{tail}" if tail else "")
        )
        call.fail(error)
        self.kill(f"the worker of rank {rank} ended during {call.name}", call.crew_number)

    def look(self, ranks: Sequence[int], what: str, timeout_s: float) -> list[dict[str, Any] | None]:
        """Ask workers over their control channels; see `_control`."""
        return [] if self._crew is None else ask_all(self._crew.addresses(ranks), self._token, what, timeout_s)

    def stacks(self, ranks: Sequence[int]) -> str:
        """Where these ranks are now, for messages. Ranks in the same place are shown together."""
        shown = list(ranks)[:_STACKS_SHOWN]
        at: dict[str, list[int]] = {}
        for rank, answer in zip(shown, self.look(shown, "stacks", _STACKS_TIMEOUT_S), strict=False):
            stack = "(does not answer: it has ended, or native code holds its interpreter)" if answer is None else str(answer["stack"])
            at.setdefault(stack, []).append(rank)
        return "\n".join(f"Stack of ranks {members} of {self.class_name}:\n{stack}" for stack, members in at.items())

    def kill(self, reason: str, crew_number: int | None = None) -> None:
        """End the workers at once. Later calls say why, or restart them. crew_number: which workers are meant, if not the present ones: those
        that have been replaced are gone already."""
        with self._lock:
            if self._lost is not None or crew_number not in (None, self.restarts):
                return
            self._lost = self._reasons[self.restarts] = reason
            self.costs.mark("workers ended", reason=reason)
            if self._crew is not None:
                self._crew.kill()

    def living(self) -> list[tuple[str, int]]:
        """The control channels of the workers, none where they have been ended."""
        return [] if self._lost is not None or self._crew is None else self._crew.addresses(range(self.num_workers))

    def close(self) -> None:
        """End the workers for good: the runtime shuts down."""
        self._origin = None
        if self._settlement is not None:
            self._settlement.stop()
        self.kill("shutdown")

    def unreported_errors(self) -> list[RemoteError]:
        """Errors of calls whose results nobody collected."""
        errors = [call.error for call in list(self._calls) if call.poll() and call.error is not None and not call.reported]
        self._calls = [call for call in self._calls if not call.finished]
        return errors

    def runtime_is_open(self) -> bool:
        """Whether the runtime is not shut down."""
        host = self._host()
        return host is not None and host.is_open

    def send_close(self, numbers: Sequence[int], restarts: int) -> None:
        """Have the workers close iterators, if they are still there; nobody waits for it."""
        if self._lost is None and restarts == self.restarts and self.runtime_is_open() and self._crew is not None:
            for actor, number in zip(self._crew.actors, numbers, strict=False):
                actor.close_iterator.remote(number)

    def _timeout_s(self, spec: MethodSpec) -> float:
        return self.limits.call_timeout_s if spec.timeout_s is None else spec.timeout_s

    def _sender(self, spec: MethodSpec, shares: Sequence[Share], iterators: Sequence[int] = ()) -> Sender | PlainSender:
        host = self._open_host()
        template = shares[0].template
        if not (iterators or template.args or template.kwargs or callable(spec.dispatch)):
            return sender_without_arguments(spec, self._timeout_s(spec), host.known_splits(), host.compression(self.group_name)[0])
        return Sender(spec, self._timeout_s(spec), host.known_splits(), *host.compression(self.group_name), shares, iterators)

    def _is_lost(self) -> bool:
        return self._lost is not None

    def _start(self, origin: _Origin, reason: str) -> None:
        """Start workers and construct the object in them. reason: what to say later should this fail."""
        host = self._open_host()
        crew = None
        try:
            crew = host.start_workers(self, origin.cls, origin.num_workers)
            self._set_crew(crew)
            extra = crew.actors[0].meet.remote(), self.restarts
            wait_for([self.submit("build", _BUILD_SPEC, (), extra=extra, prepared=origin.arguments)], None)
        except BaseException as error:
            with self._lock:
                self._lost = self._reasons[self.restarts] = f"{reason}: {error}"[:_REASON_CHARACTERS]
            if crew is not None:
                crew.kill()
            raise
        with self._lock:
            self._lost = None

    def _restart(self, origin: _Origin) -> None:
        """Replace lost workers. Called while `_restarting` is held."""
        old = self._crew
        with self._lock:
            self.restarts += 1
        self.costs.totals.restarts = self.restarts
        logger.warning("restarting %s (at most %d times): %s", self.describe(), self._policy.max_restarts, self._lost)
        if old is not None:
            _await_end(old)
        with self._lock:
            self._settlement = None
            self._crew = None
        self._start(origin, "its restart failed")

    def _set_crew(self, crew: Crew) -> None:
        self._crew = crew
        self.num_workers = self.costs.totals.workers = len(crew.actors)

    def _advice(self) -> str:
        if self._policy.on_failure == "restart" and self.restarts < self._policy.max_restarts:
            return "the next call restarts it, and does not repeat this one"
        if self._policy.on_failure == "restart":
            return f"it has been restarted {self.restarts} time(s), and max_restarts={self._policy.max_restarts}: build it anew"
        return "build it anew, or with on_failure='restart'"

    def _raise_uncollected(self) -> None:
        """Raise the error of an earlier call that nobody has seen. Looks only as far as the first call that still runs."""
        for call in list(self._calls):
            if not call.poll():
                return
            self._forget(call)
            if not (call.reported or call.is_awaited):
                call.raise_error()

    def _forget(self, call: PendingCall) -> None:
        with suppress(ValueError):  # another thread may have done it
            self._calls.remove(call)

    def _open_host(self) -> "RayHost":
        host = self._host()
        if host is None or not host.is_open:
            raise RuntimeStateError(f"{self.class_name} was built before shutdown(): its workers are gone; build it anew after initialize()")
        return host


def _await_end(crew: Crew) -> None:
    """Wait until killed workers have ended, so that their devices and ports are free. Gives up after a while: starting anew will tell."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    for host, port in crew.addresses(range(len(crew.actors))):
        while listens(host, port) and time.monotonic() < deadline:
            time.sleep(0.05)
