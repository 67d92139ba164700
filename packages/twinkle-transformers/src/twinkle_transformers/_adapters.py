"""Low-rank adapters (LoRA, arXiv:2106.09685) on a model's linear layers, by peft; any number, of which one or none takes part in a forward."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from twinkle_train import ConfigError, LoraConfig, check_adapter_matrices, draw_lora_a, peft_name

from ._errors import CheckpointError
from ._groups import Groups
from ._parameters import Parameters, Weight


class Adapter(Parameters):
    """One adapter: its matrices, which every rank has whole.

    Args:
        name: its name.
        lora: its configuration.
        slot: what peft calls it; any text is a name here, but not there.
        layers: the layers of peft that it is on, by the module's name in the Hugging Face model.
        groups: of the mesh.
    """

    def __init__(self, name: str, lora: LoraConfig, slot: str, layers: Mapping[str, Any], groups: Groups) -> None:
        self.name, self.lora, self.slot = name, lora, slot
        self.layers = dict(layers)
        self._matrices: dict[str, nn.Parameter] = {}
        for module, layer in self.layers.items():
            self._matrices[peft_name(module, "A")] = layer.lora_A[slot].weight
            self._matrices[peft_name(module, "B")] = layer.lora_B[slot].weight
        super().__init__([Weight.of(f"adapters.{name}.{key}", matrix, "whole") for key, matrix in self._matrices.items()], groups)

    @property
    def target_names(self) -> list[str]:
        """The last parts of the names of the modules that it is on."""
        return sorted({module.rpartition(".")[2] for module in self.layers})

    def draw(self, seed: int) -> None:
        """The first values: A as peft draws it, the same on all ranks and in all layouts, B zero."""
        with torch.no_grad():
            for key, matrix in self._matrices.items():
                if ".lora_B." in key:
                    matrix.zero_()
                else:
                    matrix.copy_(draw_lora_a(key, *matrix.shape, adapter_name=self.name, seed=seed))

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every matrix under peft's name."""
        for key, matrix in self._matrices.items():
            yield key, matrix.detach()

    def export_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Their gradients, zeros where there is none."""
        for key, matrix in self._matrices.items():
            yield key, torch.zeros_like(matrix) if matrix.grad is None else matrix.grad

    def fill(self, tensors: Mapping[str, torch.Tensor], source: str) -> None:
        """Takes whole matrices under peft's names.

        Raises:
            CheckpointError: matrices that are missing, left over, or of another shape; before anything is changed.
        """
        shapes = {key: tuple(matrix.shape) for key, matrix in self._matrices.items()}
        check_adapter_matrices(tensors, shapes, adapter_name=self.name, source=source, error_type=CheckpointError)
        with torch.no_grad():
            for key, matrix in self._matrices.items():
                matrix.copy_(tensors[key])


class Adapters:
    """The adapters of a model, by name.

    Args:
        model: as it is trained: sharded, on its device.
        groups: of the mesh.
        seed: of the first values.
    """

    def __init__(self, model: Any, groups: Groups, seed: int) -> None:
        self._model = model
        self._groups = groups
        self._seed = seed
        self._linear = linear_layers(model)
        self._adapters: dict[str, Adapter] = {}
        self._layers: dict[str, Any] = {}
        self._active = ""
        self._num_made = 0

    def __getitem__(self, name: str) -> Adapter:
        return self._adapters[name]

    def add(self, name: str, lora: LoraConfig) -> None:
        """Puts an adapter on the model, inactive.

        Raises:
            ConfigError: target modules that the model does not have, or cannot have adapters on.
        """
        modules = lora.targeted(self._linear)
        if isinstance(lora.target_modules, str) and (fused := _fused_experts(self._model)):
            raise ConfigError(
                f"target_modules='all-linear' means experts, too, and those of {fused} are not linear layers here: name target_modules, such as "
                f"{sorted({module.rpartition('.')[2] for module in modules})}, or train adapters on experts with MegatronModel"
            )
        if not modules:
            raise ConfigError(f"{type(self._model).__name__} has no linear layers (torch.nn.Linear) that an adapter could be on")
        slot = f"adapter{self._num_made}"
        self._num_made += 1
        self._put(lora, modules, slot)
        adapter = Adapter(name, lora, slot, {module: self._layers[module] for module in modules}, self._groups)
        adapter.draw(self._seed)
        self._adapters[name] = adapter
        self._activate(self._active)

    def _put(self, lora: LoraConfig, modules: list[str], slot: str) -> None:
        # Not peft's inject_adapter_in_model: it (0.21) freezes the model, and turns names of dense layers into experts' where a model has both.
        from peft import LoraConfig as PeftConfig
        from peft.tuners.lora import Linear

        options: dict[str, Any] = lora.to_dict() | {"target_modules": modules}
        config = PeftConfig(**options)
        with torch.random.fork_rng(devices=[]):
            for module in modules:
                if module in self._layers:
                    self._layers[module].update_layer(slot, lora.r, lora_alpha=config.lora_alpha, config=config)
                    continue
                layer = Linear(self._model.get_submodule(module), slot, config=config, r=lora.r, lora_alpha=config.lora_alpha)
                self._model.set_submodule(module, layer)
                self._layers[module] = layer

    def remove(self, name: str) -> None:
        """Takes an adapter off the model."""
        self._activate("")
        adapter = self._adapters.pop(name)
        for layer in adapter.layers.values():
            layer.set_adapter([])  # else peft chooses another
            layer.delete_adapter(adapter.slot)

    def activate(self, name: str) -> None:
        """Makes the model that of an adapter, or by '' the base model."""
        if name != self._active:
            self._activate(name)

    def _activate(self, name: str) -> None:
        for layer in self._layers.values():
            if name:
                layer.set_adapter(self._adapters[name].slot)
            layer.enable_adapters(bool(name))
        self._active = name


def linear_layers(model: Any) -> list[str]:
    """The names of a Hugging Face model's linear layers, without output embeddings, routers, and what adapters have no effect on."""
    head = model.get_output_embeddings()
    routers = {
        id(router)
        for block in model.modules()
        if isinstance(getattr(block, "experts", None), nn.Module)
        for name, router in block.named_children()
        if name in ("gate", "router") or name.endswith("expert_gate")
    }
    # Kernels of Mamba take the weight of the last layer, not the layer.
    kernels = {id(module.out_proj) for module in model.modules() if "mamba" in type(module).__name__.lower() and hasattr(module, "out_proj")}
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head and id(module) not in routers | kernels
    ]


def _fused_experts(model: Any) -> str | None:
    """The class of experts that are no linear layers, if there are any."""
    for module in model.modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module) and not isinstance(experts, nn.ModuleList):
            return type(experts).__name__
    return None
