"""What plain peft makes of rows on the Hugging Face model: no batches, no padding, nothing of twinkle's.

Needs peft: pip install 'twinkle-train[testing]'.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["ADAM_EPS", "ADAM_LR", "CONFIG", "SGD_LR", "load_into", "peft_model", "peft_results", "write_adapter"]

SGD_LR, ADAM_LR, ADAM_EPS = 0.1, 1e-3, 1e-3
CONFIG: dict[str, Any] = {"r": 4, "lora_alpha": 6, "use_rslora": True}


def peft_model(path: Path, **config: Any) -> Any:
    """A Hugging Face model with an adapter, whose experts, if any, are linear layers with their names in checkpoints."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for name, module in list(model.named_modules()):
        if name.endswith(".mlp.experts"):
            model.set_submodule(name, _experts(module))
    # peft would look for the fused experts of this type.
    model.config.model_type = "separate experts"
    if config.get("target_modules", "all-linear") == "all-linear":
        linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        config["target_modules"] = sorted(linear - {"lm_head"})
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **CONFIG | config))


def _experts(fused: Any) -> Any:
    import torch
    from torch import nn

    class Expert(nn.Module):
        gate_proj: nn.Linear
        up_proj: nn.Linear
        down_proj: nn.Linear

        def __init__(self, gate_up: Any, down: Any) -> None:
            super().__init__()
            for name, weight in zip(("gate_proj", "up_proj", "down_proj"), (*gate_up.chunk(2), down), strict=True):
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                linear.weight = nn.Parameter(weight.detach().clone())
                setattr(self, name, linear)

        def forward(self, x: Any) -> Any:
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    class Experts(nn.ModuleList):
        def forward(self, hidden: Any, indices: Any, weights: Any) -> Any:
            output = torch.zeros_like(hidden)
            for number, expert in enumerate(self):
                tokens, places = torch.where(indices == number)
                output = output.index_add(0, tokens, expert(hidden[tokens]) * weights[tokens, places, None])
            return output

    return Experts(Expert(gate_up, down) for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True))


def write_adapter(path: Path, folder: Path, **config: Any) -> Path:
    """An adapter that peft saved, with random matrices: B of zero would hide A's gradient."""
    import torch

    model = peft_model(path, **config)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def peft_results(path: Path, adapter: Path, rows: Sequence[Any]) -> dict[str, Any]:
    """Loss, log-probabilities, gradients of A and B, their norm, and A and B after a step of SGD and two of AdamW."""
    import torch
    from safetensors.torch import load_file

    model = peft_model(path, **_config(adapter))
    load_into(model, load_file(adapter / "adapter_model.safetensors"))
    trained = {name.replace(".default.", "."): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    start = copy.deepcopy({name: parameter.data for name, parameter in trained.items()})

    def backward() -> tuple[float, list[Any]]:
        model.zero_grad()
        weight = sum(float(_weights(row)[1:].sum()) for row in rows)
        loss, logprobs = 0.0, []
        for row in rows:
            ids = torch.as_tensor(row.input_ids)[None]
            of_row = (model(input_ids=ids, use_cache=False).logits[0, :-1] / row.temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            part = -(of_row * torch.as_tensor(_weights(row)[1:])).sum() / weight
            part.backward()
            loss += part.item()
            logprobs.append(np.concatenate([[0.0], of_row.detach().numpy()]))
        return loss, logprobs

    loss, logprobs = backward()
    gradients = {name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy().copy() for name, p in trained.items()}
    norm = float(np.sqrt(sum(np.square(gradient.astype(np.float64)).sum() for gradient in gradients.values())))
    result: dict[str, Any] = {"loss": loss, "logprobs": logprobs, "norm": norm, "gradients": gradients}
    torch.optim.SGD(trained.values(), lr=SGD_LR).step()
    result["sgd"] = {name: parameter.detach().numpy().copy() for name, parameter in trained.items()}
    for name, parameter in trained.items():
        parameter.data.copy_(start[name])
    adam = torch.optim.AdamW(trained.values(), lr=ADAM_LR, eps=ADAM_EPS, weight_decay=0.0)
    for _ in range(2):
        backward()
        adam.step()
    return result | {"adam": {name: parameter.detach().numpy().copy() for name, parameter in trained.items()}}


def load_into(model: Any, matrices: dict[str, Any]) -> None:
    """Puts the matrices of a file into a model of :func:`peft_model`: all of its adapter's, and no others."""
    mine = {name.replace(".default.", "."): parameter for name, parameter in model.named_parameters() if "lora_" in name}
    assert mine.keys() == matrices.keys(), sorted(mine.keys() ^ matrices.keys())[:4]
    for name, parameter in mine.items():
        parameter.data.copy_(matrices[name])


def _config(adapter: Path) -> dict[str, Any]:
    import json

    content = json.loads((adapter / "adapter_config.json").read_text())
    return {name: content[name] for name in ("r", "lora_alpha", "use_rslora", "target_modules")}


def _weights(row: Any) -> Any:
    return np.where(row.labels == -100, 0.0, row.loss_weights).astype(np.float32)
