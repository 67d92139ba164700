"""Requests that enter one by one: collecting, aborting, pausing, and weights that change in flight."""

import time

import numpy as np
import pytest

from twinkle_remote import remote_class
from twinkle_sync import CheckpointEngineManager, WeightSender, WeightsUnavailable
from twinkle_vllm import EngineFailed, PromptError, SamplerError, SamplerPaused, SamplingOptionError, StaleRequest

pytestmark = pytest.mark.timeout(300)  # the first test starts the engine

LONG = {"max_tokens": 40, "logit_bias": {1: -100.0}, "logprobs": False}  # never the end token
LONG_GREEDY = {"temperature": 0, "max_tokens": 40, "stop_token_ids": []}


@remote_class()
class Source(WeightSender):
    def __init__(self, tensors):
        self.tensors = tensors

    def iter_weights(self):
        for item in self.tensors:
            if isinstance(item, Exception):
                raise item
            yield item


def wait_for(sampler, ids, seconds=60.0):
    """The responses in the order in which they finish."""
    found, end = [], time.monotonic() + seconds
    while len(found) < len(ids):
        assert time.monotonic() < end, f"{len(found)} of {len(ids)} came"
        found += sampler.collect(ids, wait_s=1.0)
    return found


def until_tokens(sampler, count):
    """Wait until each running request has sampled so many tokens."""
    states = sampler._engine.llm_engine.output_processor.request_states
    assert sampler._loop.wait_until(lambda: bool(states) and all(s.detokenizer.num_output_tokens() >= count for s in states.values()), 60)


def test_responses_come_as_they_finish_each_once(sampler, prompts):
    ids = sampler.submit([prompts[0], prompts[1], [5] * 64], [LONG, {"max_tokens": 1}, {}])
    assert len(set(ids)) == 3
    found = wait_for(sampler, ids)
    assert [name for name, _ in found].index(ids[1]) < [name for name, _ in found].index(ids[0])
    by_id = dict(found)
    assert len(by_id[ids[0]].sequences[0].tokens) == 40
    with pytest.raises(PromptError, match=r"inputs\[2\] has 64 tokens"):
        by_id[ids[2]].raise_for_error()
    assert sampler.collect(ids) == sampler.collect() == []
    for one in (sampler.collect, sampler.abort, sampler.peek):
        with pytest.raises(SamplingOptionError, match="put it into a list"):
            one(ids[0])


def test_an_aborted_request_gives_what_it_has_and_can_be_sampled_on_from(kit, sampler, models, prompts):
    options = {"temperature": 0.8, "max_tokens": 45, "stop_token_ids": []}
    with slowly(sampler):
        ids = sampler.submit([prompts[5][:4]] * 2, options, num_samples=2)
        until_tokens(sampler, 3)
        assert sampler.abort([ids[0], "unknown"]) == 1
    responses = dict(wait_for(sampler, ids))
    partial = responses[ids[0]]
    assert [sequence.stop_reason for sequence in partial.sequences] == ["abort"] * 2
    assert all(2 < len(sequence.tokens) < 45 for sequence in partial.sequences)
    assert all(sequence.stop_reason != "abort" for sequence in responses[ids[1]].sequences)
    (continued,) = sampler.sample([partial.sequences[0].new_input_feature], {"temperature": 0.8, "max_tokens": 4})
    feature = continued.sequences[0].new_input_feature
    expected = kit.hf_logprobs(models["old"][1], feature.input_ids, 0.8)
    np.testing.assert_allclose(feature.logprobs, np.where(feature.completion_mask, expected, 0), atol=2e-5)
    assert sampler.abort() == 0
    assert not sampler._engine.llm_engine.has_unfinished_requests()


def test_a_pause_keeps_waits_or_aborts(sampler, prompts):
    with slowly(sampler):
        kept = sampler.submit([prompts[0]], LONG)
        until_tokens(sampler, 2)
        sampler.pause("keep")
        waiting = sampler.submit([prompts[1]], {"max_tokens": 2})
        assert sampler.collect(wait_s=0.2) == []
        for call in (sampler.sample, sampler.score):
            with pytest.raises(SamplerPaused, match="resume"):
                call(prompts)
        sampler.resume()
        assert {name for name, _ in wait_for(sampler, kept + waiting)} == {*kept, *waiting}

        ids = sampler.submit([prompts[0]], LONG)
        until_tokens(sampler, 1)
        with pytest.raises(SamplerError, match=r"1 requests still run after 0\.01 s"):
            sampler.pause("wait", timeout_s=0.01)
        sampler.pause("wait")
        later = sampler.submit([prompts[1]], {"max_tokens": 2})
        ((name, response),) = sampler.collect(wait_s=0.2)
        assert (name, len(response.sequences[0].tokens)) == (ids[0], 40)
        sampler.resume()
        wait_for(sampler, later)

        ids = sampler.submit([prompts[0]], LONG)
        until_tokens(sampler, 2)
        sampler.pause("abort")
        ((_, response),) = wait_for(sampler, ids)
        assert response.sequences[0].stop_reason == "abort"
        never = sampler.submit([prompts[2]], LONG, num_samples=2)
        assert sampler.abort() == 1
        assert [s.tokens for s in dict(wait_for(sampler, never))[never[0]].sequences] == [[], []]
        sampler.resume()


