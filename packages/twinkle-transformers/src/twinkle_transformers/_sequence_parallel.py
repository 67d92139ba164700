"""Sequence parallelism: rows are cut along their length over ranks, and attention brings them together.

Ulysses (arXiv:2309.14509) exchanges sequence shares for heads before attention and back behind it; where heads do not divide, or by
choice, its groups form a ring (zigzag ring attention).

Shape suffixes: B rows, T columns of the batch, L columns of one rank, H query heads, K key-value heads, D size of a head.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from twinkle_data import Batch
from twinkle_mesh import DeviceMesh
from twinkle_train import ConfigError

from ._attention import Attention, AttentionFunction, Plan, Result, Rows
from ._collectives import all_to_all, gather_for_same_loss
from ._columns import Columns, divide
from ._errors import LayoutError, UnsupportedModelError
from ._gated_delta import RUNS, GatedDeltaNetPaddingFreePatch, Qwen3_5GatedDeltaNetUlyssesPatch, Runs, gated_delta_layers
from ._groups import Groups
from ._inputs import ModelInputs, counted_tokens, segment_bounds, sequence_lengths
from ._packing import packing_fault
from ._ring import ring_attention


@dataclass(frozen=True, kw_only=True)
class SequenceParallelConfig:
    """How sequences are divided.

    enabled: False is an error on a mesh that divides them. ulysses_size: how many ranks exchange heads; what is left of the mesh's
    ulysses x cp ranks is a ring. None: the mesh's ulysses_size as far as it divides the model's attention heads. gather_logits: bring whole
    logits to every rank before the loss; False gathers log-probabilities, which are as many times smaller as the vocabulary is large.

    Raises ConfigError for a size below 1.
    """

    enabled: bool = True
    ulysses_size: int | None = None
    gather_logits: bool = True

    def __post_init__(self) -> None:
        if self.ulysses_size is not None and self.ulysses_size < 1:
            raise ConfigError(f"ulysses_size must be >= 1 or None, got {self.ulysses_size}")


class SequenceParallel:
    """One rank of the ranks that share rows: pads and splits batches, attends over ranks, gathers results.

    Args:
        ranks: of the sequence-parallel group.
        rank: which of them this is.
        ulysses_size: how many exchange heads; must divide the model's attention heads and the ranks.
        group: all ranks. ulysses_group, ring_group: this rank's; None where it is alone.
        device: of tensors.
    """

    def __init__(self, *, ranks: int, rank: int, ulysses_size: int, group: Any, ulysses_group: Any, ring_group: Any, device: torch.device) -> None:
        self.ranks, self.rank, self.device = ranks, rank, device
        self.ulysses_size, self.ring_size = ulysses_size, ranks // ulysses_size
        self.group, self._ulysses, self._ring = group, ulysses_group, ring_group

    def split(self, batch: Batch) -> tuple[ModelInputs, Columns]:
        """Pads a batch and gives this rank's part of it, and where all of it went. Targets were shifted by the collator, before."""
        columns = divide(batch, ulysses=self.ulysses_size, ring=self.ring_size)
        own_BL = columns.of_rank(self.rank, self.ranks)

        def part(array: NDArray[Any], fill: float) -> torch.Tensor:
            return torch.as_tensor(_take(array, own_BL, fill), device=self.device)

        # What the model's masks are about: without a ring the columns of all ranks, with one those of this ring rank's Ulysses group.
        plain = self.ring_size == 1 and not batch.is_packed and bool(batch.valid[:, 0].all())
        shape = (len(own_BL), own_BL.shape[1] * self.ulysses_size)
        ids = None if plain else torch.as_tensor(_take(batch.sequence_ids, self._of_group(columns), -1), device=self.device)
        rows = Rows(shape=shape, sequence_ids_BT=ids, segments=() if plain else columns.segments, lengths_BL=part(sequence_lengths(batch), 1))
        place_BT, order_BP = (torch.as_tensor(array, device=self.device) for array in (columns.place_BT, columns.order_BP))
        inputs = ModelInputs(
            rows=rows,
            runs=Runs(bounds=tuple(segment_bounds(batch).tolist()), place_BT=place_BT, order_BP=order_BP),
            input_ids_BT=part(batch.input_ids, 0),
            position_ids_BT=part(batch.position_ids, 0),
            padding_mask_BT=part(batch.valid.astype(np.int64), 0),
            counted_BT=part(counted_tokens(batch), 0),
            targets_BT=part(batch.targets, 0),
            temperature_BT=part(batch.temperature, 1),
        )
        return inputs, columns

    def same_on_all_ranks(self, rows: Sequence[NDArray[np.int64]]) -> bool:
        """Whether all ranks have rows of these tokens. Collective."""
        checksum = 0
        for row in rows:
            checksum = zlib.crc32(np.ascontiguousarray(row, dtype=np.int64).tobytes(), zlib.crc32(len(row).to_bytes(8, "little"), checksum))
        bounds = torch.tensor([checksum, -checksum], dtype=torch.int64, device=self.device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self.group)
        return bool(bounds[0] == -bounds[1])

    def gather(self, values: torch.Tensor, columns: Columns) -> torch.Tensor:
        """Values ``[B, L, ...]`` of all ranks as the batch has them, ``[B, T, ...]``. Every rank must make the same of it."""
        whole = gather_for_same_loss(values, 1, self.group)
        place = torch.as_tensor(columns.place_BT, device=values.device)
        return whole[torch.arange(len(whole), device=values.device)[:, None], place]

    def attend(self, whole: AttentionFunction, module: Any, tensors: Sequence[torch.Tensor], plan: Plan, options: dict[str, Any]) -> Result:
        """Attention of this rank's columns to all: `whole` is that of whole rows, q, k, v are ``[B, H or K, L, D]``; gives ``[B, L, H, D]``."""
        query, key, value = tensors
        if key.shape[1] % self.ulysses_size:
            # As many copies as divide: the gradients of copies add up.
            copies = math.lcm(key.shape[1], self.ulysses_size) // key.shape[1]
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        query, key, value = (self._heads_for_columns(tensor) for tensor in (query, key, value))
        if self.ring_size == 1:
            out_BTHD, _ = whole(_HeadShare(module, self, query, key), query, key, value, plan, **self._options(options))
        else:
            out_BTHD = self._attend_ring(module, query, key, value, plan, options)
        return self._columns_for_heads(out_BTHD), None

    def share_of_heads(self, per_head: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of one entry a head."""
        return per_head.chunk(self.ulysses_size)[self.rank % self.ulysses_size]

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        if options.get("position_bias") is not None:
            raise UnsupportedModelError("attention with a position_bias cannot be divided over ranks")
        sinks = options.get("s_aux")
        # Position ids are those of this rank's columns, and would be taken for those of the whole rows.
        return options | {"position_ids": None} | ({} if sinks is None else {"s_aux": self.share_of_heads(sinks)})

    def _attend_ring(
        self, module: Any, query_BHTD: torch.Tensor, key_BKTD: torch.Tensor, value_BKTD: torch.Tensor, plan: Plan, options: dict[str, Any]
    ) -> torch.Tensor:
        if options.get("dropout"):
            raise UnsupportedModelError(f"{type(module).__name__} has attention dropout, which ring attention does not have: set attention_dropout=0")
        rows, num_heads, columns, size = query_BHTD.shape
        flat = [tensor.transpose(0, 1).flatten(1, 2) for tensor in (query_BHTD, key_BKTD, value_BKTD)]
        scale = options.get("scaling")
        out_HND = ring_attention(*flat, segments=plan.rows.segments, scale=size**-0.5 if scale is None else scale, group=self._ring)
        return out_HND.view(num_heads, rows, columns, -1).permute(1, 2, 0, 3)

    def _of_group(self, columns: Columns) -> NDArray[np.int64]:
        """The columns of this rank's Ulysses group, in their order."""
        return columns.of_rank(self.rank // self.ulysses_size, self.ring_size)

    def _heads_for_columns(self, tensor_BHLD: torch.Tensor) -> torch.Tensor:
        """Gives away heads for columns: ``[B, H, L, D]`` to ``[B, H / ulysses, L * ulysses, D]``."""
        size = self.ulysses_size
        if size == 1:
            return tensor_BHLD
        rows, heads, length, width = tensor_BHLD.shape
        sent = tensor_BHLD.view(rows, size, heads // size, length, width).transpose(0, 1)
        came = all_to_all(sent, [1] * size, [1] * size, self._ulysses)
        return came.permute(1, 2, 0, 3, 4).reshape(rows, heads // size, size * length, width)

    def _columns_for_heads(self, tensor_BTHD: torch.Tensor) -> torch.Tensor:
        """Gives away columns for heads: ``[B, L * ulysses, H / ulysses, D]`` to ``[B, L, H, D]``."""
        size = self.ulysses_size
        if size == 1:
            return tensor_BTHD.contiguous()
        rows, columns, heads, width = tensor_BTHD.shape
        sent = tensor_BTHD.reshape(rows, size, columns // size, heads, width).transpose(0, 1)
        came = all_to_all(sent, [1] * size, [1] * size, self._ulysses)
        return came.permute(1, 2, 0, 3, 4).reshape(rows, columns // size, size * heads, width)


class SequenceParallelStrategy:
    """Divides a model's sequences over the ulysses and cp ranks of a mesh, from `install` to `remove`.

    Collective: all ranks of the mesh make it, after torch.distributed's default group.

    Args:
        device_mesh: its ulysses_size x cp_size ranks share rows.
        config: see SequenceParallelConfig.
        timeout_s: how long a collective may wait for its peers.

    Raises:
        ConfigError: enabled is False. LayoutError: the mesh has no such ranks, or is not that of the processes.
    """

    def __init__(self, device_mesh: DeviceMesh, config: SequenceParallelConfig | None = None, *, timeout_s: float = 600) -> None:
        self.config = config or SequenceParallelConfig(gather_logits=False)
        self._ranks = device_mesh.ulysses_size * device_mesh.cp_size
        if self._ranks == 1:
            raise LayoutError("the mesh divides no sequences: give it ulysses_size or cp_size")
        if not self.config.enabled:
            raise ConfigError(f"sequence parallelism is not enabled, but the mesh divides sequences over {self._ranks} ranks: leave ulysses_size out")
        self._mesh = device_mesh
        self._groups = Groups(device_mesh, timeout_s)
        self._model: Any = None
        self._attention: Attention | None = None
        self._delta: GatedDeltaNetPaddingFreePatch | None = None
        self._core: SequenceParallel | None = None

    def install(self, model: Any, attention: Attention | None = None) -> SequenceParallel:
        """Makes a model of transformers attend over ranks, and returns what splits its batches.

        attention: of this model, if it was made already and `packing_fault` found nothing.

        Raises:
            UnsupportedModelError: tokens of this model meet otherwise than in attention that can be divided or in Gated DeltaNet layers.
            LayoutError: heads do not divide.
        """
        delta = gated_delta_layers(model)
        if attention is None:
            attention = Attention(model)
            patch = GatedDeltaNetPaddingFreePatch().apply(model) if delta else None
            fault = packing_fault(model, attention)
            if patch is not None:
                patch.remove()
            if fault is not None:
                attention.remove()
                raise UnsupportedModelError(f"sequences cannot be divided over ranks: {fault}")
        heads = int(model.config.get_text_config(decoder=True).num_attention_heads)
        ulysses = self._ulysses_size(heads, type(model).__name__)
        if ulysses < self._ranks and attention.special:
            raise UnsupportedModelError(
                f"{type(model).__name__} has {', '.join(sorted(attention.special))}, which ring attention does not have: set ulysses_size to all "
                f"{self._ranks} ranks; it must divide the {heads} attention heads"
            )
        core = self._make_core(ulysses)
        if delta:
            self._delta = Qwen3_5GatedDeltaNetUlyssesPatch(core).apply(model)
        attention.distribute, attention.makes_masks = core.attend, core.ring_size == 1
        self._model, self._attention, self._core = model, attention, core
        return core

    def forward(self, batch: Batch) -> torch.Tensor:
        """The installed model's logits of a batch, with a graph: whole, ``[B, T, V]``, or with gather_logits=False this rank's, ``[B, L, V]``.

        Every rank of the group gives the same batch. A loss of whole logits must be the same on every rank; gradients of weights are then to be
        summed over ranks.
        """
        assert self._core is not None, "install the strategy on a model first"
        assert self._attention is not None
        inputs, columns = self._core.split(batch)
        named: dict[str, Any] = {"attention_mask": inputs.padding_mask_BT, "position_ids": inputs.position_ids_BT}
        if self._delta is not None:
            named[RUNS] = inputs.runs
        with self._attention.of(inputs.rows):
            logits_BLV = self._model(input_ids=inputs.input_ids_BT, use_cache=False, **named).logits
        return self._core.gather(logits_BLV, columns) if self.config.gather_logits else logits_BLV

    def remove(self) -> None:
        """The model attends as it did before."""
        if self._attention is not None:
            self._attention.remove()
        if self._delta is not None:
            self._delta.remove()
        self._model, self._attention, self._delta, self._core = None, None, None, None

    def _ulysses_size(self, heads: int, name: str) -> int:
        size = self.config.ulysses_size
        if size is None:
            return math.gcd(self._mesh.ulysses_size, heads)
        if self._ranks % size or heads % size:
            raise LayoutError(f"ulysses_size={size} must divide the {self._ranks} ranks that share rows and the {heads} attention heads of {name}")
        return size

    def _make_core(self, ulysses: int) -> SequenceParallel:
        partition = self._mesh.rank_groups("cp", "ulysses")
        ulysses_groups = [ranks[start : start + ulysses] for ranks in partition for start in range(0, self._ranks, ulysses)]
        rings = [ranks[start::ulysses] for ranks in partition for start in range(ulysses)]
        mine = next(ranks for ranks in partition if self._groups.rank in ranks)
        return SequenceParallel(
            ranks=self._ranks,
            rank=mine.index(self._groups.rank),
            ulysses_size=ulysses,
            group=self._groups.sequence,
            ulysses_group=self._groups.group_of(ulysses_groups),
            ring_group=self._groups.group_of(rings),
            device=self._groups.device,
        )


class _HeadShare:
    """An attention module of which this rank has some heads: what an attention function looks up in it."""

    def __init__(self, module: Any, core: SequenceParallel, query_BHTD: torch.Tensor, key_BKTD: torch.Tensor) -> None:
        self._module = module
        self.num_key_value_groups = query_BHTD.shape[1] // key_BKTD.shape[1]
        sinks = getattr(module, "sinks", None)
        if sinks is not None:
            self.sinks = core.share_of_heads(sinks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _take(array: NDArray[Any], columns_BL: NDArray[np.int64], fill: float) -> NDArray[Any]:
    """The columns of an array ``[..., B, T]``; `fill` at column -1."""
    index = np.broadcast_to(np.maximum(columns_BL, 0), (*array.shape[:-1], columns_BL.shape[1]))
    return np.where(columns_BL >= 0, np.take_along_axis(array, index, axis=-1), np.asarray(fill, dtype=array.dtype))
