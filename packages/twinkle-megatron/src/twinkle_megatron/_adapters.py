"""One adapter on this rank: its matrices, into and out of peft's names. Imported only once the platform is chosen."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from twinkle_train import LoraConfig, check_adapter_matrices, draw_lora_a

from ._errors import CheckpointError
from ._lora import AdapterChunk, Beside
from ._lora_plan import LinearLayer, Matrix, local_shape, plan_adapter, stretches, target_names
from ._trainable import Trainable
from ._weights import Placement


class Adapter:
    """An adapter of a model: A as peft draws it (uniform in +-1/sqrt(inputs), from generators of its own, so that all layouts begin alike), B zero.

    Args:
        name: its name.
        lora: its configuration.
        layers: the model's linear layers, on all stages and ranks.
        chunks: this rank's bare model chunks.
        dtype: of the matrices.
        seed: of A.
        sharded: shard optimizer states over data ranks.
        loss_scale: the first one, of float16.

    Raises:
        ConfigError: target modules that the model does not have, or a rank that the layout cannot divide.
    """

    def __init__(
        self,
        name: str,
        lora: LoraConfig,
        layers: Sequence[LinearLayer],
        chunks: Sequence[Any],
        dtype: torch.dtype,
        *,
        seed: int,
        sharded: bool,
        loss_scale: float,
    ) -> None:
        self.name = name
        self.lora = lora
        self._tp: Any = parallel_state.get_tensor_model_parallel_group()
        self._etp: Any = parallel_state.get_expert_tensor_parallel_group()
        self._ep: Any = parallel_state.get_expert_model_parallel_group()
        self._pp: Any = parallel_state.get_pipeline_model_parallel_group()
        self._plan = plan_adapter(layers, lora, etp_size=self._etp.size())
        self._dtype = dtype
        self._chunks = [self._chunk(index, chunk.config, seed) for index, chunk in enumerate(chunks)]
        # Adapters are small: what their communication takes is not worth overlapping.
        self.trainable = Trainable(self._chunks, dtype, sharded=sharded, overlap=False, loss_scale=loss_scale)

    @property
    def target_names(self) -> list[str]:
        """The last parts of the names of the modules that it is on."""
        return target_names(self._plan)

    def beside(self) -> Iterator[tuple[tuple[int, str], Beside]]:
        """What it adds to which layers of this rank, by chunk and module."""
        for index, chunk in enumerate(self._chunks):
            for module, beside in chunk.items():
                yield (index, module), beside

    # Matrices on this rank.

    def _chunk(self, index: int, config: Any, seed: int) -> AdapterChunk:
        mine: dict[str, dict[Matrix, torch.Tensor]] = {}
        for matrix in self._plan:
            if (matrix.layer.stage, matrix.layer.chunk) == (self._pp.rank(), index):
                first = self._part(matrix, [self._first(matrix, number, seed) for number in self._experts(matrix)])
                mine.setdefault(matrix.layer.module, {})[matrix] = first
        besides = {
            module: Beside(values, lora=self.lora, config=config, num_experts=len(self._experts(next(iter(values)))))
            for module, values in mine.items()
        }
        return AdapterChunk(config, besides)

    def _first(self, matrix: Matrix, number: int, seed: int) -> torch.Tensor:
        if matrix.letter == "B":
            return torch.zeros(matrix.rows, matrix.columns)
        return draw_lora_a(matrix.names[number], matrix.rows, matrix.columns, adapter_name=self.name, seed=seed)

    def _experts(self, matrix: Matrix) -> range:
        """The numbers of the experts on this rank; 0 for a dense layer."""
        if not matrix.layer.is_expert:
            return range(1)
        number = len(matrix.layer.names) // self._ep.size()
        return range(self._ep.rank() * number, (self._ep.rank() + 1) * number)

    def _split_group(self, matrix: Matrix) -> Any:
        return self._etp if matrix.layer.is_expert else self._tp

    def _part(self, matrix: Matrix, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's part of whole matrices: one, or those of its experts."""
        group, axis = self._split_group(matrix), matrix.split_axis
        parts = wholes if axis is None else [whole.chunk(group.size(), axis)[group.rank()] for whole in wholes]
        return torch.cat(list(parts)).to(self._device(), self._dtype, copy=True).contiguous()

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def _parameters(self) -> dict[Matrix, torch.nn.Parameter]:
        found: dict[tuple[int, str], Beside] = dict(self.beside())
        return {
            matrix: found[matrix.layer.chunk, matrix.layer.module].matrices[f"{matrix.letter}{matrix.layer.part}"]
            for matrix in self._plan
            if matrix.layer.stage == self._pp.rank()
        }

    # Out of the model, and into it.

    def export(self, *, gradients: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Every matrix (or its gradient, float32), whole, under peft's name. Collective: all ranks iterate to the end."""
        self.trainable.settle_parameters()
        if gradients:
            self.trainable.gradients.make_whole()
        parameters = self._parameters()
        for matrix in self._plan:
            here: torch.Tensor | None = None
            if matrix in parameters:
                parameter: Any = parameters[matrix]
                here = parameter.main_grad if gradients else parameter.detach()
            yield from self._wholes(matrix, here, torch.float32 if gradients else self._dtype)

    def _wholes(self, matrix: Matrix, here: torch.Tensor | None, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        number, group = len(self._experts(matrix)), self._split_group(matrix)
        if here is None:
            here = torch.empty(local_shape(matrix, size=group.size(), num_experts=number), dtype=dtype, device=self._device())
        if self._pp.size() > 1:
            dist.broadcast(here, src=dist.get_global_rank(self._pp, matrix.layer.stage), group=self._pp)
        of_ranks = [here] if matrix.split_axis is None else _gathered(here, group)
        parts = [part.chunk(number) for part in of_ranks]
        wholes = [torch.cat([part[index] for part in parts], matrix.split_axis or 0) for index in range(number)]
        if matrix.layer.is_expert:
            wholes = [whole for rank in _gathered(torch.stack(wholes), self._ep) for whole in rank]
        yield from zip(matrix.names, wholes, strict=True)

    def check(self, tensors: Mapping[str, torch.Tensor], source: str) -> None:
        """Whether whole matrices under peft's names are this adapter's.

        Raises:
            CheckpointError: matrices that are missing, left over, or of another shape.
        """
        wanted = {name: (matrix.rows, matrix.columns) for matrix in self._plan for name in matrix.names}
        check_adapter_matrices(tensors, wanted, adapter_name=self.name, source=source, error_type=CheckpointError)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes whole matrices that :meth:`check` lets pass, and the optimizer's main copies with them."""
        self.trainable.settle_parameters()
        with torch.no_grad():
            for matrix, parameter in self._parameters().items():
                parameter.copy_(self._part(matrix, [tensors[matrix.names[number]] for number in self._experts(matrix)]))
        self.trainable.parameters_replaced()

    def placements(self) -> Iterator[Placement]:
        """Where each of this rank's matrices lies in the whole; for training checkpoints."""
        for matrix, parameter in self._parameters().items():
            group, experts = self._split_group(matrix), self._experts(matrix)
            parts = tuple(stretches(matrix, size=group.size(), rank=group.rank(), first_expert=experts.start, num_experts=len(experts)))
            yield Placement(
                key=f"adapters.{self.name}.{_common(matrix)}",
                shape=(matrix.rows * len(matrix.names), matrix.columns),
                tensor=parameter,
                parts=parts,
            )


def _common(matrix: Matrix) -> str:
    """The name of the matrices of all experts of a layer together, or of the one of a dense layer."""
    first = matrix.layer.names[0]
    return f"{first.replace('.experts.0.', '.experts.') if matrix.layer.is_expert else first}.lora_{matrix.letter}"


def _gathered(part: torch.Tensor, group: Any) -> list[torch.Tensor]:
    if group.size() == 1:
        return [part]
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts
