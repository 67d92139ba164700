"""What plain PyTorch makes of rows: the Hugging Face model, no batches, no padding, nothing of twinkle's. Loaded by conftest.py."""

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SGD_LR, ADAM_LR, ADAM_EPS, DECAY = 0.1, 1e-3, 1e-3, 0.1


def plain(path: Path, rows: Sequence[Any], *, aux: float = 0.0, z: float = 0.0) -> dict[str, Any]:
    """Loss, log-probabilities, gradients, their norm, and weights after a step of SGD and two of AdamW; of rows one after another.

    aux, z: coefficients of the routers' load-balancing loss and z-loss, of each row by itself, averaged with the rows' tokens as weights; not
    in the loss that is returned.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    start = copy.deepcopy(model.state_dict())
    num_tokens = sum(len(row.input_ids) for row in rows)
    router_logits: list[Any] = []
    if aux or z:
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(lambda module, inputs, outputs: router_logits.append(outputs[0]))

    def backward() -> tuple[float, list[Any]]:
        model.zero_grad()
        weight = sum(float(_weights(row)[1:].sum()) for row in rows)
        loss, logprobs = 0.0, []
        for row in rows:
            ids = torch.as_tensor(row.input_ids)[None]
            logits = model(ids, use_cache=False).logits[0, :-1] / row.temperature
            of_row = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            part = -(of_row * torch.as_tensor(_weights(row)[1:])).sum() / weight
            loss += part.item()
            for logits_TE in router_logits:
                part = part + _router_loss(logits_TE, model.config.num_experts_per_tok, aux, z) * (len(row.input_ids) / num_tokens)
            router_logits.clear()
            part.backward()
            logprobs.append(np.concatenate([[0.0], of_row.detach().numpy()]))
        return loss, logprobs

    loss, logprobs = backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = float(torch.stack([g.double().square().sum() for g in gradients.values() if g is not None]).sum().sqrt())
    result: dict[str, Any] = {"loss": loss, "logprobs": logprobs, "norm": norm, "start": in_checkpoint_form(model, {})}
    result["gradients"] = in_checkpoint_form(model, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()})
    torch.optim.SGD(model.parameters(), lr=SGD_LR).step()
    result["sgd"] = in_checkpoint_form(model, {})
    model.load_state_dict(start)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=ADAM_LR, eps=ADAM_EPS)
    for _ in range(2):
        backward()
        adam.step()
    return result | {"adam": in_checkpoint_form(model, {})}


def _router_loss(logits_TE: Any, k: int, aux: float, z: float) -> Any:
    """By the formulas: E * sum over experts of (share of choices * mean probability), arXiv:2101.03961; squared log-sum-exp, arXiv:2202.08906."""
    import torch

    probabilities = logits_TE.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(k, -1).indices, 1.0)
    balance = logits_TE.shape[-1] * (chosen.mean(0) / k * probabilities.mean(0)).sum()
    return aux * balance + z * logits_TE.logsumexp(-1).square().mean()


def in_checkpoint_form(model: Any, replaced: dict[str, Any]) -> dict[str, Any]:
    """Parameters (or what replaces them) under the names and in the shapes of checkpoints: as transformers saves them."""
    from safetensors.numpy import load_file

    kept = {name: parameter.data for name, parameter in model.named_parameters()}
    try:
        for name, parameter in model.named_parameters():
            parameter.data = replaced.get(name, parameter.data)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return load_file(Path(folder) / "model.safetensors")
    finally:
        for name, parameter in model.named_parameters():
            parameter.data = kept[name]


def _weights(row: Any) -> Any:
    return np.where(row.labels == -100, 0.0, row.loss_weights).astype(np.float32)
