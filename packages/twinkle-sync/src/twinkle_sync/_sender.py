"""The mixin that makes a trainer (or any remote class with weights) the sender of transfers."""

from collections.abc import Iterator

import torch

from twinkle_remote import remote_function

from ._deadline import Deadline
from ._errors import ChannelMisuse
from ._messages import Message, outgoing
from ._plan import TransferPlan, WorkerInfo
from ._transport import Transport, make_transport


class WeightSender:
    """Mixin for a `remote_class` that is a `WeightSource`: gives it the remote methods that `CheckpointEngineManager` calls.

    Every rank iterates over `iter_weights()`, which may be collective; rank 0 sends what it yields. When sending fails, rank 0 still
    iterates to the end, so that the other ranks do not wait for it in a collective, and raises then.
    """

    _send_transport: Transport | None = None
    _send_address: str = ""
    _send_connected: bool = False

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource.iter_weights`."""
        raise NotImplementedError(f"{type(self).__name__} is a WeightSender: it must define iter_weights()")

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def weight_sender_info(self) -> WorkerInfo:
        """Where this rank lives."""
        return WorkerInfo.here()

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def open_weight_channel(self, transport: str, timeout_s: float) -> str:
        """On rank 0: replace the channel by a new one and return the address at which the receivers meet it."""
        self._drop_send_channel()
        channel = make_transport(transport)
        self._send_address = channel.listen(Deadline(timeout_s))
        self._send_transport = channel
        return self._send_address

    @remote_function(dispatch="all", collect="none")
    def send_weights(self, plan: TransferPlan) -> None:
        """Send all weights to the receivers of `plan`; returns when rank 0 has handed over the last byte.

        Raises what `iter_weights` raises (the receivers are told), TransferTimeout or PeerFailed.
        """
        weights = self.iter_weights()
        if WorkerInfo.here().rank != 0:
            for _ in weights:
                pass
            return
        try:
            messages = outgoing(weights, version=plan.version, bucket_size_bytes=plan.bucket_size_bytes, verify=plan.verify)
            self._send(messages, plan)
        except BaseException:
            self._drop_send_channel()
            for _ in weights:  # nothing is left when the source itself raised
                pass
            raise

    def _send(self, messages: Iterator[Message], plan: TransferPlan) -> None:
        deadline = Deadline(plan.timeout_s)
        if self._send_transport is None or self._send_address != plan.address:
            raise ChannelMisuse(f"the weight channel {plan.address} is not open here; call sync_weights of one CheckpointEngineManager at a time")
        if not self._send_connected:
            self._send_transport.connect(plan.address, 0, plan.world_size, deadline)
            self._send_connected = True
        self._send_transport.send(messages, deadline)

    def _drop_send_channel(self) -> None:
        if self._send_transport is not None:
            self._send_transport.close()
        self._send_transport, self._send_address, self._send_connected = None, "", False
