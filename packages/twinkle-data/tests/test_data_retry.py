"""RetrySampler: prompts without signal are replaced or tried again, with completions of one batch from one policy."""

import pytest

from twinkle_data import (
    DataLoader,
    DatasetError,
    InputFeature,
    Message,
    NoSignalError,
    RetrySampler,
    SampledSequence,
    SampleResponse,
    Trajectory,
)


class Policy:
    """Samples two completions a prompt. Prompt p is solved by neither when p % 3 is 0, unless `solves`; by one of two otherwise."""

    def __init__(self, never=lambda prompt: prompt % 3 == 0):
        self.never, self.seen, self.rounds = never, [], []

    def sample(self, rows):
        self.rounds.append(list(rows))
        self.seen += rows
        return [SampleResponse(sequences=[sequence(row), sequence(row)], prompt_token_ids=[row]) for row in rows]

    def reward(self, rows, responses):
        assert all(len(response.sequences) == 2 for response in responses)
        return [reward for row in rows for reward in (0.0, float(not self.never(row)))]


def sequence(token):
    return SampledSequence(tokens=[token], logprobs=[], stop_reason="stop", decoded="", new_input_feature=InputFeature(input_ids=[token]))


def retrying(policy, *, rows=30, loader_batch=4, batch_size=5, **options):
    loader = DataLoader(range(rows), batch_size=loader_batch, drop_last=False)
    return RetrySampler(loader, policy.sample, policy.reward, batch_size=batch_size, **options)


def test_batches_are_full_and_every_group_has_signal():
    policy = Policy()
    sampler = retrying(policy)
    batches = list(sampler)
    assert [[group.row for group in batch] for batch in batches] == [[1, 2, 4, 5, 7], [8, 10, 11, 13, 14], [16, 17, 19, 20, 22], [23, 25, 26, 28, 29]]
    assert all(group.has_signal and group.rewards == [0.0, 1.0] and group.response.prompt_token_ids == [group.row] for b in batches for group in b)
    assert policy.seen == list(range(30)), "no prompt is sampled that is not needed"
    assert (sampler.num_sampled, sampler.num_without_signal) == (30, 10)


def test_a_round_samples_only_what_is_missing():
    policy = Policy()
    retrying(policy).next()
    assert policy.rounds == [[0, 1, 2, 3, 4], [5, 6], [7]]


def test_a_prompt_without_signal_is_tried_again_later_and_not_for_ever():
    policy = Policy(never=lambda prompt: prompt == 0)
    sampler = retrying(policy, rows=10, batch_size=3, max_attempts=3)
    assert [[group.row for group in batch] for batch in sampler] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert policy.seen.count(0) == 3
    again = Policy(never=lambda prompt: prompt == 0 and again.seen.count(0) < 2)
    groups = [group for batch in retrying(again, rows=10, batch_size=2, max_attempts=3) for group in batch]
    assert {group.row: group.attempts for group in groups}[0] == 2
    assert len(groups) == 10


def test_too_little_signal_is_an_error_or_a_short_batch():
    with pytest.raises(NoSignalError, match="0 of 15 prompts had rewards that differ, 5 are needed"):
        retrying(Policy(never=lambda _: True), max_rounds=3).next()
    short = retrying(Policy(never=lambda prompt: prompt > 2), max_rounds=3, when_short="give").next()
    assert short is not None
    assert [group.row for group in short] == [0, 1, 2]


def test_prompts_that_are_used_up_end_the_batches():
    assert list(retrying(Policy(never=lambda _: True), rows=8, loader_batch=8)) == []
    assert [len(batch) for batch in retrying(Policy(), rows=8, when_short="give")] == [5]


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_resuming_equals_not_having_stopped(stop):
    def rows(batches):
        return [[(group.row, group.attempts) for group in batch] for batch in batches]

    options = {"rows": 40, "batch_size": 3, "max_attempts": 2}
    whole = rows(retrying(Policy(), **options))
    first = retrying(Policy(), **options)
    seen = rows(batch for _, batch in zip(range(stop), first, strict=False))
    second = retrying(Policy(), **options)
    second.load_state_dict(first.state_dict())
    assert seen + rows(second) == whole


def test_rows_may_be_trajectories():
    rows = [Trajectory(messages=[Message(role="user", content=str(i))]) for i in range(4)]
    sampler = RetrySampler(
        DataLoader(rows, batch_size=2),
        lambda drawn: [SampleResponse(sequences=[sequence(1), sequence(2)], prompt_token_ids=[1]) for _ in drawn],
        lambda drawn, responses: [0.0, 1.0] * len(drawn),
        batch_size=2,
    )
    assert [[group.row for group in batch] for batch in sampler] == [rows[:2], rows[2:]]


def test_wrong_numbers_are_refused():
    with pytest.raises(DatasetError, match="batch_size is 0"):
        retrying(Policy(), batch_size=0)
    with pytest.raises(DatasetError, match="when_short is 'drop'"):
        retrying(Policy(), when_short="drop")
    loader = DataLoader(range(4), batch_size=4)
    with pytest.raises(DatasetError, match="sample returned 0 responses for 2 prompts"):
        RetrySampler(loader, lambda rows: [], Policy().reward, batch_size=2).next()
    with pytest.raises(DatasetError, match="reward returned 0 numbers for 4 sequences"):
        RetrySampler(loader, Policy().sample, lambda rows, responses: [], batch_size=2).next()
