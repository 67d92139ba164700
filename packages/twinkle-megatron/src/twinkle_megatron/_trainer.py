"""The trainer contract over megatron-core, without remoting."""

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from twinkle_data import Batch, InputProcessor
from twinkle_mesh import DeviceMesh, launcher_world_size
from twinkle_train import ComputeLoss, ConfigError, Inputs, OptimizerConfig, Row, TokenOutputs, TrainerBase, init_process_group, split_micro_batches

from . import cpu
from ._batches import check_features, make_micro_batches, pipeline_micro_batches
from ._bridge import check_same_model, find_checkpoint, read_config
from ._checkpoint import save_checkpoint
from ._errors import LayoutError, PlatformError
from ._layout import check_divides, check_mesh

if TYPE_CHECKING:
    from ._engine import Engine

logger = logging.getLogger(__name__)

MixedPrecision = Literal["no", "bf16"]
Recompute = Literal["full", "selective"]

_DTYPES: dict[str, torch.dtype] = {"no": torch.float32, "bf16": torch.bfloat16}


class MegatronTrainer(TrainerBase):
    """What MegatronModel is on each of its ranks; see there."""

    def __init__(
        self,
        model_id: str | os.PathLike[str],
        device_mesh: DeviceMesh | None = None,
        mixed_precision: MixedPrecision = "no",
        *,
        seed: int = 0,
        recompute: Recompute | None = None,
        use_distributed_optimizer: bool = False,
        transformer_options: Mapping[str, Any] | None = None,
        timeout_s: float = 600,
    ) -> None:
        if mixed_precision not in _DTYPES:
            raise ConfigError(f"mixed_precision is 'no' or 'bf16', not {mixed_precision!r}")
        if recompute not in (None, "full", "selective"):
            raise ConfigError(f"recompute is None, 'full' or 'selective', not {recompute!r}")
        mesh = _on_this_machine(device_mesh or DeviceMesh.from_sizes(dp_size=launcher_world_size()))
        check_mesh(mesh)
        self._path = find_checkpoint(os.fspath(model_id))
        self._hf_config = hf_config = read_config(self._path)
        check_divides(hf_config, mesh)
        self._mesh = mesh
        self._dtype = _DTYPES[mixed_precision]
        self._settings = {
            "model": os.fspath(model_id),
            "mixed_precision": mixed_precision,
            "seed": seed,
            "recompute": recompute,
            "use_distributed_optimizer": use_distributed_optimizer,
            "transformer_options": dict(transformer_options or {}),
        }
        engine_class = _engine_class(mesh.device_type)
        init_process_group(mesh.device_type, timeout_s)
        self._engine: Engine = engine_class(
            hf_config,
            self._path,
            mesh,
            self._dtype,
            options=_recompute_options(recompute) | dict(transformer_options or {}),
            distributed_optimizer=use_distributed_optimizer,
            seed=seed,
            timeout_s=timeout_s,
        )
        alignment = mesh.tp_size if mesh.sequence_parallel else 1
        super().__init__(
            groups=self._engine.groups,
            processor=InputProcessor(pad_token_id=_pad_token_id(hf_config), alignment=alignment),
            alignment=alignment,
            has_graph=mesh.pp_size == 1,
        )

    # What the contract leaves to an engine.

    def _forward(self, adapter_name: str, batch: Batch) -> TokenOutputs:
        del adapter_name
        (micro_batch,) = self._tensors([batch])
        return self._engine.forward(micro_batch)

    def _run(self, adapter_name: str, batches: Sequence[Batch], compute_loss: ComputeLoss | None) -> list[TokenOutputs] | None:
        del adapter_name
        return self._engine.run(self._tensors(batches), compute_loss)

    def _tensors(self, batches: Sequence[Batch]) -> list[Any]:
        return make_micro_batches(
            batches,
            equal_shapes=self._mesh.pp_size > 1,
            # megatron-core's interleaved schedule wants a multiple of the pipeline's size.
            multiple_of=1 if self._mesh.vpp_size is None else self._mesh.pp_size,
            pad_token_id=self._processor.pad_token_id,
            device=self._engine.device,
        )

    def _reduce_gradients(self, adapter_name: str) -> None:
        del adapter_name
        self._engine.reduce_gradients()

    def _scale_gradients(self, adapter_name: str, factor: float) -> None:
        del adapter_name
        self._engine.scale_gradients(factor)

    def _gradient_norm(self, adapter_name: str) -> float:
        del adapter_name
        return self._engine.gradient_norm()

    def _make_optimizer(self, adapter_name: str, config: OptimizerConfig) -> None:
        del adapter_name
        self._engine.make_optimizer(config)

    def _optimizer_step(self, adapter_name: str, learning_rate: float) -> None:
        del adapter_name
        self._engine.step(learning_rate)

    def _zero_gradients(self, adapter_name: str) -> None:
        del adapter_name
        self._engine.zero_gradients()

    def _export_gradients(self, adapter_name: str) -> dict[str, NDArray[np.float32]]:
        del adapter_name
        return _on_rank_zero(self._engine.export_gradients())

    def _engine_config(self) -> dict[str, Any]:
        return {"trainer": type(self).__name__, **self._settings, "mesh": dataclasses.asdict(self._mesh)}

    def _features(self, inputs: Inputs) -> list[Row]:
        features = super()._features(inputs)
        check_features(features, self._hf_config.vocab_size)
        return features

    def _micro_batches(self, features: list[Row], micro_batch_size: int | None) -> list[Batch]:
        if self._mesh.pp_size == 1:
            return super()._micro_batches(features, micro_batch_size)
        count = pipeline_micro_batches(len(features), micro_batch_size, self._mesh.pp_size)
        return [self._processor(rows) for rows in split_micro_batches(features, micro_batch_size, count=count)]

    # What the contract leaves to a trainer.

    def set_processor(self, processor: InputProcessor, *, adapter_name: str = "") -> None:
        if processor.padding_side != "right":
            raise ConfigError("MegatronModel needs padding_side='right': its attention is causal and unmasked, so padding must follow the tokens")
        super().set_processor(processor, adapter_name=adapter_name)

    def save(self, path: str | os.PathLike[str]) -> None:
        save_checkpoint(self._engine.export_weights(), self._path, Path(path), self._dtype)

    def load(self, path: str | os.PathLike[str]) -> None:
        folder = find_checkpoint(os.fspath(path))
        check_same_model(folder, self._hf_config)
        self._engine.load(folder)

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight, whole, under its Hugging Face name. Collective: all ranks iterate to the end."""
        return self._engine.export_weights()

    def export_weights(self, *, adapter_name: str = "") -> dict[str, NDArray[np.float32]]:
        self._state(adapter_name)
        return _on_rank_zero(self._engine.export_weights())

    def close(self) -> None:
        """Frees this process for a model with another layout. The model must not be used afterwards."""
        self._engine.close()


def _on_rank_zero(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, NDArray[np.float32]]:
    keep = torch.distributed.get_rank() == 0
    return {name: tensor.to("cpu", torch.float32, copy=True).numpy() for name, tensor in tensors if keep}


def _on_this_machine(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.device_type == "cuda" and not torch.cuda.is_available():
        logger.info("the mesh's device type is 'cuda' and this machine has no GPU: training on the CPU")
        return mesh.with_device_type("cpu")
    if mesh.device_type not in ("cpu", "cuda"):
        raise LayoutError(f"MegatronModel runs on 'cpu' and 'cuda' devices, not on {mesh.device_type!r}")
    return mesh


def _engine_class(device_type: str) -> "type[Engine]":
    """The engine, once the platform is chosen: on a CPU megatron-core is adapted, on GPUs it runs unmodified."""
    if device_type == "cpu":
        cpu.enable()
    elif cpu.is_enabled():
        raise PlatformError("this process runs megatron-core on the CPU platform: build GPU models in a process of their own")
    else:
        try:
            import transformer_engine  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
        except ModuleNotFoundError as error:
            if error.name != "transformer_engine":
                raise
            raise ImportError(
                "MegatronModel on GPUs needs TransformerEngine: pip install 'twinkle-megatron[te]'", name="transformer_engine"
            ) from None
    from ._engine import Engine

    return Engine


def _recompute_options(recompute: Recompute | None) -> dict[str, Any]:
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {} if recompute is None else {"recompute_granularity": "selective"}


def _pad_token_id(hf_config: Any) -> int:
    return hf_config.pad_token_id if hf_config.pad_token_id is not None and 0 <= hf_config.pad_token_id < hf_config.vocab_size else 0