def test_weights_change_in_flight_and_every_token_knows_its_version(kit, sampler, models, prompts):
    old, new = models["old"][1], models["new"][1]
    prompt = [*range(3, 37)]  # more than a block of the prefix cache
    kit.load(sampler, old, version=1)
    manager = CheckpointEngineManager(model=Source(kit.tensors_of(new)), sampler=sampler, first_version=2)
    with slowly(sampler):
        ids = sampler.submit([prompt] * 3, {"temperature": 0.7, "max_tokens": 25, "stop_token_ids": []})
        until_tokens(sampler, 4)
        manager.sync_weights()
        responses = [response for _, response in wait_for(sampler, ids)]
    both = 0
    for response in responses:
        (sequence,) = response.sequences
        versions = np.array(sequence.weight_versions)
        assert versions.tolist() == sorted(versions.tolist())
        assert set(versions) <= {1, 2}
        both += len(set(versions)) == 2
        feature = sequence.new_input_feature
        expected = {version: kit.hf_logprobs(model, feature.input_ids, 0.7)[len(prompt) :] for version, model in ((1, old), (2, new))}
        # Each token's log-probability is that of its version's model over the whole prefix, tokens of the other version included.
        np.testing.assert_allclose(sequence.logprobs, np.where(versions == 1, expected[1], expected[2]), atol=2e-5)
        assert np.abs(sequence.logprobs - expected[1]).max() > 0.1  # the control: the models differ
        assert feature.weight_version == 1
    assert both > 0


def test_a_failed_update_ends_what_runs_with_the_error(kit, sampler, models, prompts):
    tensors = kit.tensors_of(models["new"][1])
    manager = CheckpointEngineManager(model=Source([*tensors[:3], ZeroDivisionError("no more")]), sampler=sampler, bucket_size_bytes=1 << 12)
    with slowly(sampler):
        ids = sampler.submit(prompts[:2], LONG)
        until_tokens(sampler, 2)
        with pytest.raises(ZeroDivisionError):
            manager.sync_weights()
    for _, response in wait_for(sampler, ids):
        with pytest.raises(WeightsUnavailable, match="no more"):
            response.raise_for_error()
    with pytest.raises(WeightsUnavailable):
        sampler.submit(prompts)


def test_a_request_that_was_checked_before_an_update_that_fails_is_not_served_by_what_it_leaves(kit, sampler, models, prompts):
    requests = [job.request for job in sampler._begin(prompts[:1], LONG, None, "")]
    tensors = kit.tensors_of(models["new"][1])
    with pytest.raises(ZeroDivisionError):
        CheckpointEngineManager(model=Source([*tensors[:5], ZeroDivisionError()]), sampler=sampler).sync_weights()
    sampler._loop.submit(requests)
    with pytest.raises(WeightsUnavailable, match="failed"):
        requests[0].ended.result(60)


def test_an_engine_that_raises_fails_its_requests_and_serves_the_next(sampler, prompts, monkeypatch):
    def broken():
        raise RuntimeError("out of luck")

    monkeypatch.setattr(sampler._engine.llm_engine, "step", broken)
    with pytest.raises(EngineFailed, match="RuntimeError: out of luck"):
        sampler.sample(prompts[:2])
    ids = sampler.submit(prompts[:1])
    ((_, response),) = wait_for(sampler, ids)
    with pytest.raises(EngineFailed, match="out of luck"):
        response.raise_for_error()
    monkeypatch.undo()
    assert len(sampler.sample(prompts[:2], {"max_tokens": 2})) == 2


