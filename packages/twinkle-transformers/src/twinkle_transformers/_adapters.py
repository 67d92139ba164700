"""Low-rank adapters (LoRA, arXiv:2106.09685) on a model's linear layers, by peft, and on experts; any number, of which one or none takes part in a
forward."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from twinkle_train import ConfigError, LoraConfig, check_adapter_matrices, draw_lora_a, merge_adapter, peft_name

from ._errors import CheckpointError
from ._expert_adapters import ExpertLora, fused_linear_layers, merged, put_into_effect
from ._groups import Groups
from ._parameters import Parameters, Weight


class Adapter(Parameters):
    """One adapter: its matrices, which every rank has whole.

    Args:
        name: its name.
        lora: its configuration.
        slot: what peft calls it; any text is a name here, but not there.
        layers: the layers of peft that it is on, by the module's name in the Hugging Face model.
        experts: what it has on fused experts.
        groups: of the mesh.
    """

    def __init__(self, name: str, lora: LoraConfig, slot: str, layers: Mapping[str, Any], experts: Sequence[ExpertLora], groups: Groups) -> None:
        self.name, self.lora, self.slot = name, lora, slot
        self.layers, self.experts = dict(layers), list(experts)
        self._matrices: dict[str, nn.Parameter] = {}
        for module, layer in self.layers.items():
            self._matrices[peft_name(module, "A")] = layer.lora_A[slot].weight
            self._matrices[peft_name(module, "B")] = layer.lora_B[slot].weight
        # Matrices of all experts of a layer, one after another in one parameter.
        self._stacks: dict[str, tuple[list[str], nn.Parameter]] = {}
        for of_experts in self.experts:
            for names, matrix in of_experts.matrices():
                self._stacks[names[0].replace(".experts.0.", ".experts.")] = names, matrix
        trained = self._matrices | {key: matrix for key, (_, matrix) in self._stacks.items()}
        super().__init__([Weight.of(f"adapters.{name}.{key}", matrix, "whole") for key, matrix in trained.items()], groups)

    @property
    def target_names(self) -> list[str]:
        """The last parts of the names of the modules that it is on."""
        return sorted({module.rpartition(".")[2] for module in (*self.layers, *(each.layer.names[0] for each in self.experts))})

    def draw(self, seed: int) -> None:
        """The first values: A as peft draws it, the same on all ranks and in all layouts, B zero."""
        with torch.no_grad():
            for key, matrix in self.export():
                if ".lora_B." in key:
                    matrix.zero_()
                else:
                    matrix.copy_(draw_lora_a(key, *matrix.shape, adapter_name=self.name, seed=seed))

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every matrix under peft's name, sharing memory."""
        for key, matrix in self._matrices.items():
            yield key, matrix.detach()
        for names, matrix in self._stacks.values():
            yield from zip(names, matrix.detach(), strict=True)

    def export_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Their gradients, zeros where there is none."""
        for key, matrix in self._matrices.items():
            yield key, _gradient(matrix)
        for names, matrix in self._stacks.values():
            yield from zip(names, _gradient(matrix), strict=True)

    def merge(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights under their names in the model, with the adapter's products added."""
        fused: dict[str, list[ExpertLora]] = {}
        for each in self.experts:
            fused.setdefault(each.layer.parameter, []).append(each)
        with_experts = ((name, merged(tensor, fused[name]) if name in fused else tensor) for name, tensor in tensors)
        return merge_adapter(with_experts, {key: matrix.detach() for key, matrix in self._matrices.items()}, self.lora)

    def check(self, tensors: Mapping[str, torch.Tensor], source: str) -> None:
        """Whether whole matrices under peft's names are this adapter's.

        Raises:
            CheckpointError: matrices that are missing, left over, or of another shape.
        """
        shapes = {key: tuple(matrix.shape) for key, matrix in self.export()}
        check_adapter_matrices(tensors, shapes, adapter_name=self.name, source=source, error_type=CheckpointError)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes whole matrices that `check` lets pass."""
        with torch.no_grad():
            for key, matrix in self.export():
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
        self._fused, self._without = fused_linear_layers(model, groups)
        self._adapters: dict[str, Adapter] = {}
        self._layers: dict[str, Any] = {}
        self._active: str | None = ""  # None: a change of it was interrupted
        self._num_made = 0

    def __getitem__(self, name: str) -> Adapter:
        return self._adapters[name]

    def add(self, name: str, lora: LoraConfig) -> None:
        """Puts an adapter on the model, inactive.

        Raises:
            ConfigError: target modules that the model does not have, or cannot have adapters on.
        """
        self._refuse_experts(lora)
        chosen = set(lora.targeted([*self._linear, *(name for layer in self._fused for name in layer.names)]))
        modules = [module for module in self._linear if module in chosen]
        fused = [layer for layer in self._fused if chosen.intersection(layer.names)]
        for layer in fused:
            if left := [name for name in layer.names if name not in chosen]:
                raise ConfigError(
                    f"target_modules are some experts of a layer, but not {left[0]}: adapters are on all experts of a layer, or on none"
                )
        if not chosen:
            raise ConfigError(f"{type(self._model).__name__} has no linear layers (torch.nn.Linear) that an adapter could be on")
        active, self._active = self._active or "", None
        slot = f"adapter{self._num_made}"
        self._num_made += 1
        self._put(lora, modules, slot)
        experts = [ExpertLora(layer, lora, self._groups) for layer in fused]
        adapter = Adapter(name, lora, slot, {module: self._layers[module] for module in modules}, experts, self._groups)
        adapter.draw(self._seed)
        self._adapters[name] = adapter
        self._activate(active)

    def _refuse_experts(self, lora: LoraConfig) -> None:
        """ConfigError when target modules are experts that cannot have adapters."""
        for name, kind in self._without.items():
            targets = [name.rpartition(".")[2]] if isinstance(lora.target_modules, str) else lora.target_modules
            if any(name == target or name.endswith(f".{target}") for target in targets):
                linear = sorted({module.rpartition(".")[2] for module in self._linear})
                raise ConfigError(
                    f"adapters cannot be on {name}: experts of {kind} are not in checkpoints as linear layers, one by one. Name target_modules that "
                    f"the experts do not have; the model's other linear layers are {', '.join(linear)}"
                )

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
        self._active = None
        for layer in self._layers.values():
            if name:
                layer.set_adapter(self._adapters[name].slot)
            layer.enable_adapters(bool(name))
        put_into_effect(self._adapters[name].experts if name else (), {id(layer.experts): layer.experts for layer in self._fused}.values())
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


def _gradient(matrix: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
