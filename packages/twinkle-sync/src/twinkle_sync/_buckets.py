"""Named tensors to byte buckets of bounded size, and back."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ._errors import ChannelMisuse, TransferCorrupted
from ._ledger import Ledger, checksum
from ._spec import TensorSpec

_ALIGNMENT = 64  # of a tensor's first byte in its bucket, so that a view of any dtype is aligned


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one tensor's bytes inside a bucket: mostly the whole tensor.

    `checksum` is the CRC-32 of the tensor's bytes from its first one to the end of this piece (0 when nothing is verified).
    """

    spec: TensorSpec
    tensor_offset: int
    bucket_offset: int
    size_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Pieces and the bytes that they lie in (`payload`, uint8 [N]; on the CPU, or on a GPU for transports of those)."""

    pieces: tuple[Piece, ...]
    payload: torch.Tensor


class _OpenBucket:
    def __init__(self, capacity: int, device: str) -> None:
        self._capacity = capacity
        self._device = device
        self._payload: torch.Tensor | None = None
        self.pieces: list[Piece] = []
        self._used = 0

    @property
    def room(self) -> int:
        return self._capacity - self._start

    @property
    def _start(self) -> int:
        """Where the next piece may begin."""
        return -(-self._used // _ALIGNMENT) * _ALIGNMENT

    def put(self, spec: TensorSpec, offset: int, data: torch.Tensor, crc: int, verify: bool) -> int:
        """Copy `data` (bytes `offset` and on of the tensor) in; the tensor's checksum so far."""
        if self._payload is None:
            self._payload = torch.empty(self._capacity, dtype=torch.uint8, device=self._device)
        begin = self._start
        end = begin + data.numel()
        self._payload[begin:end].copy_(data)
        if verify:
            crc = checksum(self._payload[begin:end], crc)
        self.pieces.append(Piece(spec, offset, begin, data.numel(), crc))
        self._used = end
        return crc

    def take(self) -> Bucket:
        """What is in it; it is empty then, and has no memory until something is put in."""
        assert self._payload is not None, "nothing was put in"
        bucket = Bucket(tuple(self.pieces), self._payload[: self._used])
        self._payload, self.pieces, self._used = None, [], 0
        return bucket


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_size_bytes: int, ledger: Ledger, *, verify: bool = True, device: str = "cpu"
) -> Iterator[Bucket]:
    """Copy named tensors (any device, any dtype) into buckets of at most `bucket_size_bytes` on `device`, and enter them in `ledger`.

    A tensor that fits a bucket lies whole in one; a larger one fills as many as it needs. Every bucket owns its memory: the
    receiver may keep views of it. A bucket that the receiver has let go of is freed before the next one is made.
    """
    if bucket_size_bytes < _ALIGNMENT:
        raise ChannelMisuse(f"bucket_size_bytes is {bucket_size_bytes}; it must be at least {_ALIGNMENT}")
    bucket = _OpenBucket(bucket_size_bytes, device)
    for name, tensor in tensors:
        spec = TensorSpec.of(name, tensor)
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if bucket.pieces and data.numel() > bucket.room and (data.numel() <= bucket_size_bytes or bucket.room <= 0):
            yield bucket.take()
        offset, crc = 0, 0
        while True:
            taken = min(data.numel() - offset, bucket.room)
            crc = bucket.put(spec, offset, data[offset : offset + taken], crc, verify)
            offset += taken
            if offset == data.numel():
                break
            yield bucket.take()
        ledger.add(spec, crc)
    if bucket.pieces:
        yield bucket.take()


class Unpacker:
    """Turns buckets back into named tensors, in the order in which they were packed.

    A whole tensor is a view of its bucket; one that was split is put together in memory of its own.
    """

    def __init__(self, ledger: Ledger, *, verify: bool = True) -> None:
        self._ledger = ledger
        self._verify = verify
        self._spec: TensorSpec | None = None  # of the tensor that is not complete yet
        self._partial = torch.empty(0, dtype=torch.uint8)
        self._filled = 0
        self._crc = 0

    def feed(self, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
        """The tensors that this bucket completes; TransferCorrupted when a byte differs or a piece is missing."""
        return [complete for piece in bucket.pieces if (complete := self._take(piece, bucket.payload)) is not None]

    def finish(self) -> None:
        """TransferCorrupted when a tensor is still incomplete."""
        if self._spec is not None:
            raise TransferCorrupted(f"{self._spec.name}: {self._filled} of {self._spec.size_bytes} bytes arrived")

    def _take(self, piece: Piece, payload: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        spec = piece.spec
        if (self._spec is not None and spec != self._spec) or piece.tensor_offset != self._filled:
            raise TransferCorrupted(f"{spec.name}: expected byte {self._filled} of {(self._spec or spec).name}, got byte {piece.tensor_offset}")
        end = piece.bucket_offset + piece.size_bytes
        if end > payload.numel() or piece.tensor_offset + piece.size_bytes > spec.size_bytes:
            raise TransferCorrupted(f"{spec.name}: a piece reaches past the end of its bucket or tensor")
        data = payload[piece.bucket_offset : end]
        crc = checksum(data, self._crc) if self._verify else 0
        if crc != piece.checksum:
            raise TransferCorrupted(f"{spec.name}: checksum {crc:08x} differs from the sender's {piece.checksum:08x}")
        if piece.size_bytes == spec.size_bytes:
            self._ledger.add(spec, crc)
            return spec.name, _as_tensor(data, spec)
        if self._spec is None:
            self._spec, self._partial = spec, torch.empty(spec.size_bytes, dtype=torch.uint8, device=payload.device)
        self._partial[self._filled : self._filled + data.numel()].copy_(data)
        self._filled += data.numel()
        self._crc = crc
        if self._filled < spec.size_bytes:
            return None
        whole = self._partial
        self._spec, self._partial, self._filled, self._crc = None, torch.empty(0, dtype=torch.uint8), 0, 0
        self._ledger.add(spec, crc)
        return spec.name, _as_tensor(whole, spec)


def _as_tensor(data: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return data.view(spec.torch_dtype).view(spec.shape) if data.numel() else torch.empty(spec.shape, dtype=spec.torch_dtype)
