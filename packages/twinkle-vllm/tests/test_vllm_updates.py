"""Weight updates: afterwards everything is computed with the new weights, and what vLLM gets wrong on a CPU is repaired."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from twinkle_remote import remote_class
from twinkle_sync import CheckpointEngineManager, CheckpointFolder, ShapesDiffer, StateDict, WeightSender, WeightsUnavailable
from twinkle_vllm import IncompleteWeights, SamplerError, _weights
from twinkle_vllm.testing import logprob_error

pytestmark = pytest.mark.timeout(300)  # the first test starts the engine


@remote_class()
class Source(WeightSender):
    def __init__(self, tensors):
        self.tensors = tensors

    def iter_weights(self):
        for item in self.tensors:
            if isinstance(item, Exception):
                raise item
            yield item


def test_after_every_update_the_sampler_is_the_new_model(kit, sampler, models, prompts):
    _, old = models["old"]
    folder, new = models["new"]
    to_new = CheckpointEngineManager(model=CheckpointFolder(folder), sampler=sampler, bucket_size_bytes=1 << 14)
    to_old = CheckpointEngineManager(model=Source(kit.tensors_of(old)), sampler=sampler)
    assert logprob_error(sampler, old, prompts) < 2e-5
    assert logprob_error(sampler, new, prompts) > 1.0  # the control: the two models differ
    for _ in range(2):
        to_new.sync_weights()
        assert logprob_error(sampler, new, prompts) < 2e-5
        greedy = sampler.sample([prompts[0]], {"temperature": 0, "max_tokens": 8})[0].sequences[0]
        expected = new.generate(torch.tensor([prompts[0]]), do_sample=False, max_new_tokens=8, pad_token_id=0)[0, len(prompts[0]) :]
        assert greedy.tokens == expected.tolist()
        to_old.sync_weights()
        assert logprob_error(sampler, old, prompts) < 2e-5
        assert greedy.new_input_feature.weight_version == to_new.version
    assert sampler.weight_version() == 2


@pytest.mark.full
@pytest.mark.parametrize("mode", ["full", "delta"])
def test_twenty_updates_leave_no_trace_of_the_weights_before(kit, sampler, models, prompts, mode):
    states = [models["old"][1], models["new"][1]]
    source = Source(kit.tensors_of(states[0]))
    manager = CheckpointEngineManager(model=source, sampler=sampler, bucket_size_bytes=1 << 14)
    for step in range(20):
        source.tensors = kit.tensors_of(states[step % 2])
        manager.sync_weights(mode)
        assert logprob_error(sampler, states[step % 2], prompts) < 2e-5


def test_a_tied_head_stays_stale_without_the_repair(kit, sampler, models, prompts, monkeypatch):
    """When this fails, vLLM repairs the head itself and `repair_on_cpu` can let it be."""
    _, new = models["new"]
    monkeypatch.setattr(_weights, "repair_on_cpu", lambda model: None)
    kit.load(sampler, new)
    assert logprob_error(sampler, new, prompts) > 0.1
    monkeypatch.undo()
    kit.load(sampler, new)
    assert logprob_error(sampler, new, prompts) < 2e-5


def test_cached_prefixes_survive_an_update_unless_they_are_reset(kit, sampler, models, monkeypatch):
    """When this fails, vLLM resets the cache itself."""
    _, new = models["new"]
    prompt = list(range(3, 53))  # more than a full block of the cache

    def error():
        sequence = sampler.sample([prompt], {"max_tokens": 8})[0].sequences[0]
        return float(np.abs(kit.hf_logprobs(new, [*prompt, *sequence.tokens])[len(prompt) :] - sequence.logprobs).max())

    error()  # fills the cache with the old weights
    monkeypatch.setattr(sampler._engine, "reset_prefix_cache", lambda **options: True)
    kit.load(sampler, new)
    assert error() > 0.01
    monkeypatch.undo()
    assert sampler.reset_prefix_cache()
    assert error() < 2e-5


def test_an_update_that_fails_is_refused_until_one_succeeds(kit, sampler, models, prompts):
    _, new = models["new"]
    tensors = kit.tensors_of(new)
    manager = CheckpointEngineManager(model=Source([*tensors[:5], ZeroDivisionError("no more")]), sampler=sampler, bucket_size_bytes=1 << 12)
    with pytest.raises(ZeroDivisionError):
        manager.sync_weights()
    for refused in (sampler.sample, sampler.score):
        with pytest.raises(WeightsUnavailable, match="no more"):
            refused(prompts)
    without = [item for item in tensors if not item[0].endswith("1.self_attn.k_proj.weight")]
    with pytest.raises(IncompleteWeights, match=r"lacks 1 of .*layers\.1\.self_attn\.k_proj\.weight"):
        CheckpointEngineManager(model=Source(without), sampler=sampler).sync_weights()
    with pytest.raises(WeightsUnavailable):
        sampler.sample(prompts)
    CheckpointEngineManager(model=Source(tensors), sampler=sampler).sync_weights()
    assert logprob_error(sampler, new, prompts) < 2e-5


def test_a_head_of_its_own_is_refused_where_the_models_is_tied(kit, sampler, models, prompts):
    _, new = models["new"]
    tensors = kit.tensors_of(new)
    embedding = dict(tensors)["model.embed_tokens.weight"]
    CheckpointEngineManager(model=Source([*tensors, ("lm_head.weight", embedding)]), sampler=sampler).sync_weights()
    assert logprob_error(sampler, new, prompts) < 2e-5
    with pytest.raises(SamplerError, match="is not its embedding, and the sampler's model ties the two"):
        CheckpointEngineManager(model=Source([*tensors, ("lm_head.weight", embedding + 1e-3)]), sampler=sampler).sync_weights()
    with pytest.raises(WeightsUnavailable):
        sampler.sample(prompts)


def test_weights_of_another_shape_are_refused_while_the_old_ones_serve(kit, sampler, models, prompts, tmp_path):
    kit.save_qwen3(tmp_path, vocab_size=50, seed=0)
    manager = CheckpointEngineManager(model=CheckpointFolder(tmp_path), sampler=sampler)
    with pytest.raises(ShapesDiffer, match=r"embed_tokens\.weight: the sender's has shape \(50, 64\)"):
        manager.sync_weights()
    tensors = dict(kit.tensors_of(models["new"][1]))
    with pytest.raises(ShapesDiffer, match=r"the sender has model\.nrm\.weight, which the model of this vLLMSampler does not have \(1 such"):
        CheckpointEngineManager(model=StateDict({**tensors, "model.nrm.weight": torch.ones(64)}), sampler=sampler).sync_weights()
    assert logprob_error(sampler, models["old"][1], prompts) < 2e-5


def run_alone(script: str, folder: Path, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """A script of this folder in a process of its own, which leaves no temporary files."""
    command = [sys.executable, str(Path(__file__).with_name(script)), str(folder), *arguments]
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # with a short name: sockets lie in it
        done = subprocess.run(command, env=os.environ | {"TMPDIR": temporary}, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        assert [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")] == []  # torch's cache, which is to stay
    return done


def test_experts_are_right_after_updates_and_wrong_without_the_repair(tmp_path):
    """In a process of its own: vLLM makes its expert-parallel groups with the first engine of a process, or never."""
    done = run_alone("moe_updates.py", tmp_path, timeout_s=240)
    errors = json.loads(done.stdout.strip().splitlines()[-1])
    assert max(errors["at_start"], errors["after_first_update"], errors["after_second_update"], errors["repaired_again"]) < 2e-5
    assert errors["control"] > 0.1  # the two models differ
    assert errors["without_repair"] > 0.01  # when this fails, vLLM packs the experts again itself
    assert errors["warns_of_templates"]  # when this fails, vLLM no longer warns of what nobody uses here, and `build_engine` need not leave that out
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each of the engine's workers needs a core")
@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
def test_an_engine_of_two_workers_follows_every_one_of_twenty_updates(tmp_path, kind):
    """In a process of its own, since its workers are started anew from the main script."""
    done = run_alone("tensor_parallel.py", tmp_path, kind, timeout_s=380)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"at_start"')))
    assert max(found["at_start"], *found["errors"]) < 2e-5
    assert found["control"] > 0.1  # the two models differ
    assert found["greedy"] == [True] * 21
    assert found["raised"] == "no more"
    assert "no more" in found["refused"]
    assert found["same_draws"]
    assert "Failed to load weights" not in done.stdout + done.stderr
