"""Pools of rank processes, tiny checkpoints, a batch, and what the reference trainer makes of it."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Two libraries of threads on two cores slow each other down, and sums of one thread are in one order.
os.environ["OMP_NUM_THREADS"] = "1"

_pools: list[Any] = []


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The ranks end with this folder's tests: the threads of their process groups cost processor time also when nothing is done."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        for pool in _pools:
            pool.stop()


def _pool(world_size: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from twinkle_train.testing import RankPool

    pool = RankPool(world_size, tmp_path_factory.mktemp(f"ranks{world_size}"))
    _pools.append(pool)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _pool(1, tmp_path_factory)


@pytest.fixture(scope="session")
def pools(one_rank: Any, two_ranks: Any, four_ranks: Any) -> Callable[[int], Any]:
    """A function from a number of ranks (1, 2 or 4) to a pool of them; processes start when they are first used."""
    return {1: one_rank, 2: two_ranks, 4: four_ranks}.__getitem__


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _pool(2, tmp_path_factory)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _pool(4, tmp_path_factory)


_SIZES = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_SHARED: dict[str, Any] = {"n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_mtp_layers": 0}
_MOE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "sliding_window": None, "head_dim": 16},
    "deepseek_v3": {
        **_SHARED,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe": {**_SHARED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.3},
}


def _tiny_moe(folder: Path, family: str, sizes: dict[str, Any]) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **_SIZES | _MOE[family] | sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                # Norms of exactly one, biases of exactly zero and routers that are nearly undecided would hide faults.
                if name.endswith("e_score_correction_bias"):
                    tensor.copy_(torch.randn_like(tensor) * 0.1)
                elif name.endswith("gate.weight"):
                    tensor.copy_(torch.randn_like(tensor) * 0.3)
                elif tensor.dim() == 1 and "inv_freq" not in name:
                    tensor.add_(torch.randn_like(tensor), alpha=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a tiny checkpoint once: checkpoint('qwen3', tie_word_embeddings=False, ...), the families with experts too."""
    from twinkle_train import testing

    made: dict[str, Path] = {}

    def make(family: str, **sizes: Any) -> Path:
        key = f"{family}-{sorted(sizes.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = _tiny_moe(folder, family, sizes) if family in _MOE else getattr(testing, f"tiny_{family}")(folder, **sizes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def plain() -> Any:
    """The module megatron_plain."""
    spec = importlib.util.spec_from_file_location("megatron_plain", Path(__file__).with_name("megatron_plain.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def features() -> list[Any]:
    """Seven rows of different lengths: prompts untrained, some tokens weighted, temperatures that differ."""
    from twinkle_data import InputFeature

    random = np.random.default_rng(7)
    rows: list[Any] = []
    for length in (9, 14, 5, 12, 21, 7, 8):
        input_ids = random.integers(3, 250, length)
        labels = np.where(np.arange(length) < 3, -100, input_ids)
        weights = random.uniform(0.5, 1.5, length).astype(np.float32)
        rows.append(InputFeature(input_ids=input_ids, labels=labels, loss_weights=weights, temperature=float(random.uniform(0.7, 1.3))))
    return rows
