"""Which matrices an adapter has, under peft's names, and which part of each a rank holds. Pure: sizes and names only.

Fused layers (queries, keys and values; gate and up) have a pair of matrices for each of the Hugging Face model's layers, as peft has. So a rank's
part is always a plain slice of the whole matrix, which is what makes adapters of all layouts one format.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from twinkle_train import ConfigError, LoraConfig, peft_name

Letter = Literal["A", "B"]


@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """A linear layer of the Hugging Face model (or that of all experts of one layer), which is one of megatron-core's or a part of it.

    stage, chunk, module: where that one is. names: of the Hugging Face module; of experts one each, in order. part, num_parts: its place among those
    that are fused. groups: into how many groups the features of the parts are interleaved. split: how tensor parallelism (of experts: expert tensor
    parallelism) divides it. in_features, out_features: of the whole.
    """

    stage: int
    chunk: int
    module: str
    names: tuple[str, ...]
    part: int
    num_parts: int
    groups: int
    split: Literal["column", "row"] | None
    is_expert: bool
    in_features: int
    out_features: int


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One matrix of an adapter; of experts those of one layer, one below the other.

    rows, columns: of the whole of one. split_axis: the axis that the tensor-parallel ranks (of experts: expert-tensor-parallel ones) divide; None:
    each has the whole.
    """

    layer: LinearLayer
    letter: Letter
    rows: int
    columns: int
    split_axis: Literal[0, 1] | None

    @property
    def names(self) -> tuple[str, ...]:
        """peft's names: one, or one an expert."""
        return tuple(peft_name(name, self.letter) for name in self.layer.names)


def matrices_of(layer: LinearLayer, rank: int) -> tuple[Matrix, Matrix]:
    """The pair of matrices of a layer.

    Experts divide the rank where dense layers have copies: an expert's output on one expert-tensor-parallel rank is a summand, and what all ranks
    have alike would be counted once for each.
    """
    split: dict[Letter, Literal[0, 1] | None]
    match layer.split, layer.is_expert:
        case "column", is_expert:
            split = {"A": 0 if is_expert else None, "B": 0}
        case "row", is_expert:
            split = {"A": 1, "B": 1 if is_expert else None}
        case _:
            split = {"A": None, "B": None}
    return (
        Matrix(layer=layer, letter="A", rows=rank, columns=layer.in_features, split_axis=split["A"]),
        Matrix(layer=layer, letter="B", rows=layer.out_features, columns=rank, split_axis=split["B"]),
    )


def plan_adapter(layers: Sequence[LinearLayer], config: LoraConfig, *, etp_size: int) -> list[Matrix]:
    """The matrices of an adapter on all stages and ranks, in the order of the layers.

    Raises:
        ConfigError: a target module that is none of the model's linear layers, that names some experts of a layer only, or a rank that does not
            divide over the expert-tensor-parallel ranks.
    """
    names = set(config.targeted([name for layer in layers for name in layer.names]))
    targeted = [layer for layer in layers if _is_target(layer, names)]
    if etp_size > 1 and config.r % etp_size and any(layer.is_expert for layer in targeted):
        raise ConfigError(
            f"r={config.r} does not divide over etp_size={etp_size} ranks, which an adapter on experts needs: use a multiple of {etp_size}"
        )
    return [matrix for layer in targeted for matrix in matrices_of(layer, config.r)]


def target_names(matrices: Sequence[Matrix]) -> list[str]:
    """The last parts of the names of the targeted modules, as peft writes 'all-linear' out."""
    return sorted({name.rpartition(".")[2] for matrix in matrices for name in matrix.layer.names})


def local_shape(matrix: Matrix, *, size: int, num_experts: int) -> tuple[int, int]:
    """The shape of a rank's part. size: of the group that splits it. num_experts: on the rank; 1 for dense layers."""
    rows = matrix.rows // (size if matrix.split_axis == 0 else 1)
    return rows * num_experts, matrix.columns // (size if matrix.split_axis == 1 else 1)


def stretches(matrix: Matrix, *, size: int, rank: int, first_expert: int, num_experts: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Where a rank's part lies in the whole, expert below expert: (first row, number of rows, offset of that row and of column 0)."""
    rows, columns = local_shape(matrix, size=size, num_experts=1)
    row = rank * rows if matrix.split_axis == 0 else 0
    column = rank * columns if matrix.split_axis == 1 else 0
    for expert in range(num_experts):
        yield expert * rows, rows, ((first_expert + expert) * matrix.rows + row, column)


def _is_target(layer: LinearLayer, targeted: Set[str]) -> bool:
    hit = [name in targeted for name in layer.names]
    if any(hit) and not all(hit):
        raise ConfigError(
            f"target_modules name {sum(hit)} of the {len(hit)} experts of {layer.names[0].rpartition('.experts.')[0]}: an adapter is on all of them"
        )
    return hit[0]
