"""The official SDK, unmodified, against a server of one small model."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
import uvicorn
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from twinkle_server import ServerConfig, Store, create_app, create_key, parse_config
from twinkle_train.testing import tiny_qwen3

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

MODEL = "tiny/qwen3"


class Served:
    """A server in a thread of this process, on one port whenever it runs."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.url = f"http://127.0.0.1:{config.port}"
        store = Store(config.url)
        self.keys = {name: create_key(store, name)[1] for name in ("ann", "bob")}
        store.close()
        self._clients: list[tinker.ServiceClient] = []

    def start(self) -> None:
        options = uvicorn.Config(create_app(self.config), port=self.config.port, log_level="error", timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline, "the server did not start in time"
            time.sleep(0.02)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not stop"

    def client(self, tenant: str) -> tinker.ServiceClient:
        made = tinker.ServiceClient(base_url=self.url, api_key=self.keys[tenant])
        self._clients.append(made)
        return made

    def close_clients(self) -> None:
        """Ends the threads of all clients; their heartbeats would go on, and fail, when the server has gone."""
        for client in self._clients:
            client.close("success").result()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tinker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("TINKER_TELEMETRY", "0")
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        path = tiny_qwen3(folder / "model", hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1)
        model = {"name": MODEL, "path": str(path), "max_length": 128, "micro_batch_size": 8, "sampler": {"backend": "transformers"}}
        server = Served(parse_config({"data_dir": str(folder / "data"), "port": port, "models": [model], "limits": {"wait_s": 0.5}}))
        server.start()
        yield server
        server.close_clients()
        server.stop()


@pytest.fixture(scope="module")
def ann(served: Served) -> tinker.ServiceClient:
    return served.client("ann")


@pytest.fixture
def trainer(ann: tinker.ServiceClient) -> tinker.TrainingClient:
    # Waited for: tinker 0.38 blocks for ever when a REST client is made while this is under way.
    return ann.create_lora_training_client(base_model=MODEL, rank=8).result()


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    """A sequence, shifted as the protocol wants it; inputs are given for its targets."""
    loss_inputs: Any = {"target_tokens": tokens[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=loss_inputs)


def batch(seed: int = 0, rows: int = 4) -> list[types.Datum]:
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(rows):
        tokens = rng.integers(5, 60, int(rng.integers(6, 14))).tolist()
        data.append(datum(tokens, weights=[0.0, 0.0] + [1.0] * (len(tokens) - 3)))
    return data


def logprobs_of(trainer: tinker.TrainingClient, data: list[types.Datum]) -> list[np.ndarray]:
    return [output["logprobs"].to_numpy() for output in trainer.forward(data, "cross_entropy").result().loss_fn_outputs]


def adam(learning_rate: float = 1e-2, **params: Any) -> types.AdamParams:
    return types.AdamParams(learning_rate=learning_rate, **params)


def test_a_supervised_loop_learns_and_reports_what_the_protocol_defines(trainer):
    data = batch()
    losses = []
    for _ in range(16):
        # Submitted together, as the SDK's own examples do.
        run, step = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(adam())
        result = run.result()
        assert step.result().metrics["grad_norm"] > 0
        losses.append(result.metrics["loss:sum"])
        assert [output["logprobs"].shape for output in result.loss_fn_outputs] == [each.loss_fn_inputs["target_tokens"].shape for each in data]
        by_hand = sum(
            float(-(output["logprobs"].to_numpy() * each.loss_fn_inputs["weights"].to_numpy()).sum())
            for output, each in zip(result.loss_fn_outputs, data, strict=True)
        )
        assert losses[-1] == pytest.approx(by_hand, rel=1e-5)
    assert losses[-1] < 0.5 * losses[0], losses
    assert trainer.forward(data, "cross_entropy").result().metrics["loss:sum"] < losses[-1]


def test_the_gradient_of_the_sum_reaches_the_optimizer_and_is_clipped_when_asked(trainer):
    first, second = batch(1, 2), batch(2, 3)

    def norm_of(*parts: list[types.Datum], **params: Any) -> float:
        for part in parts:
            trainer.forward_backward(part, "cross_entropy")
        return trainer.optim_step(adam(0.0, **params)).result().metrics["grad_norm"]

    whole = norm_of(first + second)
    assert norm_of(first, second) == pytest.approx(whole, rel=1e-4), "calls do not add up"
    doubled = [datum([*each.model_input.to_ints(), 7], weights=2 * each.loss_fn_inputs["weights"].to_numpy()) for each in first]
    for each, other in zip(doubled, first, strict=True):
        each.loss_fn_inputs["target_tokens"] = other.loss_fn_inputs["target_tokens"]
    assert norm_of(doubled) == pytest.approx(2 * norm_of(first), rel=1e-4), "the loss is not a sum"
    before = logprobs_of(trainer, first)
    assert norm_of(first, grad_clip_norm=1e-3) == pytest.approx(norm_of(first), rel=1e-4)
    for have, want in zip(logprobs_of(trainer, first), before, strict=True):
        np.testing.assert_allclose(have, want, atol=1e-6)  # a learning rate of 0 changes nothing


@pytest.mark.parametrize(("loss", "config"), [("importance_sampling", None), ("ppo", {"clip_high_threshold": 1.28}), ("cispo", None)])
def test_a_reinforcement_loop_raises_what_was_rewarded(trainer, loss, config):
    prompt = [11, 12, 13, 14]
    sampler = trainer.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=5)
    sampled = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=6, sampling_params=params).result()
    rewards = np.array([np.mean(np.array(sequence.tokens) % 2) for sequence in sampled.sequences])
    advantages = rewards - rewards.mean()
    assert np.abs(advantages).max() > 0, "the samples tell nothing apart"
    data, plain = [], []
    for sequence, advantage in zip(sampled.sequences, advantages, strict=True):
        tokens = prompt + list(sequence.tokens)
        given = len(prompt) - 1
        old = [0.0] * given + list(sequence.logprobs)
        data.append(datum(tokens, logprobs=old, advantages=[0.0] * given + [float(advantage)] * len(sequence.tokens)))
        plain.append(datum(tokens))
    before = logprobs_of(trainer, plain)
    for sequence, values in zip(sampled.sequences, before, strict=True):
        np.testing.assert_allclose(sequence.logprobs, values[len(prompt) - 1 :], atol=1e-4)
    result = trainer.forward_backward(data, loss, config).result()
    assert result.metrics["logprob_gap:max"] < 1e-4, "the first ratio is not 1"
    trainer.optim_step(adam(3e-3)).result()
    gains = [float((new - old)[len(prompt) - 1 :].sum()) for new, old in zip(logprobs_of(trainer, plain), before, strict=True)]
    assert np.dot(gains, advantages) > 0.05, (gains, advantages)
    # The second time the ratios differ from 1, and the loss is the formula's.
    again = trainer.forward_backward(data, loss, config).result()
    want = 0.0
    for output, each in zip(again.loss_fn_outputs, data, strict=True):
        logprobs = torch.from_numpy(output["logprobs"].to_numpy())
        old, advantage = (each.loss_fn_inputs[name].to_torch() for name in ("logprobs", "advantages"))
        ratio = torch.exp(logprobs - old)
        if loss == "importance_sampling":
            terms = ratio * advantage
        elif loss == "ppo":
            terms = torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.28) * advantage)
        else:
            terms = torch.clamp(ratio, 0.0, 4.0) * logprobs * advantage
        want -= float(terms.sum())
    assert again.metrics["loss:sum"] == pytest.approx(want, rel=1e-4)


