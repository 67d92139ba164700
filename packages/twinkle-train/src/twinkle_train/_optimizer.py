"""What optimizer to use, checked once, and torch's own for engines that have none."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ._errors import ConfigError

_NAMES = ("adamw", "adam", "sgd", "muon")
# Those of torch.optim that update every number by itself, as sharded weights need, and whose states say all of where they are.
_TORCH: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__.lower(): kind for kind in (torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.RAdam, torch.optim.RMSprop)
}
_CLASSES: dict[type, str] = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"} | {k: n for n, k in _TORCH.items()}


def check_number(name: str, value: Any) -> None:
    """Raises ConfigError for what is no number, such as the text '1e-3' that YAML makes of 1e-3."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a number, got {value!r} ({type(value).__name__})")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer, checked.

    name: 'adamw' (decoupled weight decay, arXiv:1711.05101), 'adam' (the same without weight decay), 'sgd', or, where the engine has it, 'muon'
    (arXiv:2502.16982; embeddings, head, norms and biases take AdamW steps) or one of torch.optim: 'adadelta', 'adagrad', 'adamax', 'radam',
    'rmsprop'; in any case.
    lr: base learning rate. betas, eps: of Adam. weight_decay: not applied to parameters with fewer than two axes (norms, biases).
    momentum: of SGD and Muon. options: arguments of the other classes of torch.optim, which have torch's defaults (`{"alpha": 0.9}`).

    Raises ConfigError for an unknown name, for numbers out of range, and for options that the optimizer would ignore.
    """

    name: str = "adamw"
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name.lower())
        object.__setattr__(self, "options", dict(self.options))
        if self.name not in (*_NAMES, *_TORCH):
            raise ConfigError(f"unknown optimizer {self.name!r}; known are {', '.join((*_NAMES, *_TORCH))}")
        for name, value in (("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay), ("momentum", self.momentum)):
            check_number(name, value)
        for beta in self.betas:
            check_number("betas", beta)
        if not self.lr >= 0:
            raise ConfigError(f"lr must be >= 0, got {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must be two numbers in [0, 1), got {self.betas}")
        object.__setattr__(self, "betas", tuple(self.betas))
        if not self.eps > 0:
            raise ConfigError(f"eps must be > 0, got {self.eps}")
        if not self.weight_decay >= 0:
            raise ConfigError(f"weight_decay must be >= 0, got {self.weight_decay}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.name == "adam" and self.weight_decay:
            raise ConfigError("optimizer 'adam' has no weight decay here; use 'adamw'")
        if self.name in _TORCH:
            self._check_torch(_TORCH[self.name])
            return
        if self.options:
            raise ConfigError(f"optimizer {self.name!r} takes no options; it has betas, eps, weight_decay and momentum")
        if self.name not in ("sgd", "muon") and self.momentum:
            raise ConfigError(f"optimizer {self.name!r} has no momentum; use betas")

    def _check_torch(self, kind: type[torch.optim.Optimizer]) -> None:
        if (self.betas, self.eps, self.momentum) != ((0.9, 0.999), 1e-8, 0.0):
            raise ConfigError(f"give betas, eps and momentum of optimizer {self.name!r} as options={{...}}, by torch.optim.{kind.__name__}'s names")
        known = set(inspect.signature(kind).parameters) - {"params", "lr", "weight_decay"}
        if unknown := sorted(self.options.keys() - known):
            raise ConfigError(f"torch.optim.{kind.__name__} has no options {', '.join(unknown)}; it has {', '.join(sorted(known))}")

    @classmethod
    def name_of(cls, optimizer: str | type[torch.optim.Optimizer]) -> str:
        """The name of an optimizer that may be given as torch's class; ConfigError for a class that has none."""
        if isinstance(optimizer, str):
            return optimizer
        if optimizer not in _CLASSES:
            known = ", ".join(sorted(f"torch.optim.{kind.__name__}" for kind in _CLASSES))
            raise ConfigError(f"optimizer {getattr(optimizer, '__name__', optimizer)} is not known; known are {known}")
        return _CLASSES[optimizer]


def build_torch_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's optimizer of that configuration over the parameters that require a gradient.

    Raises ConfigError when none does, and for Muon.
    """
    if config.name == "muon":
        raise ConfigError("this trainer has no optimizer 'muon'; use 'adamw', 'adam' or 'sgd'")
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ConfigError("no parameter requires a gradient: there is nothing to optimize")
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay, "decays": True},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "decays": False},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name in _TORCH:
        make: Any = _TORCH[config.name]
        return make(groups, lr=config.lr, **config.options)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def adjust_torch_optimizer(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Gives an optimizer of `build_torch_optimizer` the betas, eps and weight decay of a configuration of the same kind."""
    for group in optimizer.param_groups:
        if group["decays"]:
            group["weight_decay"] = config.weight_decay
        if config.name in ("adam", "adamw"):
            group["betas"], group["eps"] = config.betas, config.eps