def test_a_thousand_requests_with_random_aborts_are_each_answered_once(sampler, prompts):
    generator = np.random.default_rng(0)
    submitted, answered, aborted = [], [], set()
    for _ in range(50):
        lengths = generator.integers(1, 12, size=20)
        ids = sampler.submit([prompts[int(i) % 12] for i in lengths], [{"max_tokens": int(n), "logprobs": False} for n in lengths])
        submitted += ids
        if generator.random() < 0.7:
            chosen = [str(name) for name in generator.choice(ids, 3, replace=False)]
            aborted |= set(chosen)
            sampler.abort(chosen)
        answered += sampler.collect()
    answered += wait_for(sampler, [name for name in submitted if name not in dict(answered)])
    assert sorted(name for name, _ in answered) == sorted(submitted)
    assert all(response.error is None and len(response.sequences) == 1 for _, response in answered)
    ended = {name for name, response in answered if response.sequences[0].stop_reason == "abort"}
    assert ended <= aborted
    assert ended
    assert sampler._jobs == {}
    assert sampler._loop.unfinished == []
    processor = sampler._engine.llm_engine.output_processor
    assert not processor.request_states
    assert not processor.external_req_ids
    assert not processor.parent_requests


@pytest.mark.parametrize("when_stale", ["block", "drop"])
def test_staleness_is_bounded_by_waiting_or_by_dropping(kit, sampler, models, prompts, monkeypatch, when_stale):
    monkeypatch.setattr(sampler, "_max_staleness", 1)
    monkeypatch.setattr(sampler, "_when_stale", when_stale)
    manager = CheckpointEngineManager(model=Source(kit.tensors_of(models["new"][1])), sampler=sampler, timeout_s=60)
    with slowly(sampler):
        (early,) = sampler.submit([prompts[0]], {**LONG, "max_tokens": 30})
        until_tokens(sampler, 2)
        manager.sync_weights()  # version 1: one more than it began with
        assert sampler.collect() == []
        manager.sync_weights()  # version 2: too many
        ((name, response),) = sampler.collect()
    assert name == early
    if when_stale == "drop":
        with pytest.raises(StaleRequest, match="older than version 1, and version 2 comes now"):
            response.raise_for_error()
    else:
        assert len(response.sequences[0].tokens) == 30
        assert set(response.sequences[0].weight_versions) == {0, 1}
    assert sampler.weight_version() == 2


class slowly:
    """Steps of at least 10 ms, so that what a test does happens in the middle of a request."""

    def __init__(self, sampler):
        self.engine = sampler._engine.llm_engine

    def __enter__(self):
        step = self.engine.step

        def slow():
            time.sleep(0.01)
            return step()

        self.engine.step = slow

    def __exit__(self, *exc_info):
        del self.engine.step


def test_asleep_nothing_is_served_or_taken_and_awake_only_current_weights_serve(kit, sampler, models, prompts):
    old, new = models["old"][1], models["new"][1]
    manager = CheckpointEngineManager(model=Source(kit.tensors_of(new)), sampler=sampler)
    manager.sync_weights()
    with slowly(sampler):
        ids = sampler.submit(prompts[:1], LONG)
        with pytest.raises(SamplerError, match="1 requests run or wait"):
            sampler.sleep()
        sampler.abort(ids)
        sampler.collect(ids, wait_s=10)
    for level in (1, 2):
        sampler.sleep(level)
        for call in (lambda: sampler.sample(prompts), lambda: sampler.submit(prompts), lambda: sampler.score(prompts), sampler.weight_version):
            with pytest.raises(WeightsUnavailable, match=r"the sampler sleeps: call wake\(\)"):
                call()
        with pytest.raises(WeightsUnavailable, match="it can take no weights"):
            manager.sync_weights()
        with pytest.raises(SamplerError, match="sleeps already"):
            sampler.sleep()
        sampler.wake()
        sampler.wake()  # once more does nothing
        if level == 1:
            assert sampler.weight_version() == 1
            for prompt, scores in zip(prompts, sampler.score(prompts), strict=True):
                np.testing.assert_allclose(scores, kit.hf_logprobs(new, prompt), atol=2e-5)
    with pytest.raises(WeightsUnavailable, match=r"sleep\(level=2\) has dropped the weights; call sync_weights\(\)"):
        sampler.sample(prompts)
    later = CheckpointEngineManager(model=Source(kit.tensors_of(old)), sampler=sampler, first_version=manager.version + 3)
    later.sync_weights()
    assert sampler.weight_version() == later.version
    for prompt, scores in zip(prompts, sampler.score(prompts), strict=True):
        np.testing.assert_allclose(scores, kit.hf_logprobs(old, prompt), atol=2e-5)
