"""What becomes of ranks that still run a call which has failed on another rank.

They may be about to finish, hard at work, or waiting in a collective for the rank that has failed. They get `peer_grace_s` to finish. Then they
are looked at each second: a rank hangs if it has neither used nor wanted a processor for some looks in a row, or shares an NCCL group with the
others (which spins while it waits); a rank that waits for a remote call of its own does not hang, as that call has a deadline. Once all that
still run hang, nobody can free them, and the component's workers are ended. Whatever they do, they are ended at the deadline of the call.
"""

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twinkle_remote._ray_api import ray

if TYPE_CHECKING:
    from twinkle_remote._ray_calls import PendingCall
    from twinkle_remote._ray_component import RayComponent

_POLL_S = 0.2
_LOOK_S = 1.0
_LOOK_TIMEOUT_S = 2.0
_IDLE_LOOKS = 3
_SILENT_LOOKS = 5  # each takes _LOOK_TIMEOUT_S
_IDLE_SHARE = 0.05


class Settlement(threading.Thread):
    """Watches the ranks of a failed call until all have answered or the component has been ended.

    reason: why it failed, for later messages. before: the watch over an earlier call, which its ranks have to finish first.
    """

    def __init__(self, component: "RayComponent", call: "PendingCall", reason: str, before: "Settlement | None") -> None:
        super().__init__(name="twinkle-settlement", daemon=True)
        self._component = component
        self._call = call
        self._reason = reason
        self._before = before
        self._stop_asked = threading.Event()
        self._grace_s = component.limits.peer_grace_s
        self._deadline = time.monotonic() + max(self._grace_s, call.timeout_s - (time.time() - call.submit_s))
        self._idle_looks: dict[int, int] = {}
        self._silent_looks: dict[int, int] = {}
        self._last: dict[int, tuple[float, float]] = {}

    def run(self) -> None:
        if self._before is not None:
            self._before.join()
            self._before = None
        until = time.monotonic() + self._grace_s
        while not self._stop_asked.is_set() and (waiting := self._running()):
            if time.monotonic() >= self._deadline:
                self._end(waiting, "still ran at its deadline")
                return
            if time.monotonic() >= until:
                if self._all_hang(waiting):
                    self._end(waiting, "hung in it")
                    return
                until = time.monotonic() + _LOOK_S
            ray.wait([self._call.references[rank] for rank in waiting], num_returns=len(waiting), timeout=_POLL_S)

    def wait(self) -> None:
        """Wait until it is known what becomes of the ranks; at the latest at the call's deadline."""
        self.join()

    def stop(self) -> None:
        """The runtime shuts down: leave the ranks alone."""
        self._stop_asked.set()
        if (before := self._before) is not None:
            before.stop()
        self.join(_LOOK_TIMEOUT_S + 2 * _POLL_S)

    def _running(self) -> list[int]:
        call = self._call
        waiting = {call.references[rank]: rank for rank in call.running_ranks()}
        if not waiting:
            return []
        arrived, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for reference in arrived:
            call.take_late(waiting[reference])
        return call.running_ranks()

    def _all_hang(self, ranks: Sequence[int]) -> bool:
        answers = self._component.look(ranks, "look", _LOOK_TIMEOUT_S)
        now = time.monotonic()
        hang = [self._hangs(rank, answer, now) for rank, answer in zip(ranks, answers, strict=True)]
        return all(hang)

    def _hangs(self, rank: int, answer: dict[str, Any] | None, now: float) -> bool:
        if answer is not None and answer["nccl"]:
            return True
        if answer is None:  # in native code that holds the interpreter, at work or not; it counts as hung only if it stays so
            self._silent_looks[rank] = self._silent_looks.get(rank, 0) + 1
            return self._silent_looks[rank] >= _SILENT_LOOKS
        self._silent_looks[rank] = 0
        before_busy_s, before = self._last.get(rank, (0.0, now))
        self._last[rank] = (answer["busy_s"], now)
        idle = not answer["waiting"] and now > before and answer["busy_s"] - before_busy_s < _IDLE_SHARE * (now - before)
        self._idle_looks[rank] = self._idle_looks.get(rank, 0) + 1 if idle else 0
        return self._idle_looks[rank] >= _IDLE_LOOKS

    def _end(self, ranks: Sequence[int], what: str) -> None:
        self._component.look(ranks, "abort", _LOOK_TIMEOUT_S)
        self._component.kill(f"{self._call.name} failed ({self._reason}), and ranks {list(ranks)} {what}", self._call.crew_number)
