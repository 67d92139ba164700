"""Two trainer ranks and a sampler on a real Ray: sync, sample, compare."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from twinkle_mesh import DeviceGroup
from twinkle_remote import initialize, remote_class, remote_function, rendezvous
from twinkle_sync import CheckpointEngineManager, WeightSender, WeightsUnavailable
from twinkle_vllm import vLLMSampler
from twinkle_vllm.testing import logprob_error


@remote_class()
class Trainer(WeightSender):
    """Plain torch: each of two ranks owns every other tensor, so that exporting them is collective."""

    dies_at = -1

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        meeting = rendezvous()
        assert meeting is not None
        self.rank = meeting.rank
        store = dist.TCPStore(meeting.host, meeting.port, is_master=self.rank == 0, wait_for_workers=False, master_listen_fd=meeting.listen_fd)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=meeting.world_size)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, parameter) in enumerate(self.model.named_parameters()):
            if index == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            tensor = parameter.detach().clone() if index % 2 == self.rank else torch.empty_like(parameter)
            dist.broadcast(tensor, index % 2)
            yield name, tensor

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def die(self, rank: int, index: int) -> None:
        """In the next export that rank ends before this tensor."""
        self.dies_at = index if rank == self.rank else -1

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def train(self, seed: int) -> dict[str, np.ndarray]:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        return {name: tensor.numpy().copy() for name, tensor in self.model.state_dict().items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_samplers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_sampler_group_follows_a_trainer_group_and_leaves_no_files(kit, models, prompts, num_samplers, tmp_path, monkeypatch):
    folder, reference = models["old"]
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the workers
    start = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    groups = [DeviceGroup("trainer", 2, "cpu"), DeviceGroup("sampler", num_samplers, "cpu")]
    placed: Any = {"trainer": Trainer, "sampler": vLLMSampler}
    try:
        with initialize("ray", groups=groups, threads_per_worker=1, start_timeout_s=400, call_timeout_s=400):
            trainer = placed["trainer"](str(folder), remote_group="trainer")
            sampler = placed["sampler"](str(folder), kit.ENGINE_ARGS, remote_group="sampler")
            manager = CheckpointEngineManager(model=trainer, sampler=sampler, bucket_size_bytes=1 << 14, timeout_s=60)
            for seed in (1, 2):
                reference.load_state_dict({name: torch.from_numpy(value) for name, value in trainer.train(seed).items()})
                stale = logprob_error(sampler, reference, prompts, temperature=0.7, max_tokens=6, score=False)
                report = manager.sync_weights()
                assert (report.version, report.num_tensors) == (seed, len(kit.tensors_of(reference)))
                assert stale > 0.1  # the control: without the sync they differ
                assert logprob_error(sampler, reference, prompts, temperature=0.7, max_tokens=6, score=False) < 2e-5
            assert sampler.weight_version() == 2
            responses = sampler.sample(prompts, {"max_tokens": 4}, num_samples=2)
            assert [response.prompt_token_ids for response in responses] == prompts
            assert {s.new_input_feature.weight_version for r in responses for s in r.sequences} == {2}
            same = sampler.sample([prompts[0]] * 2, {"max_tokens": 12})
            assert same[0].sequences[0].tokens != same[1].sequences[0].tokens  # on two ranks, too
            assert len(list(tmp_path.glob("twinkle-engine-*"))) == num_samplers
            trainer.train(3)
            with pytest.raises(Exception, match="max_model_len is 64"):
                sampler.sample([[5] * 64] * num_samplers)[0].raise_for_error()
        assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []  # torch's cache, which is to stay
    finally:
        reference.load_state_dict(start)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_trainer_rank_that_is_killed_in_a_sync_leaves_a_sampler_that_refuses_and_a_group_that_syncs_again(kit, models, prompts):
    folder, reference = models["old"]
    groups = [DeviceGroup("trainer", 2, "cpu"), DeviceGroup("sampler", 1, "cpu")]
    placed: Any = {"trainer": Trainer, "sampler": vLLMSampler}
    with initialize("ray", groups=groups, threads_per_worker=1, start_timeout_s=400, call_timeout_s=400):
        trainer = placed["trainer"](str(folder), remote_group="trainer", on_failure="restart")
        sampler = placed["sampler"](str(folder), kit.ENGINE_ARGS, remote_group="sampler")
        manager = CheckpointEngineManager(model=trainer, sampler=sampler, bucket_size_bytes=1 << 14, timeout_s=60)
        manager.sync_weights()
        assert logprob_error(sampler, reference, prompts) < 2e-5
        for attempt, rank in enumerate((0, 1)):  # the one that sends, and one that it exports with
            trainer.die(rank, 8)
            started = time.monotonic()
            with pytest.raises(Exception, match=r"died|SIGKILL|killed|lost|connection"):
                manager.sync_weights()
            assert time.monotonic() - started < 90
            assert manager.is_stale
            with pytest.raises(WeightsUnavailable, match="sync_weights"):
                list(sampler.sample(prompts))
            report = manager.sync_weights()  # the trainer starts again, with its first weights
            assert report.version == 2 * attempt + 3
            assert logprob_error(sampler, reference, prompts) < 2e-5
