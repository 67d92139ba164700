"""Run by test_vllm_updates in a process of its own: an engine of two workers. Prints what it found as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

from conftest import save_qwen3
from moe_updates import save_moe
from safetensors.torch import load_file

from twinkle_remote import remote_class
from twinkle_sync import CheckpointEngineManager, WeightSender, WeightsUnavailable
from twinkle_vllm import vLLMSampler
from twinkle_vllm.testing import greedy_is_equal, logprob_error

UPDATES = 20
PROMPTS = [[5, 6, 7, 8, 9, 10], [90, 3, 44], [20] * 12]


@remote_class()
class Source(WeightSender):
    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors

    def iter_weights(self) -> Any:
        for item in self.tensors:
            if isinstance(item, Exception):
                raise item
            yield item


def error(sampler: vLLMSampler, model: Any) -> float:
    return logprob_error(sampler, model, PROMPTS, temperature=0.7)


def save(path: Path, kind: str, seed: int) -> Any:
    if kind == "moe":
        return save_moe(path, seed, heads=4, kv_heads=2)
    return save_qwen3(path, vocab_size=96, seed=seed, heads=4, kv_heads=2, tied=kind == "tied")


def main(root: Path, kind: str) -> None:
    models = [save(root / name, kind, seed) for seed, name in enumerate(("old", "new"))]
    args = {"max_model_len": 64, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20, "block_size": 32, "tensor_parallel_size": 2}
    sampler = vLLMSampler(root / "old", args)
    source = Source([])
    manager = CheckpointEngineManager(model=source, sampler=sampler, bucket_size_bytes=1 << 14, timeout_s=100)
    sent = [list(load_file(root / name / "model.safetensors").items()) for name in ("old", "new")]
    found: dict[str, Any] = {"at_start": error(sampler, models[0]), "control": error(sampler, models[1]), "errors": [], "greedy": []}
    found["greedy"].append(greedy_is_equal(sampler, models[0], PROMPTS))
    for step in range(1, UPDATES + 1):
        source.tensors = sent[step % 2]
        manager.sync_weights("delta" if step > UPDATES // 2 else "full")
        found["errors"].append(error(sampler, models[step % 2]))
        found["greedy"].append(greedy_is_equal(sampler, models[step % 2], PROMPTS))
    source.tensors = [*sent[0][:5], ZeroDivisionError("no more")]
    try:
        manager.sync_weights()
    except ZeroDivisionError as raised:
        found["raised"] = str(raised)
    try:
        sampler.sample(PROMPTS)
    except WeightsUnavailable as refused:
        found["refused"] = str(refused)
    source.tensors = sent[0]
    manager.sync_weights()
    found["errors"].append(error(sampler, models[0]))
    drawn: list[Any] = []
    for _ in range(2):
        sampler.set_seed(7)
        drawn.append([response.sequences[0].tokens for response in sampler.sample(PROMPTS, {"max_tokens": 8})])
    found["same_draws"] = drawn[0] == drawn[1]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
