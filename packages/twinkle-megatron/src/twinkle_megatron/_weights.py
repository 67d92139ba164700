"""Moves weights between a Hugging Face checkpoint and the shards of all ranks.

mbridge knows names and formats; which rank has which part is known here. (mbridge 0.15.1's own loops gather experts over the wrong group when
expert tensor parallelism differs from tensor parallelism, and agree upon every single tensor by exchanging pickled objects.)
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ._errors import CheckpointError
from ._lora_plan import LinearLayer

_EXPERTS = ".mlp.experts.linear_fc"
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_LINEAR = re.compile(r"decoder\.layers\.\d+\..*\blinear_\w+\.weight\d*")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One tensor of one pipeline stage, the same on all ranks. name: with the layer's number in the whole model, and the expert's on this rank."""

    stage: int
    chunk: int
    local_name: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    split_axis: int | None
    is_buffer: bool


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where this rank's part of one weight lies in the whole one.

    key: the name of the whole weight, the same in every layout. shape: the whole's. tensor: this rank's part. parts: stretches of the part's first
    axis, each (first row, number of rows, offset of that row and of column 0 in the whole); the part's other rows are padding.
    """

    key: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    parts: tuple[tuple[int, int, tuple[int, ...]], ...]
    is_copy: bool = False


class WeightMap:
    """Which weights a model has on which stage, and how their parts make wholes.

    Args:
        names: a bridge of mbridge, built.
        chunks: this rank's bare model chunks.
    """

    def __init__(self, names: Any, chunks: Sequence[Any]) -> None:
        self._names = names
        self._mpu = names.mpu
        mine = [entry for index, chunk in enumerate(chunks) for entry in self._entries(index, chunk)]
        stages: list[Any] = [mine]
        if self._mpu.pp_size > 1:
            stages = [None] * self._mpu.pp_size
            dist.all_gather_object(stages, mine, group=self._mpu.pp_group)
        self._plan: list[_Entry] = [entry for stage in stages for entry in stage]
        self._rank = dist.get_rank()
        self._dense_of, self._experts_of = _first_replica(self._mpu)

    def _entries(self, index: int, chunk: Any) -> Iterator[_Entry]:
        names = self._names._weight_name_mapping_mcore_local_to_global(chunk, consider_ep=False)
        parameters = dict(chunk.named_parameters())
        for local_name, tensor in _state(chunk).items():
            yield _Entry(
                stage=self._mpu.pp_rank,
                chunk=index,
                local_name=local_name,
                name=names[local_name],
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                split_axis=_split_axis(names[local_name], parameters.get(local_name)),
                is_buffer=local_name not in parameters,
            )

    # Into the model.

    def check(self, path: Path) -> None:
        """Compares the names and shapes in a folder's safetensors with those of the whole model, on every rank alike.

        Raises:
            CheckpointError: tensors are missing, or one has another shape.
        """
        with ExitStack() as stack:
            files = _open(path, stack)
            wanted = dict(self._shapes())
            missing = sorted(wanted.keys() - files.keys())
            if missing:
                raise CheckpointError(f"{path} lacks {len(missing)} tensors that its config.json calls for: {', '.join(missing[:5])}.")
            for name, shape in wanted.items():
                have = tuple(files[name].get_slice(name).get_shape())
                if have != shape:
                    raise CheckpointError(f"{path}: {name} has another shape than its config.json calls for: {have}, not {shape}.")

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The Hugging Face names and shapes of all weights, of all stages and ranks."""
        for entry in self._plan:
            is_expert = _EXPERTS in entry.name
            size = 1 if entry.split_axis is None else self._mpu.etp_size if is_expert else self._mpu.tp_size
            shape = [length * (size if axis == entry.split_axis else 1) for axis, length in enumerate(entry.shape)]
            whole = torch.empty(shape, dtype=entry.dtype, device="meta")
            for name in [self._expert_name(entry.name, rank) for rank in range(self._mpu.ep_size)] if is_expert else [entry.name]:
                hf_names, tensors = self._names._weight_to_hf_format(name, whole)
                yield from zip(hf_names, (tuple(tensor.shape) for tensor in tensors), strict=True)

    def load(self, chunks: Sequence[Any], path: Path) -> None:
        """Fills the chunks from the safetensors of a folder that fits. Every rank reads what it needs; nothing is sent."""
        mine = [entry for entry in self._plan if entry.stage == self._mpu.pp_rank]
        with ExitStack() as stack:
            files = _open(path, stack)
            wanted = {entry: self._names._weight_name_mapping_mcore_to_hf(self._on_this_rank(entry)) for entry in mine}
            states = [_state(chunk) for chunk in chunks]
            with torch.no_grad():
                for entry, names in wanted.items():
                    whole = self._names._weight_to_mcore_format(self._on_this_rank(entry), [files[name].get_tensor(name) for name in names])
                    states[entry.chunk][entry.local_name].copy_(self._part(entry, whole))

    def _on_this_rank(self, entry: _Entry) -> str:
        return entry.name if _EXPERTS not in entry.name else self._expert_name(entry.name, self._mpu.ep_rank)

    def _part(self, entry: _Entry, whole: torch.Tensor) -> torch.Tensor:
        is_expert = _EXPERTS in entry.name
        size, rank = (self._mpu.etp_size, self._mpu.etp_rank) if is_expert else (self._mpu.tp_size, self._mpu.tp_rank)
        if entry.split_axis is None or size == 1:
            return whole
        if _is_gate_and_up(entry.name):
            return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
        return whole.chunk(size, entry.split_axis)[rank]

    # Where everything lies.

    def placements(self, chunks: Sequence[Any]) -> Iterator[Placement]:
        """Where each of this rank's tensors (its parameters as they are, and the routers' biases) lies in the whole model."""
        states = [_state(chunk) for chunk in chunks]
        for entry in self._plan:
            if entry.stage == self._mpu.pp_rank:
                yield self._placement(entry, states[entry.chunk][entry.local_name])

    def _placement(self, entry: _Entry, tensor: torch.Tensor) -> Placement:
        is_expert = _EXPERTS in entry.name
        size, rank = (self._mpu.etp_size, self._mpu.etp_rank) if is_expert else (self._mpu.tp_size, self._mpu.tp_rank)
        if entry.split_axis is None:
            size, rank = 1, 0
        rows, others = entry.shape[0], entry.shape[1:]
        key = self._on_this_rank(entry)
        if entry.split_axis == 1:
            whole = (rows, others[0] * size, *others[1:])
            return Placement(key=key, shape=whole, tensor=tensor, parts=((0, rows, (0, others[0] * rank, *(0 for _ in others[1:]))),))
        origin = tuple(0 for _ in others)
        if _is_gate_and_up(entry.name):
            half = rows // 2
            parts = ((0, half, (rank * half, *origin)), (half, half, ((size + rank) * half, *origin)))
            return Placement(key=key, shape=(rows * size, *others), tensor=tensor, parts=parts)
        total = rows * size
        is_copy = key == _HEAD and self._names.hf_config.tie_word_embeddings
        if key in (_EMBEDDING, _HEAD):
            # The padding of the vocabulary, which depends on the layout, is nobody's.
            total = self._names.hf_config.vocab_size
        begin = rank * rows
        parts = ((0, max(0, min(rows, total - begin)), (begin, *origin)),)
        return Placement(key=_EMBEDDING if is_copy else key, shape=(total, *others), tensor=tensor, parts=parts, is_copy=is_copy)

    def linear_layers(self) -> list[LinearLayer]:
        """The Hugging Face model's linear layers in attention, MLPs and experts, on all stages and ranks, in their order."""
        found: list[LinearLayer] = []
        for entry in self._plan:
            # Of experts the first, which stands for all of its layer.
            if _LINEAR.fullmatch(entry.name) and (_EXPERTS not in entry.name or entry.name.endswith(".weight0")):
                found += self._linear_layers(entry)
        return found

    def _linear_layers(self, entry: _Entry) -> Iterator[LinearLayer]:
        is_expert = _EXPERTS in entry.name
        size = 1 if entry.split_axis is None else self._mpu.etp_size if is_expert else self._mpu.tp_size
        rows, columns = (length * (size if axis == entry.split_axis else 1) for axis, length in enumerate(entry.shape))
        whole = [entry.name]
        if is_expert:
            whole = [f"{entry.name.removesuffix('0')}{number}" for number in range(self._names.config.num_moe_experts)]
        names = [self._names._weight_name_mapping_mcore_to_hf(name) for name in whole]
        config, groups, widths = self._names.config, 1, [rows // len(names[0])] * len(names[0])
        if len(names[0]) == 3:
            groups = config.num_query_groups
            widths = [config.num_attention_heads * config.kv_channels, *[groups * config.kv_channels] * 2]
        assert sum(widths) == rows, f"{names[0]} are {widths} features of {rows}"
        for part, width in enumerate(widths):
            yield LinearLayer(
                stage=entry.stage,
                chunk=entry.chunk,
                module=entry.local_name.rpartition(".")[0],
                names=tuple(of_one[part].removesuffix(".weight") for of_one in names),
                part=part,
                num_parts=len(widths),
                groups=groups,
                split={None: None, 0: "column", 1: "row"}[entry.split_axis],
                is_expert=is_expert,
                in_features=columns,
                out_features=width,
            )

    # Out of the model.

    def export(self, chunks: Sequence[Any], *, gradients: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight (or gradient), whole, under its Hugging Face name, once, on rank 0; others send it their parts and yield nothing.

        Each rank iterates to the end, and only those that have a part are waited for: one data-parallel replica. Rank 0 keeps one whole weight of
        megatron-core's (which may be several of Hugging Face's) at a time, and one part of it; other ranks keep nothing.
        """
        # Walking over a model's modules takes as long as splitting its weights: buffers are looked for only where there are some.
        states = [_state(chunk) if any(entry.is_buffer for entry in self._plan) else dict(chunk.named_parameters()) for chunk in chunks]
        scratch = _Scratch()
        done: set[str] = set()
        for entry in self._plan:
            if gradients and entry.is_buffer:
                continue
            for expert_rank, owners in enumerate(self._owners(entry)):
                here: Any = None
                if self._rank in owners:
                    here = states[entry.chunk][entry.local_name]
                    here = here.main_grad if gradients else here.detach()
                if self._rank:
                    if here is not None:
                        self._send(entry, here)
                    continue
                whole = self._receive(entry, owners, here, torch.float32 if gradients else entry.dtype, scratch)
                name = self._expert_name(entry.name, expert_rank) if _EXPERTS in entry.name else entry.name
                hf_names, tensors = self._names._weight_to_hf_format(name, whole)
                for hf_name, tensor in zip(hf_names, tensors, strict=True):
                    # A tied head is on the last stage as well as the first.
                    if hf_name not in done:
                        done.add(hf_name)
                        yield hf_name, tensor

    def _owners(self, entry: _Entry) -> list[list[int]]:
        """The ranks that have the parts of an entry's whole tensors, in order: of one tensor, or of one an expert-parallel rank."""
        is_expert = _EXPERTS in entry.name
        whole_of = self._experts_of[entry.stage] if is_expert else self._dense_of[entry.stage]
        return whole_of if entry.split_axis is not None else [ranks[:1] for ranks in whole_of]

    def _send(self, entry: _Entry, here: torch.Tensor) -> None:
        for rows, _ in _stretches(entry, 1, 0):
            dist.send(here[rows].contiguous(), dst=0)

    def _receive(self, entry: _Entry, owners: Sequence[int], here: torch.Tensor | None, dtype: torch.dtype, scratch: "_Scratch") -> torch.Tensor:
        """The whole tensor. here: this rank's own part, where it has one."""
        if here is not None and len(owners) == 1:
            return here
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        shape = [length * (len(owners) if axis == entry.split_axis else 1) for axis, length in enumerate(entry.shape)]
        whole = scratch.take("whole", shape, dtype, device)
        for index, rank in enumerate(owners):
            for rows, place in _stretches(entry, len(owners), index):
                into = whole[place]
                if rank == 0:
                    assert here is not None
                    into.copy_(here[rows])
                elif into.is_contiguous():
                    dist.recv(into, src=rank)
                else:
                    part = scratch.take("part", into.shape, dtype, device)
                    dist.recv(part, src=rank)
                    into.copy_(part)
        return whole

    def _expert_name(self, name: str, ep_rank: int) -> str:
        before, _, number = name.rpartition(".weight")
        return f"{before}.weight{int(number) + ep_rank * (self._names.config.num_moe_experts // self._mpu.ep_size)}"


def _first_replica(mpu: Any) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """For each stage the ranks of the replica that rank 0 belongs to: of dense weights by tensor-parallel rank, in a list of one; of experts by
    expert-parallel and expert-tensor-parallel rank. Collective over all ranks."""
    from megatron.core import parallel_state

    data: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    expert_data: Any = parallel_state.get_expert_data_parallel_group()
    mine = ((data.rank(), mpu.pp_rank, mpu.tp_rank), (expert_data.rank(), mpu.pp_rank, mpu.ep_rank, mpu.etp_rank))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    dense = {place: rank for rank, (place, _) in enumerate(everyone)}
    experts = {place: rank for rank, (_, place) in enumerate(everyone)}
    stages = range(mpu.pp_size)
    return (
        [[[dense[0, stage, tp] for tp in range(mpu.tp_size)]] for stage in stages],
        [[[experts[0, stage, ep, etp] for etp in range(mpu.etp_size)] for ep in range(mpu.ep_size)] for stage in stages],
    )


def _state(chunk: Any) -> dict[str, torch.Tensor]:
    """Parameters, and the buffers that a checkpoint has: the router's expert biases."""
    buffers = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")}
    return dict(chunk.named_parameters()) | buffers


def _split_axis(name: str, parameter: Any) -> int | None:
    """Along which axis tensor parallelism splits a weight; None: every rank has all of it. parameter: with megatron-core's marks, or None."""
    if _EXPERTS in name:
        # Whatever the layer says: TransformerEngine's do not mark their experts' weights.
        return 0 if "linear_fc1" in name else 1
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def _is_gate_and_up(name: str) -> bool:
    return "linear_fc1.weight" in name or "linear_fc1.bias" in name


def _stretches(entry: _Entry, size: int, index: int) -> list[tuple[slice, tuple[slice, ...]]]:
    """Where a part lies in the whole of so many parts: rows of the part, and their place. Rows of the part that are neighbours stay neighbours."""
    if entry.split_axis == 1:
        columns = entry.shape[1]
        return [(slice(None), (slice(None), slice(index * columns, (index + 1) * columns)))]
    # Each rank has its part of the gate, then its part of the up projection.
    number = 2 if _is_gate_and_up(entry.name) else 1
    step = entry.shape[0] // number
    return [(slice(n * step, (n + 1) * step), (slice((n * size + index) * step, (n * size + index + 1) * step),)) for n in range(number)]


class _Scratch:
    """Memory that one weight after another is put together in: touching new memory for each would take as long as sending it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, purpose: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of any values, until the next one is taken for the same purpose."""
        size = torch.Size(shape).numel()
        kept = self._kept.get((purpose, dtype))
        if kept is None or kept.numel() < size:
            kept = self._kept[purpose, dtype] = torch.empty(size, dtype=dtype, device=device)
        return kept[:size].view(shape)


def _open(path: Path, stack: ExitStack) -> dict[str, Any]:
    """An open file for every tensor in a folder of safetensors.

    Raises:
        CheckpointError: one of them is not whole.
    """
    from safetensors import SafetensorError, safe_open

    files: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}): copy or download it again.") from None
        files.update(dict.fromkeys(opened.keys(), opened))
    return files
