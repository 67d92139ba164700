"""Named tensors to byte buckets of bounded size, and back."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ._buffers import Buffers
from ._errors import ChannelMisuse, TransferCorrupted
from ._ledger import Checksum, Ledger
from ._spec import TensorSpec

_CHUNK = 1 << 18  # bytes that are copied and checksummed while they are in the processor's cache
_ALIGNMENT = 64  # of a tensor's first byte in its bucket, so that a view of any dtype is aligned


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one tensor's bytes inside a bucket: mostly the whole tensor.

    `checksum` is that (XXH3, 64 bits) of the tensor's bytes from its first one to the end of this piece (0 when nothing is verified).
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
    def __init__(self, capacity: int, buffers: Buffers) -> None:
        self._capacity = capacity
        self._buffers = buffers
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

    def put(self, spec: TensorSpec, offset: int, data: torch.Tensor, checksum: Checksum | None) -> int:
        """Copy `data` (bytes `offset` and on of the tensor) in; the tensor's checksum so far."""
        if self._payload is None:
            self._payload = self._buffers.take(self._capacity)
        begin = self._start
        end = begin + data.numel()
        space = self._payload[begin:end]
        step = _CHUNK if checksum and space.device.type == "cpu" else max(1, data.numel())
        for start in range(0, data.numel(), step):
            part = space[start : start + step].copy_(data[start : start + step])
            if checksum:
                checksum.add(part)
        so_far = checksum.value if checksum else 0
        self.pieces.append(Piece(spec, offset, begin, data.numel(), so_far))
        self._used = end
        return so_far

    def take(self) -> Bucket:
        """What is in it; it is empty then, and has no memory until something is put in."""
        assert self._payload is not None, "nothing was put in"
        bucket = Bucket(tuple(self.pieces), self._payload[: self._used])
        self._payload, self.pieces, self._used = None, [], 0
        return bucket


def check_bucket_size(size_bytes: int) -> None:
    """ChannelMisuse for buckets that could hold nothing."""
    if size_bytes < _ALIGNMENT:
        raise ChannelMisuse(f"bucket_size_bytes is {size_bytes}; it must be at least {_ALIGNMENT}")


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_size_bytes: int, ledger: Ledger, *, verify: bool = True, device: str = "cpu"
) -> Iterator[Bucket]:
    """Copy named tensors (any device, any dtype) into buckets of at most `bucket_size_bytes` on `device`, and enter them in `ledger`.

    A tensor that fits a bucket lies whole in one; a larger one fills as many as it needs. The receiver may keep views of a bucket; the memory of one
    that it has let go of is used for a later one.
    """
    check_bucket_size(bucket_size_bytes)
    bucket = _OpenBucket(bucket_size_bytes, Buffers(device))
    for name, tensor in tensors:
        spec = TensorSpec.of(name, tensor)
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if bucket.pieces and data.numel() > bucket.room and (data.numel() <= bucket_size_bytes or bucket.room <= 0):
            yield bucket.take()
        offset, checksum = 0, Checksum() if verify else None
        while True:
            taken = min(data.numel() - offset, bucket.room)
            so_far = bucket.put(spec, offset, data[offset : offset + taken], checksum)
            offset += taken
            if offset == data.numel():
                break
            yield bucket.take()
        ledger.add(spec, so_far)
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
        self._checksum = Checksum()

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
        if not piece.tensor_offset:
            self._checksum = Checksum()
        if self._verify:
            self._checksum.add(data)
        so_far = self._checksum.value if self._verify else 0
        if so_far != piece.checksum:
            raise TransferCorrupted(f"{spec.name}: checksum {so_far:016x} differs from the sender's {piece.checksum:016x}")
        if piece.size_bytes == spec.size_bytes:
            self._ledger.add(spec, so_far)
            return spec.name, _as_tensor(data, spec)
        if self._spec is None:
            self._spec, self._partial = spec, torch.empty(spec.size_bytes, dtype=torch.uint8, device=payload.device)
        self._partial[self._filled : self._filled + data.numel()].copy_(data)
        self._filled += data.numel()
        if self._filled < spec.size_bytes:
            return None
        whole = self._partial
        self._spec, self._partial, self._filled = None, torch.empty(0, dtype=torch.uint8), 0
        self._ledger.add(spec, so_far)
        return spec.name, _as_tensor(whole, spec)


def _as_tensor(data: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return data.view(spec.torch_dtype).view(spec.shape) if data.numel() else torch.empty(spec.shape, dtype=spec.torch_dtype)
