"""The driver's side: one object that keeps a sampler's weights equal to a trainer's."""

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from twinkle_remote import LazyResult, gather

from ._buckets import check_bucket_size
from ._errors import ChannelMisuse, PeerFailed, TransferCorrupted
from ._ledger import TransferReceipt
from ._plan import Route, SyncMode, TransferPlan, WorkerInfo, senders_of
from ._receiver import WeightReceiver
from ._sender import WeightSender
from ._spec import TensorSpec

_BETWEEN_PROCESSES = ("gloo", "folder", "ray", "nccl", "cuda_ipc")
_GRACE_S = 10.0  # the workers' own deadlines fire first: they say more
_SETTLE_S = 5.0  # after a failure, how long the other side gets to end too


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One successful synchronisation: its version, what was sent, and the seconds that it took on the driver's clock.

    mode: what was sent; 'full' also where a delta was asked for and there was nothing to build on. size_bytes: of tensors on their way.
    """

    version: int
    num_tensors: int
    size_bytes: int
    seconds: float
    digest: str
    mode: SyncMode = "full"


class CheckpointEngineManager:
    """Sends the weights of `model` (a `WeightSender`) to every rank of `sampler` (a `WeightReceiver`).

    Args:
        model: the trainer's handle, or the trainer itself in local mode.
        sampler: the sampler's handle, or the sampler itself, or a list of them: all get the same at the same time.
        bucket_size_bytes: how much travels at a time. Either side needs two of them beside its weights: one that travels, one that is made or loaded.
        timeout_s: for one synchronisation. Nothing waits longer.
        verify: compute and compare checksums of all bytes (about 0.12 s for each GiB on either side). Names, order, counts and versions always are.
        transport: `memory`, `gloo`, `folder`, `ray` (its object store), or another name that `make_transport` knows. By default `memory` when both
            live in one process, else `gloo`.
        dtype: what floating point tensors are sent as ('bfloat16', say); 'same' refuses (ShapesDiffer) tensors whose dtype the sampler would have to
            convert. By default they are sent as they are, and the sampler converts them to its own.
        num_senders: how many ranks send, of a trainer that has whole weights on all (`WeightSender.every_rank_has_weights`). By default samplers get
            theirs from a rank on their machine, where there is none from one of the trainer's machines in turn.
        first_version: of the first synchronisation. A run that is resumed counts on from where it was: the saved `version` + 1.

    The connection is made by the first `sync_weights` and used again by the later ones; after a failure, and where a worker was restarted, the next
    makes a new one.
    Several threads may call it; one synchronises at a time.
    """

    def __init__(
        self,
        *,
        model: WeightSender,
        sampler: WeightReceiver | Sequence[WeightReceiver],
        bucket_size_bytes: int = 64 << 20,
        timeout_s: float = 300.0,
        verify: bool = True,
        transport: str | None = None,
        dtype: str | None = None,
        num_senders: int | None = None,
        first_version: int = 1,
    ) -> None:
        samplers = list(sampler) if isinstance(sampler, (list, tuple)) else [sampler]
        if not samplers:
            raise ChannelMisuse("sampler=[] is nobody to send weights to")
        for argument, value, methods in (
            ("model", model, ("send_weights", "open_weight_channel")),
            *(("sampler", one, ("receive_weights", "weight_receiver_info")) for one in samplers),
        ):
            if not all(hasattr(value, method) for method in methods):
                mixin = "WeightSender" if argument == "model" else "WeightReceiver"
                wrap = ", or wrap a module or a state dict: model=StateDict(...)" if argument == "model" else ""
                raise ChannelMisuse(f"{argument}={type(value).__name__} cannot take part in a weight transfer: its class must inherit {mixin}{wrap}")
        check_bucket_size(bucket_size_bytes)
        if dtype not in (None, "same"):
            _ = TensorSpec("dtype", dtype, ()).torch_dtype  # raises for one that torch does not know
        if timeout_s <= 0:
            raise ChannelMisuse(f"timeout_s is {timeout_s}; it must be positive")
        if first_version < 1:
            raise ChannelMisuse(f"first_version is {first_version}; versions begin at 1 (0 is what a sampler has before the first)")
        if num_senders is not None and num_senders < 1:
            raise ChannelMisuse(f"num_senders is {num_senders}; somebody has to send")
        self._num_senders = num_senders
        self._model, self._samplers = model, cast("list[WeightReceiver]", samplers)
        self._dtype = dtype
        self._lock = threading.Lock()
        self._bucket_size_bytes, self._timeout_s, self._verify = bucket_size_bytes, timeout_s, verify
        self._transport = transport
        self._channel: _Channel | None = None
        self._attempts = first_version - 1
        self._version = 0
        self._is_stale = True

    @property
    def version(self) -> int:
        """Version of the last successful synchronisation; 0 before the first. It grows with every attempt, failed ones included."""
        return self._version

    @property
    def is_stale(self) -> bool:
        """True before the first synchronisation and after one that failed: the sampler then has other weights than the trainer had, or none."""
        return self._is_stale

    def sync_weights(self, mode: SyncMode = "full", *, adapter_name: str = "", merge: bool = False) -> SyncReport:
        """Make the sampler's weights equal to the trainer's, and verify it.

        Args:
            mode: 'full' sends all weights. 'delta' sends what has changed since the last 'delta', exactly; both sides keep a copy of the weights
                on the CPU for that, and the first one, one after a failure and tensors that have changed in most places are sent whole. 'lora'
                sends the adapter `adapter_name` and leaves all other weights.
            merge: 'full' and 'delta' send the weights with the adapter `adapter_name` merged into them, for samplers without adapters.

        Raises within `timeout_s` (plus some seconds of grace) what went wrong on either side first: TransferTimeout, PeerFailed,
        TransferCorrupted, ShapesDiffer, the source's or the loader's own exception, or the runtime's error for a dead worker. A sampler whose
        weights are half-loaded then refuses to sample until a later call succeeds.
        """
        if mode not in ("full", "delta", "lora") or (mode == "lora" and merge) or (mode == "lora" or merge) != bool(adapter_name):
            raise ChannelMisuse(
                f"sync_weights(mode={mode!r}, adapter_name={adapter_name!r}, merge={merge}): modes are 'full' and 'delta', of an adapter only with "
                "merge=True and its name, and 'lora' with an adapter's name"
            )
        with self._lock:
            return self._sync(mode, adapter_name, merge)

    def _sync(self, mode: SyncMode, adapter_name: str, merge: bool) -> SyncReport:
        started = time.monotonic()
        self._attempts += 1
        self._is_stale = self._is_stale or mode != "lora"
        try:
            workers = self._workers()
            # A new process is not part of the connection, and another manager's transfer has taken its place.
            if self._channel is None or self._channel.workers != workers or not self._channel.is_open(*workers):
                self._channel = self._open_channel(*workers)
            plan = self._plan(self._channel, mode, adapter_name, merge)
            receipt = self._transfer(self._channel, plan)
        except BaseException:
            self._channel = None
            raise
        self._version, self._is_stale = receipt.version, self._is_stale and mode == "lora"
        sent: SyncMode = "full" if mode == "delta" and not plan.base_version else mode
        return SyncReport(receipt.version, receipt.num_tensors, receipt.size_bytes, time.monotonic() - started, receipt.digest, sent)

    def _workers(self) -> tuple[list[WorkerInfo], list[list[WorkerInfo]]]:
        """Where the ranks of the trainer and those of each sampler live now."""
        asked = [self._model.weight_sender_info(), *(sampler.weight_receiver_info() for sampler in self._samplers)]
        senders, *by_sampler = map(_as_list, gather(*asked, timeout_s=self._timeout_s))
        return senders, by_sampler

    def _open_channel(self, senders: list[WorkerInfo], by_sampler: list[list[WorkerInfo]]) -> "_Channel":
        receivers = [worker for workers in by_sampler for worker in workers]
        processes = {worker.process for worker in senders + receivers}
        if len(processes) == 1:
            if any(worker.rank != 0 for worker in receivers):
                raise ChannelMisuse("under torchrun trainer and sampler share their processes, where only a world size of 1 can synchronise; use Ray")
            transport = self._transport or "memory"
            if transport in _BETWEEN_PROCESSES:
                raise ChannelMisuse(f"transport={transport!r} is between processes, and trainer and samplers share one here: leave it out")
        else:
            transport = self._transport or "gloo"
        for workers in by_sampler:
            ranks = sorted(worker.rank for worker in workers)
            if ranks != list(range(len(ranks))):
                raise ChannelMisuse(f"the sampler's workers have the ranks {ranks}, which are not 0 to {len(ranks) - 1}")
        able = [worker for worker in senders if worker.can_send]
        if self._num_senders is not None and self._num_senders > len(able):
            raise ChannelMisuse(
                f"num_senders is {self._num_senders}, and {len(able)} of {len(senders)} ranks of the trainer have whole weights to send"
            )
        chosen = senders_of(receivers[:1] if transport == "memory" else receivers, able, self._num_senders)
        opened = _as_list(self._model.open_weight_channel(transport, self._timeout_s, sorted(set(chosen))))
        addresses = {sender.rank: address for sender, address in zip(senders, opened, strict=True)}
        routes = {rank: Route(addresses[rank], 1 + chosen.count(rank)) for rank in sorted(set(chosen))}
        numbered = iter([(rank, 1 + chosen[:index].count(rank)) for index, rank in enumerate(chosen)])
        # In one process samplers receive one after the other, each as if it were the only one.
        places = tuple(((senders[0].rank, 1),) if transport == "memory" else tuple(next(numbered) for _ in workers) for workers in by_sampler)
        here = WorkerInfo.here().process
        sender_is_here = {worker.process for worker in senders} == {here}
        return _Channel((senders, by_sampler), transport, routes, places, sender_is_here, transport == "memory")

    def _plan(self, channel: "_Channel", mode: SyncMode, adapter_name: str, merge: bool) -> TransferPlan:
        base = 0
        builds = mode == "delta" and not (channel.in_memory and len(self._samplers) > 1)  # in one process what is kept is that of one receiver
        if builds:
            sent = dict(enumerate(_as_list(self._model.kept_version_sent())))
            versions = {sent[rank] for rank in channel.routes}.union(*(_as_list(sampler.kept_version_received()) for sampler in self._samplers))
            base = versions.pop() if len(versions) == 1 else 0
        return TransferPlan(
            transport=channel.transport,
            routes=channel.routes,
            version=self._attempts,
            bucket_size_bytes=self._bucket_size_bytes,
            timeout_s=self._timeout_s,
            verify=self._verify,
            dtype=self._dtype,
            keep=1 + secrets.randbits(62) if builds else 0,
            base_version=base,
            adapter_name=adapter_name,
            adapter_config=self._model.sent_adapter_config(adapter_name) if mode == "lora" else "",
            merge=merge,
        )

    def _transfer(self, channel: "_Channel", plan: TransferPlan) -> TransferReceipt:
        # Both calls are started before either is waited for: each blocks in its worker until the other one runs. What runs in the driver's
        # own process is started last, since it returns only when it is done; in one process the sender leaves its messages and the receiver
        # then runs them.
        def send() -> LazyResult[Any]:
            return self._model.send_weights(plan)

        def receive() -> list[LazyResult[Any]]:
            pairs = zip(self._samplers, channel.places, strict=True)
            return [sampler.receive_weights(replace(plan, places=places)) for sampler, places in pairs]

        if channel.in_memory:
            sent: list[LazyResult[Any]] = []
            received: list[LazyResult[Any]] = []
            for sampler, places in zip(self._samplers, channel.places, strict=True):
                sent.append(send())
                received.append(sampler.receive_weights(replace(plan, places=places)))
        elif not channel.sender_is_here:
            sent, received = [send()], receive()
        else:
            received, sent = receive(), [send()]
        try:
            gather(*received, *sent, timeout_s=self._timeout_s + _GRACE_S)
        except Exception as error:  # whatever a trainer's export or a sampler's loader raises; raised again, or what caused it
            cause = _root_cause(error, *received, *sent)
            if cause is error:
                raise
            raise cause from error
        return _agreed([receipt for one in received for receipt in _as_list(one.get())], plan.version, channel.num_receivers)


@dataclass(frozen=True, slots=True)
class _Channel:
    workers: tuple[list[WorkerInfo], list[list[WorkerInfo]]]
    transport: str
    routes: dict[int, Route]
    places: tuple[tuple[tuple[int, int], ...], ...]  # of each sampler; see TransferPlan
    sender_is_here: bool
    in_memory: bool

    def is_open(self, senders: list[WorkerInfo], by_sampler: list[list[WorkerInfo]]) -> bool:
        """Whether all that are part of it say so."""
        ends = [(worker, worker.rank) for worker in senders if worker.rank in self.routes]
        for workers, places in zip(by_sampler, self.places, strict=True):
            ends += [(worker, places[worker.rank][0]) for worker in workers]
        return all(worker.channel == self.routes[sender].address for worker, sender in ends)

    @property
    def num_receivers(self) -> int:
        """Ranks of all samplers."""
        return sum(map(len, self.places))


def _as_list(collected: Any) -> list[Any]:
    """`collect='none'` gives a list of all ranks' values on Ray and this rank's own value in one process."""
    if isinstance(collected, LazyResult):
        collected = cast("LazyResult[Any]", collected).get()
    return list(cast("list[Any]", collected)) if isinstance(collected, list | tuple) else [collected]


def _agreed(receipts: list[TransferReceipt], version: int, expected: int) -> TransferReceipt:
    """The one receipt that all ranks of the sampler gave. (Each has compared its own with the sender's.)"""
    if len(receipts) != expected or len(set(receipts)) != 1 or receipts[0].version != version:
        raise TransferCorrupted(f"{expected} ranks of the sampler should have version {version}; their receipts are {receipts}")
    return receipts[0]


def _root_cause(first: Exception, *results: LazyResult[Any]) -> Exception:
    """What went wrong, when one side's failure shows on the other as a lost peer or a timeout, maybe before its own error is seen.

    Collecting both results also keeps their errors from turning up at a later, unrelated call.
    """
    failures = [first]
    for result in results:
        try:
            result.get(timeout_s=_SETTLE_S)
        except Exception as error:  # of any kind, as above; the caller raises one of them
            failures.append(error)
    return next((failure for failure in failures if not isinstance(failure, PeerFailed | TimeoutError)), first)