def test_a_custom_loss_is_computed_by_the_client_and_falls(trainer):
    data = [datum(each.model_input.to_ints()) for each in batch(3, 3)]

    def distance(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = torch.stack([((each + 1.0) ** 2).mean() for each in logprobs]).sum()
        return loss, {"distance": float(loss)}

    values = []
    for _ in range(6):
        result = trainer.forward_backward_custom(data, distance)
        trainer.optim_step(adam()).result()
        values.append(result.result().metrics["distance"])
    assert values[-1] < 0.6 * values[0], values


def test_targets_need_not_be_the_tokens_that_follow(trainer):
    tokens, wide = [9, 10, 11], np.array([[20, 21], [22, 23], [24, 25]])
    wanted: Any = {"target_tokens": wide}
    (many,) = logprobs_of(trainer, [types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=wanted)])
    assert list(many.shape) == [3, 2] or many.size == 6
    for column in range(2):
        for place in range(3):
            row = [*tokens[: place + 1], int(wide[place, column])]
            (one,) = logprobs_of(trainer, [datum(row)])
            assert many.reshape(3, 2)[place, column] == pytest.approx(one[-1], abs=1e-5)


def test_a_saved_state_goes_on_as_if_nothing_had_been(ann, trainer):
    data = batch(4)

    def step(client: tinker.TrainingClient) -> float:
        run = client.forward_backward(data, "cross_entropy")
        client.optim_step(adam()).result()
        return run.result().metrics["loss:sum"]

    step(trainer)
    path = trainer.save_state("begin").result().path
    assert path == f"tinker://{trainer.model_id}/weights/begin"
    at_save = logprobs_of(trainer, data)
    going_on = [step(trainer) for _ in range(3)]
    other = ann.create_training_client_from_state_with_optimizer(path).result()
    assert other.model_id != trainer.model_id
    assert [step(other) for _ in range(3)] == going_on, "the optimizer is not as it was"
    weights_only = ann.create_training_client_from_state(path).result()
    for have, want in zip(logprobs_of(weights_only, data), at_save, strict=True):
        np.testing.assert_array_equal(have, want)
    losses = [step(weights_only) for _ in range(3)]
    assert losses[0] == going_on[0]
    assert losses[1:] != going_on[1:], "load_state without the optimizer took its moments, too"
    trainer.load_state_with_optimizer(path).result()
    assert [step(trainer) for _ in range(3)] == going_on


