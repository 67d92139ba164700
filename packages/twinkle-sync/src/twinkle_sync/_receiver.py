"""The mixin that makes a sampler (or any remote class that takes weights) a receiver of transfers."""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from twinkle_remote import remote_function

from ._deadline import Deadline
from ._delta import Kept
from ._errors import ShapesDiffer, TransferCorrupted, WeightsUnavailable
from ._incoming import Incoming
from ._ledger import TransferReceipt
from ._plan import TransferPlan, WorkerInfo
from ._spec import TensorSpec
from ._transport import Transport, make_transport


class _Loading:
    """That a thread loads weights, and until when."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline, self.thread, self.ended = deadline, threading.get_ident(), threading.Event()


class WeightReceiver:
    """Mixin for a `remote_class` that is a `WeightSink`: gives it the remote methods that `CheckpointEngineManager` calls.

    Each rank of the group is one receiver. `loaded_version` is the version of the last verified transfer, 0 for the weights that the
    component was built with; `weight_version()` is the same for drivers.
    From the moment a transfer begins until it is verified the weights are half-loaded: `require_weights`, which the component calls before
    it does any work, raises WeightsUnavailable then.
    """

    _receive_transport: Transport | None = None
    _receive_address: str = ""
    _weights_fault: str | None = None
    _weights_loading: "_Loading | None" = None
    _received_kept: Kept | None = None
    loaded_version: int = 0

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `WeightSink.load_weights`."""
        raise NotImplementedError(f"{type(self).__name__} is a WeightReceiver: it must define load_weights(tensors, version)")

    def load_adapter_weights(self, adapter_name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Put an adapter (peft's names and configuration) in the place of the one of that name; when that fails, the old one stays."""
        raise NotImplementedError(f"{type(self).__name__} takes no adapters: it does not define load_adapter_weights()")

    def prepare_for_weights(self, version: int, timeout_s: float) -> None:
        """Called before an update, while the old weights are whole: whatever has to end first. What it raises refuses the update."""

    def weight_specs_expected(self) -> Iterable[TensorSpec]:
        """The tensors that `load_weights` needs, all of them; none: whatever is sent is taken.

        Where the sender announces its tensors, all are checked before anything is loaded; else each before it is.
        """
        return ()

    def check_weight_specs(self, specs: Iterable[TensorSpec]) -> None:
        """Called with what a sender announces, once that has all of `weight_specs_expected`. What it raises refuses the update."""

    def require_weights(self) -> None:
        """WeightsUnavailable while the weights are half-loaded. While another thread of this process loads them, it waits for that to end."""
        while (loading := self._weights_loading) is not None and loading.thread != threading.get_ident():
            if not loading.ended.wait(loading.deadline.left_s):
                break
        if self._weights_fault is not None:
            raise WeightsUnavailable(f"{self._weights_fault}; call sync_weights() until it succeeds before using this {type(self).__name__}")

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def weight_version(self) -> int:
        """Version of the weights that this component works with; WeightsUnavailable while they are half-loaded."""
        self.require_weights()
        return self.loaded_version

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def kept_version_received(self) -> int:
        """The number of the transfer that a delta could be relative to; 0 for none."""
        return 0 if self._received_kept is None or self._weights_fault is not None else self._received_kept.version

    @remote_function(dispatch="all", collect="none")
    def weight_receiver_info(self) -> WorkerInfo:
        """Where this rank lives."""
        return WorkerInfo.here(channel=self._receive_address)

    @remote_function(dispatch="all", collect="none")
    def receive_weights(self, plan: TransferPlan) -> TransferReceipt:
        """Receive, verify and load one complete set of weights, or an adapter; returns what arrived.

        Raises ShapesDiffer, TransferTimeout, PeerFailed, TransferCorrupted, or what `load_weights` raises.
        """
        deadline = Deadline(plan.timeout_s)
        try:
            transport = self._receive_channel(plan, deadline)
            incoming = Incoming(transport.receive(deadline), plan.version, verify=plan.verify)
            specs = incoming.begin()
            if not plan.sends_weights:
                # Complete and verified before the old adapter is touched.
                adapter = {name: tensor.clone() for name, tensor in incoming}
                self.load_adapter_weights(plan.adapter_name, json.loads(plan.adapter_config), adapter, plan.version)
                return self._receipt_of(incoming)
            expected = {spec.name: spec for spec in self.weight_specs_expected()}
            if specs is not None:
                self._check_all(specs, expected, plan)
            self.prepare_for_weights(plan.version, deadline.remaining_s("the sampler to be ready for new weights"))
            self._weights_loading = _Loading(deadline)
            self._weights_fault = f"loading weights version {plan.version} did not finish"
            try:
                self.load_weights(self._checked(self._whole(incoming, plan), expected, plan), plan.version)
            except BaseException as error:
                self._received_kept = None
                self._weights_fault = f"loading weights version {plan.version} failed ({type(error).__name__}: {error})"
                with suppress(Exception):  # in memory the source's own error would hide the loader's
                    incoming.drain()
                raise
            receipt = self._receipt_of(incoming)
            self.loaded_version, self._weights_fault = plan.version, None
            return receipt
        except BaseException:
            self._drop_receive_channel()
            raise
        finally:
            if self._weights_loading is not None:
                self._weights_loading.ended.set()
                self._weights_loading = None

    def _whole(self, incoming: Incoming, plan: TransferPlan) -> Iterable[tuple[str, torch.Tensor]]:
        """Whole tensors, whether all or only their changes arrive."""
        if not plan.keep:
            self._received_kept = None
            return incoming
        kept = self._received_kept = self._received_kept or Kept()
        if not plan.base_version:
            return kept.recording(incoming, plan.keep)
        if kept.version != plan.base_version:
            raise TransferCorrupted(f"version {plan.version} came as a delta to weights that this receiver does not keep")
        return kept.applied(incoming, plan.keep)

    def _receipt_of(self, incoming: Incoming) -> TransferReceipt:
        if incoming.receipt is None:
            raise TransferCorrupted(f"{type(self).__name__}.load_weights returned before it had read all tensors")
        return incoming.receipt

    def _check_all(self, specs: Iterable[TensorSpec], expected: Mapping[str, TensorSpec], plan: TransferPlan) -> None:
        sent = {spec.name: spec for spec in specs}
        for name in expected:
            if name not in sent:
                raise ShapesDiffer(f"the sender has no {name}, which this {type(self).__name__} needs; it has {len(sent)} tensors")
        for spec in sent.values():
            self._check(spec, expected, plan)
        self.check_weight_specs(sent.values())

    def _checked(
        self, tensors: Iterable[tuple[str, torch.Tensor]], expected: Mapping[str, TensorSpec], plan: TransferPlan
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self._check(TensorSpec.of(name, tensor), expected, plan)
            yield name, tensor

    def _check(self, spec: TensorSpec, expected: Mapping[str, TensorSpec], plan: TransferPlan) -> None:
        wanted = expected.get(spec.name)
        if wanted is None:
            return
        if spec.shape != wanted.shape:
            raise ShapesDiffer(f"{spec.name}: the sender's has shape {spec.shape}, this {type(self).__name__} needs {wanted.shape}")
        if plan.dtype == "same" and spec.dtype != wanted.dtype:
            raise ShapesDiffer(f"{spec.name} is {spec.dtype} at the sender and {wanted.dtype} here, and no conversion was asked for")

    def _receive_channel(self, plan: TransferPlan, deadline: Deadline) -> Transport:
        sender, number = plan.places[WorkerInfo.here().rank]
        route = plan.routes[sender]
        if self._receive_transport is None or self._receive_address != route.address:
            self._drop_receive_channel()
            transport = make_transport(plan.transport)
            transport.connect(route.address, number, route.world_size, deadline)
            self._receive_transport, self._receive_address = transport, route.address
        return self._receive_transport

    def _drop_receive_channel(self) -> None:
        if self._receive_transport is not None:
            self._receive_transport.close()
        self._receive_transport, self._receive_address = None, ""
