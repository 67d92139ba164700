"""Two trainer ranks and a sampler on a real Ray: sync, sample, compare."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from twinkle_mesh import DeviceGroup
from twinkle_remote import initialize, remote_class, remote_function, rendezvous
from twinkle_sync import CheckpointEngineManager, WeightSender
from twinkle_vllm import vLLMSampler


@remote_class()
class Trainer(WeightSender):
    """Plain torch: each of two ranks owns every other tensor, so that exporting them is collective."""

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
            tensor = parameter.detach().clone() if index % 2 == self.rank else torch.empty_like(parameter)
            dist.broadcast(tensor, index % 2)
            yield name, tensor

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def train(self, seed: int) -> dict[str, np.ndarray]:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        return {name: tensor.numpy().copy() for name, tensor in self.model.state_dict().items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_samplers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_sampler_group_follows_a_trainer_group(kit, models, prompts, num_samplers):
    folder, reference = models["old"]
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
                stale = _error(kit, reference, sampler, prompts)
                report = manager.sync_weights()
                assert (report.version, report.num_tensors) == (seed, len(kit.tensors_of(reference)))
                assert stale > 0.1  # the control: without the sync they differ
                assert _error(kit, reference, sampler, prompts) < 2e-5
            assert sampler.weight_version() == 2
            responses = sampler.sample(prompts, {"max_tokens": 4}, num_samples=2)
            assert [response.prompt_token_ids for response in responses] == prompts
            assert {s.new_input_feature.weight_version for r in responses for s in r.sequences} == {2}
            same = sampler.sample([prompts[0]] * 2, {"max_tokens": 12})
            assert same[0].sequences[0].tokens != same[1].sequences[0].tokens  # on two ranks, too
            trainer.train(3)
            with pytest.raises(Exception, match="max_model_len is 64"):
                sampler.sample([[5] * 64] * num_samplers)[0].raise_for_error()
    finally:
        reference.load_state_dict(start)


def _error(kit: Any, model: Any, sampler: Any, prompts: list[list[int]]) -> float:
    worst = 0.0
    for prompt, response in zip(prompts, sampler.sample(prompts, {"max_tokens": 6, "temperature": 0.7}), strict=True):
        sequence = response.sequences[0]
        expected = kit.hf_logprobs(model, [*prompt, *sequence.tokens], 0.7)[len(prompt) :]
        worst = max(worst, float(np.abs(expected - sequence.logprobs).max()))
    return worst