def test_a_sampling_client_scores_and_samples_as_the_trainer_does(ann, trainer):
    data = batch(5)
    for _ in range(2):
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(adam()).result()
    path = trainer.save_weights_for_sampler("named").result().path
    assert path == f"tinker://{trainer.model_id}/sampler_weights/named"
    sampler = ann.create_sampling_client(model_path=path)
    tokens = [*data[0].model_input.to_ints(), 9]
    (mine,) = logprobs_of(trainer, [datum(tokens)])
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert scored[0] is None or np.isnan(scored[0])
    np.testing.assert_allclose(np.array(scored[1:], float), mine, atol=1e-4)
    params = types.SamplingParams(max_tokens=5, seed=3, stop=[])
    one, other = (sampler.sample(types.ModelInput.from_ints(tokens), num_samples=2, sampling_params=params).result() for _ in range(2))
    assert [each.tokens for each in one.sequences] == [each.tokens for each in other.sequences], "a seed does not repeat"
    assert all(each.stop_reason == "length" and len(each.tokens) == 5 for each in one.sequences)
    first = one.sequences[0].tokens[0]
    stopped = sampler.sample(types.ModelInput.from_ints(tokens), 1, types.SamplingParams(max_tokens=5, seed=3, stop=[first])).result().sequences[0]
    assert (stopped.tokens, stopped.stop_reason) == ([first], "stop")
    base = ann.create_sampling_client(base_model=MODEL).compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert np.abs(np.array(base[1:], float) - mine).max() > 1e-2, "the adapter makes no difference"


def test_runs_and_checkpoints_are_listed_published_and_deleted(served, ann, trainer):
    rest = ann.create_rest_client()
    for name in ("one", "two"):
        trainer.save_state(name, user_metadata={"step": name}, ttl_seconds=7200)
    trainer.save_weights_for_sampler("three").result()
    run = rest.get_training_run(trainer.model_id).result()
    assert (run.base_model, run.model_owner, run.lora_rank, run.corrupted) == (MODEL, "ann", 8, False)
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.checkpoint_id == "weights/two"
    assert trainer.model_id in [each.training_run_id for each in rest.list_training_runs().result().training_runs]
    listed = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert [each.checkpoint_id for each in listed] == ["sampler_weights/three", "weights/two", "weights/one"]
    assert [each.checkpoint_type for each in listed] == ["sampler", "training", "training"]
    assert (listed[1].user_metadata, listed[1].expires_at is not None, listed[0].expires_at) == ({"step": "two"}, True, None)
    assert listed[0].tinker_path in [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints]

    theirs = served.client("bob")
    path = listed[2].tinker_path
    with pytest.raises(tinker.NotFoundError):
        theirs.create_training_client_from_state(path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    copy = theirs.create_training_client_from_state(path).result()
    assert copy.get_info().lora_rank == 8
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        theirs.create_rest_client().get_weights_info_by_tinker_path(path).result()
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp, info.train_attn, info.train_unembed) == (MODEL, 8, True, True, False)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert [each.checkpoint_id for each in left] == ["sampler_weights/three", "weights/two"]


