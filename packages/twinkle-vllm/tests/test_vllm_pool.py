"""Several samplers as one: balance, affinity, order, aborts; and a replica that dies, on a real Ray."""

import asyncio
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from twinkle_data import Template
from twinkle_mesh import DeviceGroup
from twinkle_remote import WorkerDiedError, initialize, remote_class, remote_function
from twinkle_sync import CheckpointEngineManager, CheckpointFolder, WeightSender
from twinkle_vllm import PromptError, ReplicaLost, SamplerPool, SamplingOptionError, vLLMSampler

pytestmark = pytest.mark.timeout(300)  # the first test starts the engine


@pytest.fixture(scope="module")
def second(kit, models):
    return vLLMSampler(models["old"][0], kit.ENGINE_ARGS)


@pytest.fixture
def pool(kit, sampler, second, models, tokenizer):
    kit.load(second, models["old"][1])
    second.set_template(Template(tokenizer))
    with SamplerPool([sampler, second]) as made:
        until(lambda: [status.state for status in made.status()] == ["serving"] * 2)
        yield made


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_responses_are_those_of_one_sampler_in_order(pool, sampler, prompts):
    options = {"temperature": 0, "max_tokens": 6}
    inputs = [*prompts, [5] * 64, prompts[0]]
    responses = pool.sample(inputs, options)
    with pytest.raises(PromptError, match="64 tokens"):
        responses[-2].raise_for_error()
    expected = sampler.sample([*prompts, prompts[0]], options)
    assert [r.sequences[0].tokens for r in responses if r.error is None] == [r.sequences[0].tokens for r in expected]
    assert pool.sample([]) == []
    with pytest.raises(SamplingOptionError, match="temprature"):
        pool.sample(prompts, {"temprature": 1})
    good, bad = pool.sample(prompts[:2], [{"max_tokens": 2}, {"temprature": 1}])
    assert good.error is None
    with pytest.raises(SamplingOptionError, match=r"inputs\[1\]: unknown sampling options \['temprature'\]"):
        bad.raise_for_error()


def test_work_is_spread_by_outstanding_tokens_and_equal_prompts_stay_together(pool, sampler, second, prompts):
    taken: dict[int, list[list[int]]] = {0: [], 1: []}
    originals = [sampler._loop.submit, second._loop.submit]
    for index, one in enumerate((sampler, second)):

        def noting(requests, index=index):
            requests = list(requests)
            taken[index] += [request.prompt.input_ids.tolist() for request in requests]
            originals[index](requests)

        one._loop.submit = noting
    try:
        pool.sample(prompts, {"max_tokens": 8})
        sizes = [sum(len(prompt) + 8 for prompt in taken[index]) for index in (0, 1)]
        assert min(sizes) > 0.6 * max(sizes)
        for index in (0, 1):
            taken[index].clear()
        pool.sample([prompts[0]] * 3, {"max_tokens": 8}, num_samples=2)
        assert sorted(map(len, taken.values())) == [0, 3]
    finally:
        for one in (sampler, second):
            del one._loop.submit


def test_results_come_as_they_finish_and_an_abort_ends_them(pool, prompts):
    async def order():
        options = [{"max_tokens": 40, "logit_bias": {1: -100.0}, "logprobs": False}] + [{"max_tokens": 1}] * 3
        return [index async for index, _ in pool.sample_async(prompts[:4], options)]

    found = asyncio.run(order())
    assert sorted(found) == [0, 1, 2, 3]
    assert found[-1] == 0
    answers = pool.submit(prompts * 4, {"max_tokens": 40, "logit_bias": {1: -100.0}, "logprobs": False})
    pool.abort(answers)
    reasons = {sequence.stop_reason for answer in answers for sequence in answer.result(60).sequences}
    assert "abort" in reasons
    assert all(status.outstanding_tokens == 0 for status in pool.status())


class Fragile:
    """A sampler of this process. Once killed its next call fails, as that of a component that then restarts, with its first weights."""

    def __init__(self, sampler, restart):
        self.sampler, self.restart = sampler, restart
        self.is_killed = False

    def __getattr__(self, name):
        def call(*args, **kwargs):
            if self.is_killed:
                self.is_killed = False
                self.sampler.abort()
                self.sampler.collect()
                self.restart()
                raise WorkerDiedError("the process was killed")
            return getattr(self.sampler, name)(*args, **kwargs)

        return call


@remote_class()
class Source(WeightSender):
    def __init__(self, tensors):
        self.tensors = tensors

    def iter_weights(self):
        yield from self.tensors


