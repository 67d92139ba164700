"""Only what has changed travels: exact, bit for bit."""

from collections.abc import Iterable, Iterator

import torch

from ._errors import TransferCorrupted
from ._ledger import Checksum

# A name in a transfer is that of a whole tensor, or of a part of a delta.
_INDEX, _VALUE, _CHECKSUM = "\0index", "\0value", "\0checksum"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Named = tuple[str, torch.Tensor]


class Kept:
    """The tensors of the last transfer, on the CPU, on both sides.

    version: the number of that transfer (`TransferPlan.keep`); 0 when there are none that can be built on.
    """

    def __init__(self) -> None:
        self.version = 0
        self.tensors: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        """Hold nothing: the next transfer sends everything."""
        self.version, self.tensors = 0, {}

    def recording(self, tensors: Iterable[Named], version: int) -> Iterator[Named]:
        """Pass whole tensors through, keeping copies. They are `version` once all have passed."""
        self.forget()
        for name, tensor in tensors:
            self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
            yield name, tensor
        self.version = version

    def changes(self, tensors: Iterable[Named], version: int) -> Iterator[Named]:
        """What has to be sent for `tensors`, which are `version`: index and value of changed elements, or the whole tensor where that is less."""
        self.version = 0
        for name, tensor in tensors:
            new = tensor.detach().to("cpu").contiguous()
            old = self.tensors.get(name)
            if old is None or old.shape != new.shape or old.dtype != new.dtype:
                self.tensors[name] = new.clone()
                yield name, new
                continue
            bits_old, bits_new = _bits(old), _bits(new)
            changed = (bits_old != bits_new).nonzero()[:, 0]
            if not len(changed):
                continue
            wide = torch.int32 if len(bits_new) <= torch.iinfo(torch.int32).max else torch.int64
            values = bits_new[changed]
            bits_old[changed] = values
            if len(changed) * (wide.itemsize + values.element_size()) >= len(bits_new) * values.element_size():
                yield name, new
                continue
            yield name + _INDEX, changed.to(wide)
            yield name + _VALUE, values
            yield name + _CHECKSUM, _checksum(old)
        self.version = version

    def applied(self, parts: Iterable[Named], version: int) -> Iterator[Named]:
        """The whole tensors, in the order in which they were sent at first, from what `changes` gave on the other side.

        Raises TransferCorrupted when a tensor comes out otherwise than it was.
        """
        self.version = 0
        waiting = iter(list(self.tensors))
        index = torch.empty(0, dtype=torch.int64)
        for part, received in parts:
            tensor = received.to("cpu")
            name, mark, kind = part.partition("\0")
            if mark and kind == _INDEX[1:]:
                index = tensor.long()
                continue
            if mark and kind == _VALUE[1:]:
                if name not in self.tensors or (len(index) and int(index.max()) >= self.tensors[name].numel()):
                    raise TransferCorrupted(f"{name}: a delta to a tensor that this receiver does not hold")
                _bits(self.tensors[name])[index] = tensor
                continue
            if mark:
                if not torch.equal(_checksum(self.tensors[name]), tensor):
                    raise TransferCorrupted(f"{name}: what the delta gives is not what the sender has")
            else:
                known = name in self.tensors
                self.tensors[name] = tensor.clone()
                if not known:
                    yield name, self.tensors[name]
                    continue
            for unchanged in waiting:
                yield unchanged, self.tensors[unchanged]
                if unchanged == name:
                    break
        for unchanged in waiting:
            yield unchanged, self.tensors[unchanged]
        self.version = version


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor as integers, so that NaNs and both zeros are told apart."""
    return tensor.view(-1).view(_INTEGERS[tensor.element_size()])


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [8]."""
    checksum = Checksum()
    checksum.add(tensor.view(-1).view(torch.uint8))
    return torch.tensor(list(checksum.value.to_bytes(8, "little")), dtype=torch.uint8)