def test_wrong_keys_are_refused_and_others_objects_are_not_there(served, trainer):
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=served.url, api_key="tml-nobodys").get_server_capabilities()
    bob = served.client("bob")
    rest = bob.create_rest_client()
    path = trainer.save_state("mine").result().path
    sampler = trainer.save_weights_and_get_sampling_client().result()
    for call in (
        lambda: rest.get_training_run(trainer.model_id).result(),
        lambda: rest.list_checkpoints(trainer.model_id).result(),
        lambda: rest.delete_checkpoint_from_tinker_path(path).result(),
        lambda: rest.publish_checkpoint_from_tinker_path(path).result(),
        lambda: rest.get_session(trainer.model_id.partition(":")[0]).result(),
        lambda: rest.get_sampler(sampler._sampling_session_id).result(),
        lambda: bob.create_sampling_client(model_path=path).result(),
    ):
        with pytest.raises(tinker.NotFoundError):
            call()
    assert rest.list_training_runs().result().training_runs == [] or trainer.model_id not in [
        each.training_run_id for each in rest.list_training_runs().result().training_runs
    ]


def test_what_is_wrong_with_a_call_is_its_own_failure_and_the_next_one_runs(trainer):
    with pytest.raises(tinker.RequestFailedError, match="advantages, logprobs"):
        trainer.forward_backward(batch(6), "ppo").result()
    with pytest.raises(tinker.RequestFailedError, match="vocabulary"):
        trainer.forward_backward([datum([1, 2, 10_000_000])], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="forward_backward"):
        trainer.optim_step(adam()).result()
    trainer.forward_backward(batch(6), "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match="betas"):
        trainer.optim_step(adam(beta1=1.5)).result()
    trainer.optim_step(adam()).result()


def test_a_restart_of_the_server_between_calls_is_not_noticed(served, ann, trainer):
    data = batch(7)
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(adam()).result()
    sampler = trainer.save_weights_and_get_sampling_client()
    before = logprobs_of(trainer, data)
    served.stop()
    served.start()
    for have, want in zip(logprobs_of(trainer, data), before, strict=True):
        np.testing.assert_array_equal(have, want)
    tokens = [*data[0].model_input.to_ints(), 9]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(np.array(scored[1:-1], float), before[0][: len(tokens) - 2], atol=1e-4)
    loss = trainer.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
    trainer.optim_step(adam()).result()
    assert trainer.forward(data, "cross_entropy").result().metrics["loss:sum"] < loss
    assert ann.create_rest_client().get_training_run(trainer.model_id).result().corrupted is False


class Raw:
    """Requests one by one, in any order."""

    def __init__(self, served: Served) -> None:
        self.http = httpx.Client(base_url=f"{served.url}/api/v1", headers={"X-API-Key": served.keys["ann"]})
        self.session = self.post("create_session", tags=[]).json()["session_id"]
        self.model = ""

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def create(self, number: int, path: str | None = None) -> None:
        """A model from nothing, or from a checkpoint."""
        where = {"session_id": self.session, "model_seq_id": number}
        if path is None:
            promise = self.post("create_model", base_model=MODEL, lora_config={"rank": 4}, **where)
        else:
            promise = self.post("load_weights", path=path, optimizer=True, **where)
        self.model = self.result(promise).json()["model_id"]
        assert self.model == f"{self.session}:train:{number}", "the SDK computes the id by itself"

    def run(self, seq_id: int, data: list[types.Datum]) -> httpx.Response:
        fields = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
        request = types.ForwardBackwardRequest(forward_backward_input=fields, model_id=self.model, seq_id=seq_id)
        return self.http.post("forward_backward", content=forward_backward_request_to_proto(request).SerializeToString())

    def step(self, seq_id: int, **params: float) -> httpx.Response:
        return self.post("optim_step", model_id=self.model, seq_id=seq_id, adam_params=params)

    def poll(self, promise: httpx.Response) -> httpx.Response:
        assert promise.status_code == 200, promise.text
        return self.post("retrieve_future", request_id=promise.json()["request_id"])

    def result(self, promise: httpx.Response) -> httpx.Response:
        for _ in range(60):
            answer = self.poll(promise)
            if answer.status_code != 408:
                return answer
            assert answer.json()["type"] == "try_again"
        raise AssertionError("no result")


def test_requests_run_by_their_numbers_and_a_repeated_one_runs_once(served):
    raw = Raw(served)
    first, second = batch(8, 2), batch(9, 2)
    raw.create(0)
    path = raw.result(raw.post("save_weights", model_id=raw.model, seq_id=1, path="begin")).json()["path"]
    raw.create(1, path)
    in_order = [raw.run(1, first), raw.step(2, learning_rate=1e-2), raw.run(3, second), raw.step(4, learning_rate=1e-2), raw.run(5, first)]
    want = [raw.result(promise) for promise in in_order]
    raw.create(2, path)
    promises = {3: raw.run(3, second), 5: raw.run(5, first), 2: raw.step(2, learning_rate=1e-2)}
    assert raw.poll(promises[2]).status_code == 408, "a request ran before its predecessor came"
    promises |= {4: raw.step(4, learning_rate=1e-2), 1: raw.run(1, first)}
    have = [raw.result(promises[seq]) for seq in (1, 2, 3, 4, 5)]
    for index in (0, 2, 4):
        mine, theirs = (deserialize_forward_backward_output(each[index].content) for each in (have, want))
        assert mine.metrics == theirs.metrics
    assert [have[1].json(), have[3].json()] == [want[1].json(), want[3].json()]
    # Lost answers: the same request again is the same call, and its result is there again.
    again = raw.run(1, first)
    assert again.json()["request_id"] == promises[1].json()["request_id"]
    assert raw.result(again).content == have[0].content
    assert raw.run(1, second).status_code == 409
    last = deserialize_forward_backward_output(raw.result(raw.run(6, first)).content)
    assert last.metrics == deserialize_forward_backward_output(have[4].content).metrics, "a repeated request ran again"


def test_a_repeated_sample_is_sampled_once_and_its_sequences_keep_their_ids(served):
    raw = Raw(served)
    sampler = raw.post("create_sampling_session", session_id=raw.session, sampling_session_seq_id=0, base_model=MODEL).json()["sampling_session_id"]
    assert raw.http.get(f"samplers/{sampler}").json() == {"sampler_id": sampler, "base_model": MODEL, "model_path": None}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}, {"type": "encoded_text", "tokens": [7]}]}
    body = {"sampling_session_id": sampler, "num_samples": 3, "prompt": prompt, "sampling_params": {"max_tokens": 4}, "topk_sample_logprobs": 2}
    one, other = raw.post("asample", seq_id=1, **body), raw.post("asample", seq_id=1, **body)
    assert one.json() == other.json()
    assert len(set(one.json()["sample_sequence_ids"])) == 3
    results = [deserialize_sample_response(raw.result(promise).content) for promise in (one, other)]
    assert [each.tokens for each in results[0].sequences] == [each.tokens for each in results[1].sequences]
    top = results[0].sequences[0].topk_logprobs_np
    assert top is not None
    assert top.logprobs.shape[1] == 2
    refused = raw.post("asample", seq_id=2, **{**body, "topk_prompt_logprobs": 3})
    assert "topk_prompt_logprobs" in raw.result(refused).json()["error"]
    image = {**body, "prompt": {"chunks": [{"type": "image", "data": "x"}]}}
    assert raw.result(raw.post("asample", seq_id=3, **image)).json()["category"] == "user"
    ended = raw.post("unload_model", model_id="ses-none:train:0")
    assert ended.status_code == 404
    raw.create(0)
    assert raw.result(raw.post("unload_model", model_id=raw.model)).json()["model_id"] == raw.model
    assert "has ended" in raw.result(raw.step(1)).json()["error"]