@pytest.mark.parametrize("on_failure", ["retry", "error"])
def test_requests_of_a_lost_replica_are_retried_or_told_and_it_serves_with_current_weights_only(
    kit, sampler, second, models, prompts, tokenizer, on_failure
):
    old, new = models["old"][1], models["new"][1]
    manager = CheckpointEngineManager(model=Source(kit.tensors_of(new)), sampler=sampler)
    manager.sync_weights()
    kit.load(second, new, version=1)
    fragile: Any = Fragile(sampler, lambda: kit.load(sampler, old, version=0))
    options = {"max_tokens": 30, "temperature": 0.7, "logit_bias": {1: -100.0}, "logprobs": False}
    with SamplerPool([fragile, second], weights=manager, on_failure=on_failure) as made:
        until(lambda: [status.state for status in made.status()] == ["serving"] * 2)
        answers = made.submit(prompts * 4, options)
        until(lambda: any(sampler._jobs.values()))
        fragile.is_killed = True
        responses = [answer.result(60) for answer in answers]
        lost = [response for response in responses if response.error is not None]
        if on_failure == "retry":
            assert lost == []
        else:
            assert lost
            for response in lost:
                with pytest.raises(ReplicaLost, match=r"the replica died with the request .*WorkerDiedError: the process was killed"):
                    response.raise_for_error()
        served = [sequence for response in responses for sequence in response.sequences]
        assert {version for sequence in served for version in sequence.weight_versions} == {1}
        # It is back with the weights that it was built with, so it waits.
        until(lambda: made.status()[0].state == "waiting")
        assert made.status()[0].losses == 1
        assert all(response.error is None for response in made.sample(prompts, {"max_tokens": 2}))
        assert sampler._jobs == {}
        kit.load(second, new, version=2)
        manager.sync_weights()
        until(lambda: made.status()[0].state == "serving")
        for prompt, scores in zip(prompts, sampler.score(prompts), strict=True):
            np.testing.assert_allclose(scores, kit.hf_logprobs(new, prompt), atol=2e-5)


def test_a_lost_replica_can_fetch_the_current_weights_itself(kit, sampler, models, prompts):
    old, new = models["old"][1], models["new"][1]
    manager = CheckpointEngineManager(model=Source(kit.tensors_of(new)), sampler=sampler)
    manager.sync_weights()
    fragile: Any = Fragile(sampler, lambda: kit.load(sampler, old, version=0))
    with SamplerPool([fragile], weights=manager, resync=True) as made:
        until(lambda: made.status()[0].state == "serving")
        fragile.is_killed = True
        responses = made.sample(prompts, {"max_tokens": 4})  # of the only replica: they wait until it is back
        assert {version for response in responses for version in response.sequences[0].weight_versions} == {2}
        for prompt, response in zip(prompts, responses, strict=True):
            feature = response.sequences[0].new_input_feature
            assert feature.logprobs is not None
            np.testing.assert_allclose(feature.logprobs[len(prompt) :], kit.hf_logprobs(new, feature.input_ids)[len(prompt) :], atol=2e-5)


def test_without_a_replica_that_could_come_back_requests_end_with_the_error(sampler, prompts):
    class Dead:
        def __getattr__(self, name):
            def call(*args, **kwargs):
                raise WorkerDiedError("it is gone")

            return call

    dead: Any = Dead()
    with SamplerPool([dead]) as made:
        (response,) = made.sample(prompts[:1])
        with pytest.raises(ReplicaLost, match="no replica is left: WorkerDiedError: it is gone"):
            response.raise_for_error()


@remote_class(on_failure="restart")
class Mortal(vLLMSampler):
    """A sampler whose process can be told."""

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def pid(self) -> int:
        return os.getpid()


@pytest.mark.full
@pytest.mark.timeout(1200)  # three engines start; on a busy machine each takes minutes
@pytest.mark.parametrize("on_failure", ["retry", "error"])
def test_a_killed_replica_loses_nothing_and_serves_again_with_current_weights(kit, models, prompts, on_failure):
    groups = [DeviceGroup("trainer", 1, "cpu"), DeviceGroup("one", 1, "cpu"), DeviceGroup("two", 1, "cpu")]
    folder, new = models["new"]
    placed: Any = Mortal
    source: Any = CheckpointFolder
    with initialize("ray", groups=groups, threads_per_worker=1, start_timeout_s=400, call_timeout_s=400):
        replicas = [placed(str(models["old"][0]), kit.ENGINE_ARGS, remote_group=name) for name in ("one", "two")]
        weights = CheckpointEngineManager(model=source(str(folder), remote_group="trainer"), sampler=replicas, timeout_s=120)
        weights.sync_weights()
        with SamplerPool(replicas, weights=weights, on_failure=on_failure, resync=True) as pool:
            until(lambda: [status.state for status in pool.status()] == ["serving"] * 2)
            answers = pool.submit(prompts * 20, {"max_tokens": 30, "temperature": 0.7})
            until(lambda: sum(answer.done() for answer in answers) > 2)
            os.kill(replicas[0].pid(), signal.SIGKILL)
            responses = [answer.result(200) for answer in answers]
            lost = [response for response in responses if response.error is not None]
            assert len(responses) == 20 * len(prompts)
            if on_failure == "retry":
                assert lost == []
            else:
                assert lost
                for response in lost:
                    with pytest.raises(ReplicaLost, match="the replica died with the request"):
                        response.raise_for_error()
            until(lambda: [status.state for status in pool.status()] == ["serving"] * 2, 400)
            assert pool.status()[0].losses == 1
            # Every attempt counts as a version.
            assert weights.version > 1
            assert [replica.weight_version() for replica in replicas] == [weights.version] * 2
            for replica in replicas:  # with the new weights, not those of its folder
                for prompt, scores in zip(prompts, replica.score(prompts), strict=True):
                    np.testing.assert_allclose(scores, kit.hf_logprobs(new, prompt), atol=2e-5)
