"""The mixin that makes a sampler (or any remote class that takes weights) a receiver of transfers."""

from collections.abc import Iterable
from contextlib import suppress

import torch

from twinkle_remote import remote_function

from ._deadline import Deadline
from ._errors import TransferCorrupted, WeightsUnavailable
from ._incoming import Incoming
from ._ledger import TransferReceipt
from ._plan import TransferPlan, WorkerInfo
from ._transport import Transport, make_transport


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
    loaded_version: int = 0

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `WeightSink.load_weights`."""
        raise NotImplementedError(f"{type(self).__name__} is a WeightReceiver: it must define load_weights(tensors, version)")

    def require_weights(self) -> None:
        """WeightsUnavailable while the weights are half-loaded."""
        if self._weights_fault is not None:
            raise WeightsUnavailable(f"{self._weights_fault}; call sync_weights() until it succeeds before using this {type(self).__name__}")

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def weight_version(self) -> int:
        """Version of the weights that this component works with; WeightsUnavailable while they are half-loaded."""
        self.require_weights()
        return self.loaded_version

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def weight_receiver_info(self) -> WorkerInfo:
        """Where this rank lives."""
        return WorkerInfo.here()

    @remote_function(dispatch="all", collect="none")
    def receive_weights(self, plan: TransferPlan) -> TransferReceipt:
        """Receive, verify and load one complete set of weights; returns what arrived.

        Raises TransferTimeout, PeerFailed, TransferCorrupted, or what `load_weights` raises.
        """
        deadline = Deadline(plan.timeout_s)
        try:
            transport = self._receive_channel(plan, deadline)
            incoming = Incoming(transport.receive(deadline), plan.version, verify=plan.verify)
            incoming.begin()
            self._weights_fault = f"loading weights version {plan.version} did not finish"
            try:
                self.load_weights(incoming, plan.version)
            except BaseException as error:
                self._weights_fault = f"loading weights version {plan.version} failed ({type(error).__name__}: {error})"
                with suppress(Exception):  # in memory the source's own error would hide the loader's
                    incoming.drain()
                raise
            if incoming.receipt is None:
                raise TransferCorrupted(f"{type(self).__name__}.load_weights returned before it had read all tensors")
        except BaseException:
            self._drop_receive_channel()
            raise
        self.loaded_version, self._weights_fault = plan.version, None
        return incoming.receipt

    def _receive_channel(self, plan: TransferPlan, deadline: Deadline) -> Transport:
        if self._receive_transport is None or self._receive_address != plan.address:
            self._drop_receive_channel()
            transport = make_transport(plan.transport)
            transport.connect(plan.address, 1 + WorkerInfo.here().rank, plan.world_size, deadline)
            self._receive_transport, self._receive_address = transport, plan.address
        return self._receive_transport

    def _drop_receive_channel(self) -> None:
        if self._receive_transport is not None:
            self._receive_transport.close()
        self._receive_transport, self._receive_address = None, ""
