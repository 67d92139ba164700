"""TransformersModel on one GPU beside a CPU: flash attention, flex attention, grouped experts, flash-linear-attention's kernels.

    .venv/bin/python -m pytest tests/gpu -m "gpu" -q

Each test is skipped, with the reason, where there is no GPU or the kernel is not installed.
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from twinkle_data import InputFeature, InputProcessor
from twinkle_mesh import DeviceMesh
from twinkle_train.testing import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
_LINEAR: dict[str, Any] = {
    "num_experts": 0,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
# family, its sizes, attention, package that has the kernel, precision, largest difference of a log-probability from float32 on a CPU.
CASES = {
    "sdpa": ("qwen3", {}, "sdpa", "torch", "no", 2e-3),
    "flex": ("qwen3", {}, "flex_attention", "torch", "no", 2e-3),
    "flash": ("qwen3", {}, "flash_attention_2", "flash_attn", "bf16", 0.2),
    "experts": ("qwen3_moe", _EXPERTS, "sdpa", "torch", "bf16", 0.3),
    "gated delta": ("qwen3_next", _LINEAR, "sdpa", "fla", "bf16", 0.3),
}


def run(path: Path, device: str, rows: list[InputFeature], **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Log-probabilities, loss and gradients of the rows, padding-free."""
    from twinkle_transformers import TransformersModel

    model: Any = TransformersModel(path, DeviceMesh.from_sizes(dp_size=1, device_type=device), **options)
    model.set_processor(InputProcessor(padding_free=True))
    model.set_loss("cross_entropy")
    logprobs = np.concatenate(model.forward_only(rows).get().logprobs)
    loss = model.forward_backward(rows).loss
    gradients = model.export_gradients()
    model.close()
    return logprobs, loss, gradients


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_on_a_gpu_give_what_a_cpu_gives(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    family, sizes, attention, package, precision, allowed = CASES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **_SIZES | sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    draw = np.random.default_rng(0)
    rows = [InputFeature(input_ids=draw.integers(1, 512, length)) for length in (40, 7, 130, 65)]
    (tmp_path / "ranks").mkdir()
    pool = RankPool(1, tmp_path / "ranks")  # a process has one kind of process group
    (want,) = pool.run(run, tmp_path, "cpu", rows, timeout_s=120)
    pool.stop()
    have = run(tmp_path, "cuda", rows, attn_implementation=attention, mixed_precision=precision)
    assert np.abs(have[0] - want[0]).max() < allowed
    assert abs(have[1] - want[1]) < allowed / 5
    # Directions of the whole gradient.
    mine, theirs = (np.concatenate([gradient.ravel() for _, gradient in sorted(each[2].items())]).astype(np.float64) for each in (have, want))
    assert mine @ theirs / np.linalg.norm(mine) / np.linalg.norm(theirs) > (0.9999 if precision == "no" else 0.99)
