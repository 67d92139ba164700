"""What plain PyTorch makes of rows: the Hugging Face model, no batches, no padding, nothing of twinkle's. Loaded by conftest.py."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SGD_LR = 0.1


def plain(path: Path, rows: Sequence[Any]) -> dict[str, Any]:
    """Loss, log-probabilities, gradients, their norm, and weights after a step of SGD; of rows one after another."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=True)
    weight = sum(float(_weights(row)[1:].sum()) for row in rows)
    loss, logprobs = 0.0, []
    for row in rows:
        ids = torch.as_tensor(row.input_ids)[None]
        logits = model(ids, use_cache=False).logits[0, :-1] / row.temperature
        of_row = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        part = -(of_row * torch.as_tensor(_weights(row)[1:])).sum() / weight
        loss += part.item()
        part.backward()
        logprobs.append(np.concatenate([[0.0], of_row.detach().numpy()]))
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    norm = float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())
    result: dict[str, Any] = {"loss": loss, "logprobs": logprobs, "norm": norm, "gradients": in_checkpoint_form(model, gradients)}
    result["start"] = in_checkpoint_form(model, {})
    torch.optim.SGD(model.parameters(), lr=SGD_LR).step()
    return result | {"sgd": in_checkpoint_form(model, {})}


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
