"""The mixin that makes a trainer (or any remote class with weights) the sender of transfers."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from twinkle_remote import remote_function

from ._deadline import Deadline
from ._delta import Kept
from ._errors import ChannelMisuse, TensorNotSupported
from ._messages import Message, outgoing
from ._plan import Route, TransferPlan, WorkerInfo
from ._spec import TensorSpec
from ._transport import Transport, make_transport


class WeightSender:
    """Mixin for a `remote_class` that is a `WeightSource`: gives it the remote methods that `CheckpointEngineManager` calls.

    Every rank iterates over `iter_weights()`, which may be collective; rank 0 sends what it yields, and where `every_rank_has_weights` others may,
    too. When sending fails, a rank still iterates to the end, so that the other ranks do not wait for it in a collective, and raises then. A class
    with adapters (LoRA) defines `iter_adapter` and `adapter_config`, too, and `iter_merged` for samplers that take whole weights only.
    """

    every_rank_has_weights: bool = False
    """Whether `iter_weights`, `iter_adapter` and `iter_merged` yield the same whole tensors on all ranks, and not on rank 0 alone."""

    _send_transport: Transport | None = None
    _send_address: str = ""
    _send_connected: bool = False
    _sent_specs: tuple[TensorSpec, ...] | None = None
    _sent_kept: Kept | None = None

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource.iter_weights`."""
        raise NotImplementedError(f"{type(self).__name__} is a WeightSender: it must define iter_weights()")

    def iter_adapter(self, adapter_name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """As `iter_weights`: the matrices of an adapter, under peft's names (`base_model.model.….lora_A.weight`)."""
        raise NotImplementedError(f"{type(self).__name__} sends no adapters: it does not define iter_adapter()")

    def iter_merged(self, adapter_name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """As `iter_weights`, names and shapes alike, with an adapter added to the weights."""
        raise NotImplementedError(f"{type(self).__name__} sends no merged weights: it does not define iter_merged()")

    def adapter_config(self, adapter_name: str) -> Mapping[str, Any]:
        """The content of peft's adapter_config.json for an adapter."""
        raise NotImplementedError(f"{type(self).__name__} sends no adapters: it does not define adapter_config()")

    def weight_specs(self) -> tuple[TensorSpec, ...] | None:
        """Names, dtypes and shapes of what `iter_weights` yields, in order; collective like it, and called before it.

        None where the class cannot tell without exporting its weights: receivers then check each tensor as it comes, in the first transfer; later
        ones are announced as the first one was.
        """
        return None

    @remote_function(dispatch="all", collect="none")
    def weight_sender_info(self) -> WorkerInfo:
        """Where this rank lives."""
        can_send = self.every_rank_has_weights or WorkerInfo.here().rank == 0
        return WorkerInfo.here(can_send=can_send, channel=self._send_address if self._send_connected else "")

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def open_weight_channel(self, transport: str, timeout_s: float, ranks: Sequence[int] = (0,)) -> str:
        """On these ranks: replace the channel by a new one and return the address at which its receivers meet it. Elsewhere: close it."""
        self._drop_send_channel()
        if WorkerInfo.here().rank not in ranks:
            return ""
        channel = make_transport(transport)
        self._send_address = channel.listen(Deadline(timeout_s))
        self._send_transport = channel
        return self._send_address

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def sent_adapter_config(self, adapter_name: str) -> str:
        """`adapter_config` as JSON."""
        return json.dumps(dict(self.adapter_config(adapter_name)))

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def kept_version_sent(self) -> int:
        """The number of the transfer that a delta could be relative to; 0 for none."""
        return 0 if self._sent_kept is None else self._sent_kept.version

    @remote_function(dispatch="all", collect="none")
    def send_weights(self, plan: TransferPlan) -> None:
        """Send all weights, what has changed of them, or an adapter to the receivers of `plan`; returns when this rank has handed over the last byte.

        Raises what `iter_weights` raises (the receivers are told), TransferTimeout or PeerFailed.
        """
        route = plan.routes.get(WorkerInfo.here().rank)
        if route is None:
            if plan.sends_weights:
                self._specs()
            for _ in self._source(plan):
                pass
            return
        weights = self._source(plan)
        try:
            self._send(self._messages(weights, plan), route, plan.timeout_s)
        except BaseException:
            self._drop_send_channel()
            self._sent_kept = None
            for _ in weights:  # nothing is left when the source itself raised
                pass
            raise

    def _source(self, plan: TransferPlan) -> Iterator[tuple[str, torch.Tensor]]:
        if plan.merge:
            return self.iter_merged(plan.adapter_name)
        return self.iter_weights() if plan.sends_weights else self.iter_adapter(plan.adapter_name)

    def _messages(self, weights: Iterator[tuple[str, torch.Tensor]], plan: TransferPlan) -> Iterator[Message]:
        sizes: dict[str, Any] = {"version": plan.version, "bucket_size_bytes": plan.bucket_size_bytes, "verify": plan.verify}
        sizes["device"] = getattr(self._send_transport, "device", "cpu")
        if not plan.sends_weights:
            return outgoing(weights, **sizes)
        sent: Iterable[tuple[str, torch.Tensor]] = self._noted(weights)
        if plan.dtype not in (None, "same"):
            dtype = TensorSpec("dtype", str(plan.dtype), ()).torch_dtype
            sent = ((name, tensor.to(dtype) if tensor.is_floating_point() else tensor) for name, tensor in sent)
        if plan.keep:
            self._sent_kept = kept = self._sent_kept or Kept()
            sent = kept.changes(sent, plan.keep) if plan.base_version else kept.recording(sent, plan.keep)
        else:
            self._sent_kept = None
        return outgoing(sent, specs=lambda: _converted(self._specs(), plan.dtype), **sizes)

    def _specs(self) -> tuple[TensorSpec, ...] | None:
        if self._sent_specs is None:
            self._sent_specs = self.weight_specs()
        return self._sent_specs

    def _noted(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights. They must be those that the receivers were told of; where they were told of none, these are noted for the next transfer."""
        told, self._sent_specs = self._sent_specs, None
        seen: list[TensorSpec] = []
        for name, tensor in weights:
            spec = TensorSpec.of(name, tensor)
            if told is not None and (len(seen) >= len(told) or told[len(seen)] != spec):
                raise TensorNotSupported(f"{name}: the source yields {spec}, which is not what it announced or had before")
            seen.append(spec)
            yield name, tensor
        if told is not None and len(seen) < len(told):
            raise TensorNotSupported(f"{told[len(seen)].name}: the source does not yield it any more")
        self._sent_specs = tuple(seen)

    def _send(self, messages: Iterator[Message], route: Route, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        if self._send_transport is None or self._send_address != route.address:
            raise ChannelMisuse(f"the weight channel {route.address} is not open here; call sync_weights of one CheckpointEngineManager at a time")
        if not self._send_connected:
            self._send_transport.connect(route.address, 0, route.world_size, deadline)
            self._send_connected = True
        self._send_transport.send(messages, deadline)

    def _drop_send_channel(self) -> None:
        if self._send_transport is not None:
            self._send_transport.close()
        self._send_transport, self._send_address, self._send_connected = None, "", False


def _converted(specs: tuple[TensorSpec, ...] | None, dtype: str | None) -> tuple[TensorSpec, ...] | None:
    if specs is None or dtype in (None, "same"):
        return specs
    return tuple(TensorSpec(spec.name, str(dtype), spec.shape) if spec.torch_dtype.is_floating_point else spec for spec in specs)
