"""What travels: one Begin, buckets, and an End or an Abort."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ._buckets import Bucket, Piece, pack
from ._errors import TransferCorrupted
from ._ledger import Ledger, TransferReceipt
from ._spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Begin:
    """A transfer of version `version` starts; `specs` are all tensors that follow, where the sender tells."""

    version: int
    specs: tuple[TensorSpec, ...] | None = None


@dataclass(frozen=True, slots=True)
class End:
    """Everything was sent: what the sender counted."""

    receipt: TransferReceipt


@dataclass(frozen=True, slots=True)
class Abort:
    """The source raised: `reason` is its exception, as text."""

    reason: str


Message = Begin | Bucket | End | Abort

_KINDS: tuple[type[Any], ...] = (Begin, Bucket, End, Abort)
_NO_PAYLOAD = torch.empty(0, dtype=torch.uint8)


def outgoing(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    version: int,
    bucket_size_bytes: int,
    verify: bool,
    device: str = "cpu",
    specs: Callable[[], tuple[TensorSpec, ...] | None] = lambda: None,
) -> Iterator[Message]:
    """The messages of one transfer. An exception of the source is told to the receivers (Abort), then raised here. specs: of all tensors."""
    ledger = Ledger()
    try:
        yield Begin(version, specs())
        yield from pack(tensors, bucket_size_bytes, ledger, verify=verify, device=device)
    except Exception as error:
        yield Abort(f"{type(error).__name__}: {error}")
        raise
    yield End(ledger.receipt(version))


def encode(message: Message) -> tuple[int, bytes, torch.Tensor]:
    """(kind, JSON, payload). JSON and not pickle: bytes from a socket must never be able to run code."""
    match message:
        case Begin(version, specs):
            body: Any = [version, None if specs is None else [[spec.name, spec.dtype, spec.shape] for spec in specs]]
        case Bucket(pieces, _):
            body = [[p.spec.name, p.spec.dtype, p.spec.shape, p.tensor_offset, p.bucket_offset, p.size_bytes, p.checksum] for p in pieces]
        case End(receipt):
            body = [receipt.version, receipt.num_tensors, receipt.size_bytes, receipt.digest]
        case Abort(reason):
            body = reason
    payload = message.payload if isinstance(message, Bucket) else _NO_PAYLOAD
    return _KINDS.index(type(message)), json.dumps(body).encode(), payload


def decode(kind: int, text: bytes, payload: torch.Tensor) -> Message:
    """The message that `encode` was given; TransferCorrupted when it cannot be one."""
    try:
        body = json.loads(text)
        match kind:
            case 0:
                version, specs = body
                return Begin(int(version), None if specs is None else tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in specs))
            case 1:
                return Bucket(tuple(Piece(TensorSpec(name, dtype, tuple(shape)), *rest) for name, dtype, shape, *rest in body), payload)
            case 2:
                return End(TransferReceipt(*body))
            case 3:
                return Abort(str(body))
            case _:
                raise TransferCorrupted(f"a message of unknown kind {kind}")
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise TransferCorrupted(f"a message that cannot be read: {error}") from error
